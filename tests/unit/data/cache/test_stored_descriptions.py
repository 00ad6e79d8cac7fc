"""Listings and descriptions of datasets in the cache: damaged ones are written again, old ones are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from openers import Opener, check_samples
from remotes import RemoteServer, write_files

from topkube.data import ArrayOf
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.manifest import generate_manifest

RECORD = ArrayOf("uint8", (3072,))


DAMAGES: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(b""),  # after a power failure
    lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
    lambda path: path.unlink(),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=["empty", "changed", "gone"])
@pytest.mark.parametrize("column", ["paths", "path_ends", "versions", "sizes", "samples", "checksums"])
def test_a_damaged_listing_is_read_from_the_manifest_again(
    remote: RemoteServer, open_dataset: Opener, column: str, damage: Callable[[Path], object]
) -> None:
    data = write_files(remote.folder, 8)
    manifest = remote.folder / "manifest.jsonl"
    manifest.write_text("".join(generate_manifest(remote.uri, checksums=True)))
    open_dataset(remote.uri, decode=RECORD).warm()
    open_dataset.close()
    remote.requests.clear()
    (stored,) = open_dataset.cache.glob(f"datasets/*/listings/*/{column}.npy")
    damage(stored)
    for _ in range(2):  # the first job repairs the stored listing
        check_samples(open_dataset(remote.uri, decode=RECORD), data)
        open_dataset.close()
    assert remote.requests == {"manifest.jsonl": 1}


def test_only_the_listing_of_the_newest_manifest_is_stored(remote: RemoteServer, open_dataset: Opener) -> None:
    write_files(remote.folder, 8)
    for size in (3, 8):
        lines = list(generate_manifest(remote.uri))[:size]
        (remote.folder / "manifest.jsonl").write_text("".join(lines))
        open_dataset(remote.uri)
    assert len(list(open_dataset.cache.glob("datasets/*/listings/*"))) == 1
    assert [len(dataset) for dataset in open_dataset.opened] == [3, 8]
    assert all(len(bytes(dataset[-1])) == 3072 for dataset in open_dataset.opened)


@pytest.mark.parametrize("damage", DAMAGES[:2], ids=["empty", "changed"])
def test_a_dataset_whose_description_is_damaged_counts_against_the_limit_again(
    remote: RemoteServer, open_dataset: Opener, damage: Callable[[Path], object]
) -> None:
    data = write_files(remote.folder, 8)
    open_dataset(remote.uri).warm()
    open_dataset.close()
    (description,) = open_dataset.cache.glob("datasets/*/dataset.json")
    damage(description)
    open_dataset(remote.uri).warm()
    tier = DiskTier(open_dataset.cache)
    assert [folder.uri for folder in tier.list_folders()] == [remote.uri]
    assert tier.count_used_bytes() == data.nbytes
