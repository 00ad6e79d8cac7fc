"""Samples of tar shards that are read before their shard is whole, by the index beside the manifest."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import xxhash
from openers import PATIENT, Opener, release_when_waiting, wait_until
from remotes import Answer, RemoteServer, write_tars

from topkube.data.base.batch import ArrayOf
from topkube.data.dataset import CachedDataset
from topkube.data.formats.checked_index import CheckedIndex, unpack_checked_index
from topkube.data.manifest import generate_manifest
from topkube.data.remote.retry import Changed
from topkube.errors import DatasetError

SIZE = 3072
SHARDS = (40, 40)
LATE, INDEX = "000.tar", "manifest.index"
FLIP_AT = 100


class LateTars:
    """Two shards of 40 samples, a manifest and its index. Responses with the whole first shard are late, so it is not
    in the cache before `release`. `lie` changes responses with a range of it, `lie_about_index` those with the
    index."""

    def __init__(self, remote: RemoteServer, open_dataset: Opener) -> None:
        self.remote, self._open_dataset = remote, open_dataset
        self.data = write_tars(remote.folder, list(SHARDS), SIZE)
        self._arrives = threading.Event()
        self.lie: Callable[[Answer], None] = lambda answer: None
        self.lie_about_index: Callable[[Answer], None] = lambda answer: None
        self.ranges: list[tuple[int, int]] = []
        self.write_manifest()
        remote.alter = self._alter

    def write_manifest(self, *, checksums: bool = False, index: bool = True) -> None:
        folder, alter = self.remote.folder, self.remote.alter
        self.remote.alter = None
        for name in ("manifest.jsonl", INDEX):
            (folder / name).unlink(missing_ok=True)
        lines = list(generate_manifest(self.remote.uri, True, checksums, folder / INDEX if index else None))
        (folder / "manifest.jsonl").write_text("".join(lines))
        self.remote.alter = alter
        self.remote.requests.clear()

    def change_index(self, change: Callable[[CheckedIndex], CheckedIndex]) -> None:
        """Replace the index of the first shard by another one, with the right checksum in the manifest."""
        manifest = self.remote.folder / "manifest.jsonl"
        entries = [json.loads(line) for line in manifest.read_text().splitlines()]
        packed = (self.remote.folder / INDEX).read_bytes()
        first, second = (packed[start : start + size] for start, size, _ in (entry["index"] for entry in entries))
        first = change(unpack_checked_index(first, entries[0]["size"])).pack()
        (self.remote.folder / INDEX).write_bytes(first + second)
        for entry, start, part in ((entries[0], 0, first), (entries[1], len(first), second)):
            entry["index"] = [start, len(part), xxhash.xxh3_128_hexdigest(part)]
        manifest.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def _alter(self, path: str, answer: Answer) -> None:
        if path == INDEX:
            self.lie_about_index(answer)
        elif answer.status == HTTPStatus.OK and path == LATE:
            self._arrives.wait(60)
        elif answer.status == HTTPStatus.PARTIAL_CONTENT and path == LATE:
            self.ranges.append((answer.start, answer.stop))
            self.lie(answer)

    def open(self, **options: Any) -> CachedDataset:
        """Open the dataset, and wait until only its first shard is missing. `options` are those of CachedDataset."""
        all_options = {"early_samples": True, "prefetch": True, "patience": PATIENT, **options}
        dataset = self._open_dataset(self.remote.uri, **all_options)
        wait_until(lambda: self.remote.requests[LATE])
        wait_until(lambda: dataset.cache.has(1))
        return dataset

    def release(self) -> None:
        self._arrives.set()

    def sample(self, number: int) -> dict[str, Any]:
        return {"__key__": f"{number:06}", "bin": self.data[number].tobytes(), "cls": str(number).encode()}


@pytest.fixture
def late(remote: RemoteServer, open_dataset: Opener) -> Iterator[LateTars]:
    late = LateTars(remote, open_dataset)
    yield late
    late.release()


def test_samples_are_read_before_their_shard_is_whole_and_nothing_else_is_requested(late: LateTars) -> None:
    dataset = late.open()
    assert dataset[3] == late.sample(3)
    indices = [39, 3, 70, 0]
    assert dataset.__getitems__(indices) == [late.sample(number) for number in indices]
    assert not dataset.cache.has(0)
    assert late.remote.requests[INDEX] == 1
    assert len(late.ranges) == 4
    assert all(stop - start < SIZE + 1024 for start, stop in late.ranges)
    late.release()
    dataset.warm()
    late.ranges.clear()
    assert dataset.__getitems__(range(80)) == [late.sample(number) for number in range(80)]
    assert not late.ranges, "all other samples come from the cache"


@pytest.mark.parametrize("etags", ["strong", "weak", "none"])
def test_a_field_of_a_batch_is_read_early_with_any_version(etags: str, late: LateTars) -> None:
    """The checksums of the index show that the bytes are right, so the store need not send a version."""
    late.remote.etags = etags
    late.write_manifest(checksums=True)
    dataset = late.open(decode=ArrayOf("uint8", (SIZE,), field="bin"))
    indices = np.array([5, 60, 1, 79, 5])
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(indices))), late.data[indices])
    assert not dataset.cache.has(0)
    late.release()
    dataset.warm()
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(80)))), late.data)


def flip(answer: Answer) -> None:
    answer.data = answer.data[:FLIP_AT] + bytes([answer.data[FLIP_AT] ^ 1]) + answer.data[FLIP_AT + 1 :]


def test_wrong_bytes_with_right_headers_are_never_returned(late: LateTars) -> None:
    late.lie = flip
    dataset = late.open()
    with pytest.raises(Changed, match=r"sample '000003' of 000\.tar has the checksum"):
        dataset[3]


def test_a_range_of_another_version_raises_an_error(late: LateTars) -> None:
    late.lie = lambda answer: answer.headers.update(ETag='"other"')
    dataset = late.open()
    with pytest.raises(Changed, match="is no longer the object that was listed"):
        dataset[3]


def test_after_a_range_that_cannot_be_read_the_shard_is_awaited(late: LateTars) -> None:
    late.lie = lambda answer: setattr(answer, "status", HTTPStatus.FORBIDDEN)
    dataset = late.open()
    release_when_waiting(dataset, late.release)
    assert dataset[3] == late.sample(3)
    assert dataset.cache.has(0)


def test_a_quarter_of_a_shard_is_read_early_and_then_it_is_awaited(late: LateTars) -> None:
    dataset = late.open()
    early = list(range(10))
    assert dataset.__getitems__(early[:6]) == [late.sample(number) for number in early[:6]]
    assert dataset.__getitems__(early[6:]) == [late.sample(number) for number in early[6:]]
    assert not dataset.cache.has(0)
    shard_bytes = (late.remote.folder / LATE).stat().st_size
    assert sum(stop - start for start, stop in late.ranges) <= shard_bytes / 4
    release_when_waiting(dataset, late.release)
    assert dataset.__getitems__(range(10, 14)) == [late.sample(number) for number in range(10, 14)]
    assert len(late.ranges) == 10
    assert dataset.cache.has(0)


def test_without_an_index_nothing_is_read_early(late: LateTars) -> None:
    late.write_manifest(index=False)
    dataset = late.open()
    release_when_waiting(dataset, late.release)
    assert dataset[3] == late.sample(3)
    assert not late.ranges


def test_nothing_is_read_early_unless_the_option_is_set(late: LateTars) -> None:
    dataset = late.open(early_samples=False)
    release_when_waiting(dataset, late.release)
    assert dataset[3] == late.sample(3)
    assert not late.ranges
    assert not late.remote.requests[INDEX]


def flip_end(answer: Answer) -> None:
    answer.data = answer.data[:-1] + bytes([answer.data[-1] ^ 1])  # the name of a field, so all places are valid


WRONG_INDEXES: dict[str, Callable[[Answer], None]] = {
    "flipped": flip_end,
    "not uploaded": lambda answer: setattr(answer, "status", HTTPStatus.NOT_FOUND),
    "of another size": lambda answer: answer.headers.update({"Content-Range": f"bytes 0-{answer.stop - 1}/9999999"}),
}


@pytest.mark.parametrize("wrong", WRONG_INDEXES)
def test_an_index_that_does_not_belong_to_the_manifest_is_an_error(wrong: str, late: LateTars) -> None:
    late.lie_about_index = WRONG_INDEXES[wrong]
    dataset = late.open()
    with pytest.raises(DatasetError, match=r"the index of 000\.tar in .*manifest\.index cannot be used") as caught:
        dataset[3]
    assert "cache manifest --index" in str(caught.value)


def test_if_the_store_fails_to_send_the_index_the_shard_is_awaited(late: LateTars) -> None:
    late.lie_about_index = lambda answer: setattr(answer, "status", HTTPStatus.SERVICE_UNAVAILABLE)
    dataset = late.open()
    release_when_waiting(dataset, late.release)
    assert dataset[3] == late.sample(3)
    assert not late.ranges


def swap_fields(checked: CheckedIndex) -> CheckedIndex:
    return replace(checked, index=replace(checked.index, fields=checked.index.fields[::-1]))


def shift_samples(checked: CheckedIndex) -> CheckedIndex:
    """Every sample gets the bytes of the next one, with their right checksum."""
    index = checked.index
    order = np.roll(np.arange(len(index)), -1)
    columns = {name: getattr(index, name)[order] for name in ("offsets", "sizes", "starts", "lengths")}
    return CheckedIndex(replace(index, **columns), checked.checksums[order])


@pytest.mark.parametrize("change", [swap_fields, shift_samples])
def test_an_index_that_differs_from_its_shard_is_detected_when_the_shard_is_whole(
    change: Callable[[CheckedIndex], CheckedIndex], late: LateTars
) -> None:
    late.change_index(change)
    dataset = late.open()
    assert dataset[13] != late.sample(13)  # the manifest vouches for a wrong index
    late.release()
    dataset.warm()
    with pytest.raises(Changed, match=r"the index of 000\.tar was read before its shard was fetched"):
        dataset[5]


def test_an_index_with_another_number_of_samples_than_the_manifest_is_refused(late: LateTars) -> None:
    def drop_last(checked: CheckedIndex) -> CheckedIndex:
        index = checked.index
        ends = index.names.ends[:-1]
        names = replace(index.names, blob=index.names.blob[: int(ends[-1])], ends=ends)
        columns = {name: getattr(index, name)[:-1] for name in ("offsets", "sizes", "starts", "lengths")}
        return CheckedIndex(replace(index, names=names, **columns), checked.checksums[:-1])

    late.change_index(drop_last)
    dataset = late.open()
    with pytest.raises(DatasetError, match="it has 39 samples, the manifest has 40"):
        dataset[3]


def test_all_indexes_of_a_batch_come_at_the_same_time(remote: RemoteServer, open_dataset: Opener) -> None:
    """The index of each of 16 shards of a window is a request; a batch must not wait for 16 round trips."""
    data = write_tars(remote.folder, [20] * 4, SIZE)
    lines = list(generate_manifest(remote.uri, True, False, remote.folder / INDEX))
    (remote.folder / "manifest.jsonl").write_text("".join(lines))
    arrives, indexes_come = threading.Event(), threading.Barrier(4, timeout=60)

    def alter(path: str, answer: Answer) -> None:
        if path == INDEX:
            indexes_come.wait()  # all four requests are under way
        elif answer.status == HTTPStatus.OK and path.endswith(".tar"):
            arrives.wait(60)

    remote.alter = alter
    try:
        dataset = open_dataset(remote.uri, early_samples=True, prefetch=True, patience=PATIENT)
        samples = dataset.__getitems__([0, 20, 40, 60])
        assert [sample["bin"] for sample in samples] == [data[number].tobytes() for number in (0, 20, 40, 60)]
    finally:
        arrives.set()
