"""What neighbours put into a cache that they may write to makes no job remove or change files outside the cache."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from topkube.data.base.real_folders import open_real_folder
from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier
from topkube.data.formats.sample_index import IndexBuilder
from topkube.data.opening import list_dataset
from topkube.data.remote.object_store import ObjectStore

KEY, OTHER_KEY = "0" * 32, "1" * 32
PART = f".{KEY}.{OTHER_KEY}.part"


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return the folder of a dataset with one shard."""
    folder = DiskTier(tmp_path / "cache", DiskLimits(free=0)).open_folder("file:///x")
    publish(folder, KEY)
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder outside the cache, with files that have names of files of the cache."""
    outside = tmp_path / "outside"
    for name in ("best.pt", KEY, f"{KEY}.index", PART, "records", "dataset.json", "summary.json", "pinned"):
        write(outside / name)
    for name in ("step-1", "00", ".removed-x", "shards/00"):
        write(outside / name / KEY)
        write(outside / name / PART)
    return outside


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    os.utime(path, (1000, 1000))


def publish(folder: DatasetFolder, key: str) -> None:
    os.close(folder.publish(key, 10, lambda file: os.truncate(file, 10)))


def replace_with_link(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def describe(outside: Path) -> dict[str, tuple[bytes, float]]:
    """Return the bytes and the time of each file outside the cache."""
    return {
        str(path.relative_to(outside)): (path.read_bytes(), path.stat().st_mtime)
        for path in outside.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("form", ["absolute", "parent", "folder", "dataset", "shards", "prefix"])
def test_a_reservation_removes_no_other_file(folder: DatasetFolder, outside: Path, form: str) -> None:
    before, shards = describe(outside), folder.path / "shards"
    paths = {
        "absolute": str(outside / "best.pt"),
        "parent": "datasets/../../outside/best.pt",
        "folder": "datasets/x/best.pt",
        "dataset": f"datasets/{'a' * 16}/shards/00/{PART}",
        "shards": f"datasets/{folder.name}/shards/00/{PART}",
        "prefix": f"datasets/{folder.name}/shards/00/{PART}",
    }
    (folder.tier.directory / "datasets/x").symlink_to(outside)
    (folder.tier.directory / "datasets" / ("a" * 16)).symlink_to(outside)
    if form == "shards":
        replace_with_link(shards, outside)
    if form == "prefix":
        replace_with_link(shards / "00", outside)
    (folder.tier.directory / "reservations/forged").write_text(f"{0:020} {paths[form]}")
    DiskTier(folder.tier.directory)
    assert not list((folder.tier.directory / "reservations").iterdir())
    assert describe(outside) == before


@pytest.mark.parametrize("name", ["reservations", "datasets"])
def test_a_link_in_place_of_a_folder_of_the_tier_is_refused(folder: DatasetFolder, outside: Path, name: str) -> None:
    before = describe(outside)
    replace_with_link(folder.tier.directory / name, outside)
    with pytest.raises(NotADirectoryError, match=f"{name} is a link or a file, not a folder"):
        DiskTier(folder.tier.directory)
    assert describe(outside) == before


ACTIONS: dict[str, Callable[[DatasetFolder], object]] = {
    "quarantine": lambda folder: folder.quarantine(KEY),
    "evict": lambda folder: folder.evict(KEY),
    "publish": lambda folder: publish(folder, KEY),
    "store index": lambda folder: folder.store_index(KEY, IndexBuilder().finish()),
    "create": lambda folder: folder.create(),
    "write summary": lambda folder: folder.write_summary({"bytes": 1}),
    "pin": lambda folder: folder.pin(),
    "unpin": lambda folder: folder.pin(False),
    "touch": lambda folder: folder.touch(),
}


@pytest.mark.parametrize("link", ["", "shards", "shards/00", "quarantine", "records", "dataset.json"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_link_in_a_dataset_is_not_followed(folder: DatasetFolder, outside: Path, link: str, action: str) -> None:
    before = describe(outside)
    replace_with_link(folder.path / link, outside / link if link in ("records", "dataset.json") else outside)
    with contextlib.suppress(OSError):
        ACTIONS[action](folder)
    assert describe(outside) == before


def test_a_link_in_place_of_a_reservation_is_not_written(folder: DatasetFolder, outside: Path) -> None:
    before = describe(outside)
    reservation = folder.tier.reserve(10, folder.path / "shards/00" / PART, folder)
    replace_with_link(reservation.path, outside / "best.pt")
    with pytest.raises(OSError, match="symbolic links"):
        reservation.settle()
    assert describe(outside) == before


def test_a_link_in_place_of_a_dataset_is_no_dataset(folder: DatasetFolder) -> None:
    path = folder.tier.directory / "datasets/0123456789abcdef"
    path.symlink_to(folder.path)
    assert [found.name for found in folder.tier.list_folders()] == [folder.name]


def test_a_link_in_place_of_the_listings_is_not_followed(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/a.bin").write_bytes(b"x" * 100)
    (tmp_path / "remote/manifest.jsonl").write_text('{"path": "a.bin", "size": 100, "etag": "1"}\n')
    store, tier = ObjectStore(f"file://{tmp_path}/remote"), DiskTier(tmp_path / "cache")
    replace_with_link(tier.open_folder(store.uri).path / "listings", outside)
    before = describe(outside)
    assert len(list_dataset(store, tier)) == 1
    assert describe(outside) == before


def test_a_folder_that_becomes_a_link_stays_the_opened_folder(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    write(tmp_path / "outside/file")
    with open_real_folder(tmp_path, "a", "b", "c", created=1) as folder:
        (tmp_path / "a/b").rename(tmp_path / "moved")
        (tmp_path / "a/b").symlink_to(tmp_path / "outside")
        assert os.listdir(folder) == []
    with pytest.raises(NotADirectoryError), open_real_folder(tmp_path, "a", "b"):
        pass
