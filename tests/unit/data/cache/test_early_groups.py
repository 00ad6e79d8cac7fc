"""Row groups of Parquet shards that are read before their shard is whole."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest
import xxhash
from openers import PATIENT, Opener, release_when_waiting, wait_until
from remotes import Answer, RemoteServer

from topkube.data.cache.early import early_groups
from topkube.data.dataset import CachedDataset
from topkube.data.remote.retry import Changed
from topkube.errors import DatasetError

ROWS = [{"id": at, "text": f"row {at:04} " + "x" * 100} for at in range(2000)]


class LateTable:
    """A Parquet shard of 2,000 rows. Responses with the whole shard are late, so it is not in the cache before
    `release`. `lie` changes responses with a range of it."""

    def __init__(self, remote: RemoteServer, open_dataset: Opener, group_rows: int = 100) -> None:
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        self.remote, self._open_dataset = remote, open_dataset
        self.path = remote.folder / "0.parquet"
        pyarrow.parquet.write_table(
            arrow.Table.from_pylist(ROWS),
            self.path,
            row_group_size=group_rows,
            compression="none",
            use_dictionary=False,
        )
        self._arrives = threading.Event()
        self.lie: Callable[[Answer], None] = lambda answer: None
        self.ranges: list[tuple[int, int]] = []
        remote.alter = self._alter

    def _alter(self, path: str, answer: Answer) -> None:
        if answer.status == HTTPStatus.OK and path == self.path.name:
            self._arrives.wait(60)
        elif answer.status == HTTPStatus.PARTIAL_CONTENT:
            self.ranges.append((answer.start, answer.stop))
            self.lie(answer)

    def write_manifest(self, **fields: object) -> None:
        entry = {"path": self.path.name, "size": self.path.stat().st_size, "samples": len(ROWS), **fields}
        (self.remote.folder / "manifest.jsonl").write_text(json.dumps(entry) + "\n")

    def open(self) -> CachedDataset:
        """Open the dataset, and wait until its whole shard has been requested. Requests of ranges do not count."""
        dataset = self._open_dataset(self.remote.uri, early_samples=True, prefetch=True, patience=PATIENT)
        wait_until(lambda: self.remote.requests[self.path.name] > len(self.ranges))
        self.ranges.clear()
        return dataset

    def release(self) -> None:
        self._arrives.set()


@pytest.fixture
def late(remote: RemoteServer, open_dataset: Opener) -> Iterator[LateTable]:
    late = LateTable(remote, open_dataset)
    yield late
    late.release()


def test_rows_are_read_before_their_shard_is_whole_and_only_their_groups(late: LateTable) -> None:
    dataset = late.open()
    indices = [250, 299, 1999, 250]
    assert dataset.__getitems__(indices) == [ROWS[at] for at in indices]
    assert not dataset.cache.has(0)
    size = late.path.stat().st_size
    assert len(late.ranges) == 3, "the footer and two groups"
    assert all(stop - start < size / 4 for start, stop in late.ranges[1:])
    late.release()
    dataset.warm()
    late.ranges.clear()
    assert dataset.__getitems__(range(2000)) == ROWS
    assert not late.ranges, "all other rows come from the cache"


def change_a_row(answer: Answer) -> None:
    answer.data = answer.data.replace(b"row 0250", b"row 9999")


def test_two_contents_with_one_version_are_detected_when_the_shard_is_whole(late: LateTable) -> None:
    late.lie = change_a_row
    dataset = late.open()
    assert dataset[250]["text"].startswith("row 9999")  # a version without a checksum cannot show this now
    late.release()
    dataset.warm()
    with pytest.raises(Changed, match=r"0\.parquet was read before its shard was fetched, and had other bytes"):
        dataset[5]
    assert dataset[250] == ROWS[250], "the wrong rows are forgotten"


def test_two_contents_are_detected_at_the_latest_when_the_dataset_is_closed(late: LateTable) -> None:
    late.lie = change_a_row
    dataset = late.open()
    dataset[250]
    late.release()
    dataset.warm()
    with pytest.raises(Changed, match="had other bytes"):
        dataset.close()


def test_groups_are_compared_again_if_their_shard_could_not_be_read(
    late: LateTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.lie = change_a_row
    dataset = late.open()
    dataset[250]
    late.release()
    dataset.warm()
    with monkeypatch.context() as patch:
        patch.setattr(early_groups, "compute_digest", raise_disk_error)
        with pytest.raises(OSError, match="Input/output error"):
            dataset[5]
    with pytest.raises(Changed, match="had other bytes"):
        dataset[5]


def raise_disk_error(file: int, size: int, start: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_another_version_raises_an_error(late: LateTable) -> None:
    dataset = late.open()
    late.lie = lambda answer: answer.headers.update(ETag='"other"')
    with pytest.raises(Changed):
        dataset[250]


def test_ranges_that_do_not_arrive_are_awaited_with_the_shard(late: LateTable) -> None:
    dataset = late.open()
    late.lie = lambda answer: setattr(answer, "status", HTTPStatus.INTERNAL_SERVER_ERROR)
    release_when_waiting(dataset, late.release)
    assert dataset[250] == ROWS[250]


def test_a_damaged_footer_is_an_error_with_the_name_of_the_shard(late: LateTable) -> None:
    dataset = late.open()
    late.lie = lambda answer: setattr(answer, "data", answer.data[:-60] + bytes(60))
    with pytest.raises(DatasetError, match=r"0\.parquet cannot be read"):
        dataset[250]


@pytest.mark.parametrize("manifest", [{}, {"xxh3": True}], ids=["no version", "a checksum of the whole"])
def test_ranges_that_cannot_be_checked_are_not_read(late: LateTable, manifest: dict[str, object]) -> None:
    late.write_manifest(**{name: xxhash.xxh3_128_hexdigest(late.path.read_bytes()) for name in manifest})
    dataset = late.open()
    release_when_waiting(dataset, late.release)
    assert dataset[250] == ROWS[250]
    assert not late.ranges


def test_a_group_that_is_most_of_its_shard_is_not_read_alone(remote: RemoteServer, open_dataset: Opener) -> None:
    late = LateTable(remote, open_dataset, group_rows=1000)
    dataset = late.open()
    release_when_waiting(dataset, late.release)
    assert dataset[250] == ROWS[250]
    assert len(late.ranges) == 1, "the footer"
