"""Samples that are read before their shard is whole: from a server that is late, changes objects, and lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest
import xxhash
from openers import PATIENT, Opener, check_samples, release_when_waiting, wait_until
from remotes import Answer, RemoteServer, write_files

from topkube.data.dataset import CachedDataset
from topkube.data.remote.retry import Changed
from topkube.errors import StoreError

LATE, EARLY = "a/00000.bin", "a/00003.bin"


class LateShard:
    """A shard of 20 files. Its first file is late, so the shard is not whole before `release`. `lie` changes all
    responses for EARLY but the first, which belongs to the shard."""

    def __init__(self, remote: RemoteServer, open_dataset: Opener) -> None:
        self.remote, self._open_dataset = remote, open_dataset
        self.data = write_files(remote.folder, 20)
        self._arrives = threading.Event()
        self.lie: Callable[[Answer], None] = lambda answer: None
        remote.alter = self._alter

    def _alter(self, path: str, answer: Answer) -> None:
        if path == LATE:
            self._arrives.wait(60)
        if path == EARLY and self.remote.requests[path] >= 2:
            self.lie(answer)

    def write_manifest(self, *, checksums: bool) -> None:
        paths = sorted(path for path in self.remote.folder.glob("*/*.bin"))
        with (self.remote.folder / "manifest.jsonl").open("w") as file:
            for path in paths:
                entry = {"path": str(path.relative_to(self.remote.folder)), "size": path.stat().st_size}
                if checksums:
                    entry["xxh3"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
                file.write(json.dumps(entry) + "\n")

    def open(self, *, early_samples: bool = True) -> CachedDataset:
        dataset = self._open_dataset(self.remote.uri, early_samples=early_samples, prefetch=True, patience=PATIENT)
        wait_until(lambda: self.remote.requests[EARLY])
        return dataset

    def release(self) -> None:
        self._arrives.set()


@pytest.fixture
def late_shard(remote: RemoteServer, open_dataset: Opener) -> Iterator[LateShard]:
    late = LateShard(remote, open_dataset)
    yield late
    late.release()


def test_a_sample_is_read_before_its_shard_is_whole(late_shard: LateShard) -> None:
    dataset = late_shard.open()
    assert bytes(dataset[3]) == late_shard.data[3].tobytes()
    assert late_shard.remote.requests[EARLY] == 2
    assert not dataset.cache.has(0)
    late_shard.release()
    dataset.warm()
    decoded = [np.frombuffer(sample, np.uint8) for sample in dataset.__getitems__(range(20))]
    np.testing.assert_array_equal(decoded, late_shard.data)
    assert late_shard.remote.requests[EARLY] == 2


def test_a_batch_has_early_and_whole_samples_in_order(remote: RemoteServer, open_dataset: Opener) -> None:
    late = LateShard(remote, open_dataset)
    dataset = open_dataset(
        remote.uri, early_samples=True, prefetch=True, patience=PATIENT, group_bytes=10 * late.data.shape[1]
    )
    wait_until(lambda: dataset.cache.has(1))
    indices = [13, 3, 19, 1, 3, 10]
    assert [bytes(sample) for sample in dataset.__getitems__(indices)] == [late.data[at].tobytes() for at in indices]
    assert not dataset.cache.has(0)
    late.release()


def test_two_contents_with_one_version_are_detected_when_the_shard_is_whole(late_shard: LateShard) -> None:
    late_shard.lie = lambda answer: setattr(answer, "data", answer.data[::-1])
    dataset = late_shard.open()
    assert bytes(dataset[3]) == late_shard.data[3][::-1].tobytes()  # a version without a checksum cannot show this now
    late_shard.release()
    dataset.warm()
    with pytest.raises(Changed, match=r"a/00003\.bin was read before its shard was fetched, and had other bytes"):
        dataset[5]


def test_two_contents_are_detected_at_the_latest_when_the_dataset_is_closed(late_shard: LateShard) -> None:
    late_shard.lie = lambda answer: setattr(answer, "data", answer.data[::-1])
    dataset = late_shard.open()
    dataset[3]
    late_shard.release()
    dataset.warm()
    with pytest.raises(Changed, match="had other bytes"):
        dataset.close()


def test_samples_are_compared_again_if_their_shard_could_not_be_read(
    late_shard: LateShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_shard.lie = lambda answer: setattr(answer, "data", answer.data[::-1])
    dataset = late_shard.open()
    dataset[3]
    late_shard.release()
    dataset.warm()
    with monkeypatch.context() as patch:
        patch.setattr(dataset.cache, "load_index", raise_store_error)
        with pytest.raises(StoreError, match="no longer reachable"):
            dataset[5]
    with pytest.raises(Changed, match="had other bytes"):
        dataset[5]


def raise_store_error(number: int) -> None:
    raise StoreError("the remote is no longer reachable")


def test_with_a_checksum_in_the_manifest_wrong_bytes_are_never_returned(late_shard: LateShard) -> None:
    late_shard.write_manifest(checksums=True)
    late_shard.lie = lambda answer: setattr(answer, "data", answer.data[::-1])
    dataset = late_shard.open()
    with pytest.raises(Changed, match="has the checksum"):
        dataset[3]


def set_headers(answer: Answer, **headers: str) -> None:
    answer.headers.update(headers)


LIES: dict[str, Callable[[Answer], None]] = {
    "another version": lambda answer: set_headers(answer, ETag='"other"'),
    "shorter": lambda answer: setattr(answer, "data", answer.data[:-1]),
    "longer": lambda answer: setattr(answer, "data", answer.data + b"x"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_response_of_another_version_raises_an_error(lie: str, late_shard: LateShard) -> None:
    late_shard.lie = LIES[lie]
    dataset = late_shard.open()
    with pytest.raises(Changed, match="is no longer the object that was listed"):
        dataset[3]


EVASIONS: dict[str, Callable[[Answer], None]] = {
    "a page": lambda answer: set_headers(answer, **{"Content-Type": "text/html"}),
    "no version": lambda answer: answer.headers.clear(),
    "a range": lambda answer: setattr(answer, "status", HTTPStatus.PARTIAL_CONTENT),
    "not there": lambda answer: setattr(answer, "status", HTTPStatus.NOT_FOUND),
    "compressed": lambda answer: set_headers(answer, **{"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("evasion", EVASIONS)
def test_after_a_response_that_cannot_be_checked_the_shard_is_awaited(evasion: str, late_shard: LateShard) -> None:
    late_shard.lie = EVASIONS[evasion]
    dataset = late_shard.open()
    release_when_waiting(dataset, late_shard.release)
    assert bytes(dataset[3]) == late_shard.data[3].tobytes()
    assert dataset.cache.has(0)


def test_without_checksum_and_version_nothing_is_read_early(late_shard: LateShard) -> None:
    late_shard.write_manifest(checksums=False)
    dataset = late_shard.open()
    release_when_waiting(dataset, late_shard.release)
    assert bytes(dataset[3]) == late_shard.data[3].tobytes()
    assert late_shard.remote.requests[EARLY] == 1


def test_nothing_is_read_early_unless_the_option_is_set(late_shard: LateShard) -> None:
    dataset = late_shard.open(early_samples=False)
    release_when_waiting(dataset, late_shard.release)
    assert bytes(dataset[3]) == late_shard.data[3].tobytes()
    assert late_shard.remote.requests[EARLY] == 1


def test_without_fillers_a_shard_is_fetched_and_not_read_early(late_shard: LateShard, open_dataset: Opener) -> None:
    late_shard.release()
    dataset = open_dataset(late_shard.remote.uri, early_samples=True, prefetch=False)
    assert bytes(dataset[3]) == late_shard.data[3].tobytes()
    assert dataset.cache.has(0)


def test_local_files_are_not_read_early(tmp_path: Path, open_dataset: Opener) -> None:
    """Reading a file has no condition on its version."""
    data = write_files(tmp_path / "source", 4)
    dataset = open_dataset(tmp_path / "source", early_samples=True)
    assert not dataset.cache.store.can_check(dataset.cache.shards.listing[0])
    check_samples(
        open_dataset(tmp_path / "source", early_samples=True, decode=lambda raw: np.frombuffer(raw, np.uint8)), data
    )
