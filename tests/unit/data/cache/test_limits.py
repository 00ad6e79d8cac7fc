"""The disk tier and the memory cache stay within their limits. The least recently used datasets are evicted first."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from openers import Opener, check_samples, wait_until
from remotes import write_files, write_tars

from topkube.data import ArrayOf
from topkube.data.cache.disk import publication
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier
from topkube.data.cache.memory.memory_column import MemoryColumn
from topkube.data.cache.memory.memory_tier import Frozen, MemoryTier
from topkube.data.cache.node_state import FROZEN
from topkube.data.dataset import CachedDataset
from topkube.data.formats.shards import Shards
from topkube.data.opening import check_limits
from topkube.data.remote.listing import Listing, RemoteObject
from topkube.errors import DatasetError

RECORD_BYTES = 3072
RECORD = ArrayOf("uint8", (RECORD_BYTES,))


def sum_disk_bytes(cache: Path) -> int:
    """Return the bytes of all shards and indexes on disk."""
    return sum(path.stat().st_size for path in cache.glob("datasets/*/shards/*/*"))


def test_the_least_recently_used_datasets_are_evicted_but_never_datasets_that_are_pinned_or_in_use(
    tmp_path: Path, open_dataset: Opener
) -> None:
    data = {name: write_files(tmp_path / name, 10) for name in ("old", "pinned", "new", "next", "last")}
    limit = 4 * 10 * RECORD_BYTES  # four datasets of 10 records
    for name in ("pinned", "old", "new"):
        check_samples(open_dataset(tmp_path / name, decode=RECORD, size_limit=limit), data[name])
        open_dataset.close()
    tier = DiskTier(open_dataset.cache)
    folders = {folder.uri.rpartition("/")[2]: folder for folder in tier.list_folders()}
    folders["pinned"].pin()
    for last_used, name in enumerate(("pinned", "old", "new"), 1000):
        # The modification time of this file is the time of the last use of the dataset.
        os.utime(folders[name].path / "dataset.json", (last_used, last_used))
    next_dataset = open_dataset(tmp_path / "next", decode=RECORD, size_limit=limit)
    check_samples(next_dataset, data["next"])
    in_use = next(folder for folder in tier.list_folders() if folder.uri.endswith("/next"))
    os.utime(in_use.path / "dataset.json", (999, 999))  # the oldest, but open
    last = open_dataset(tmp_path / "last", decode=RECORD, size_limit=limit)
    check_samples(last, data["last"])
    # Reading does not wait until the shard is in the cache. The eviction is counted after that, so the test waits.
    last.warm()
    assert {folder.uri.rpartition("/")[2] for folder in tier.list_folders()} == {"pinned", "new", "next", "last"}
    assert last.statistics()["evictions"] == 1


def test_a_dataset_counts_as_used_until_it_is_closed(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 10)
    open_dataset(tmp_path / "source")
    (folder,) = DiskTier(open_dataset.cache).list_folders()
    os.utime(folder.path / "dataset.json", (1000, 1000))  # it was opened long ago
    open_dataset.close()
    assert folder.last_used > time.time() - 3600


def test_within_a_job_the_tier_takes_shards_until_it_is_full_and_then_freezes(
    tmp_path: Path, open_dataset: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_files(tmp_path / "source", 100)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, group_bytes=30_000, size_limit=100_000)
    for _ in range(2):
        check_samples(dataset, data)
    assert dataset.node_state.disk_state == FROZEN
    assert DiskTier(open_dataset.cache).count_used_bytes() <= 100_000
    shards = range(len(dataset.cache.shards))
    # Three shards of about 30,000 bytes fit. Readers do not wait until the third shard is in the cache.
    wait_until(lambda: sum(map(dataset.cache.has, shards)) == 3)
    assert capfd.readouterr().err.count("takes no more shards") == 1


def test_the_memory_limit_holds(tmp_path: Path, open_dataset: Opener, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_files(tmp_path / "source", 100)
    limit = 50 * RECORD_BYTES
    # A limit must have room for a whole shard, so the 100 records are in several shards.
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=limit, group_bytes=30_000)
    for _ in range(2):
        check_samples(dataset, data)
    assert dataset.statistics()["memory_used_bytes"] == limit
    assert capfd.readouterr().err.count("memory cache takes no more samples") == 1


def test_jobs_with_different_memory_limits_do_not_share_samples(tmp_path: Path, open_dataset: Opener) -> None:
    """A job maps its own limit: records that another job stored behind it would be outside."""
    data = write_files(tmp_path / "source", 20)

    def open_limited(limit: int) -> CachedDataset:
        return open_dataset(
            tmp_path / "source", memory_limit=limit, fingerprint="raw", group_bytes=4000, prefetch=False
        )

    small, large = open_limited(5 * RECORD_BYTES), open_limited(20 * RECORD_BYTES)
    for dataset in (large, small, large):
        assert list(dataset.__getitems__(range(20))) == [row.tobytes() for row in data]
    assert [dataset.statistics()["memory_used_bytes"] for dataset in (small, large)] == [
        5 * RECORD_BYTES, 20 * RECORD_BYTES,
    ]  # fmt: skip


def test_space_that_a_failed_write_has_lost_counts_against_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets of its samples, which differ in size, are not used again. Without the count, the samples of another
    process would lie outside the columns."""
    samples = [bytes([number]) * 1000 for number in range(8)]
    first, second = (MemoryTier(tmp_path, "full", 8, 4000) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryColumn, "_write", fail_without_room)
        with pytest.raises(Frozen):
            first.admit(np.arange(3), samples[:3])
    with pytest.raises(Frozen):
        second.admit(np.arange(8), samples)
    assert np.flatnonzero(second.has(np.arange(8))).tolist() == [0]
    assert list(second.gather(np.array([0]))) == samples[:1]
    assert second.used_bytes == 4000
    first.close(), second.close()


def fail_without_room(column: MemoryColumn, array: object, offset: int) -> None:
    raise OSError(errno.ENOSPC, "no space")


def test_a_sample_outside_its_column_is_absent(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, "damaged", 4, 4000)
    tier.admit(np.arange(4), [bytes(1000)] * 3 + [bytes(500)])
    places = np.memmap(tier.folder / "column-0.places", np.int64).reshape(4, 8)
    places[2, 0] = 3001
    other = MemoryTier(tmp_path, "damaged", 4, 4000)
    assert other.has(np.arange(4)).tolist() == [True, True, False, True]
    assert other.check() == []
    tier.close(), other.close()


def test_indexes_count_against_the_limit(tmp_path: Path, open_dataset: Opener) -> None:
    """The index of a shard takes space too: here about 5% of the shard, because the samples are small."""
    write_tars(tmp_path / "source", [40] * 8, size=10)
    whole = open_dataset(tmp_path / "source")
    whole.warm()
    tier = DiskTier(open_dataset.cache)
    disk_bytes = sum_disk_bytes(open_dataset.cache)
    shard_bytes = int(whole.cache.shards.sizes.sum())
    assert tier.count_used_bytes() == disk_bytes > shard_bytes
    open_dataset.close()
    (folder,) = tier.list_folders()
    assert folder.log.sum_shard_bytes() == shard_bytes
    folder.remove()
    limit = shard_bytes + (disk_bytes - shard_bytes) // 2  # room for all shards, but not for all indexes
    limited = open_dataset(tmp_path / "source", size_limit=limit)
    assert len(limited) == 320
    limited.warm()
    assert sum_disk_bytes(open_dataset.cache) == DiskTier(open_dataset.cache).count_used_bytes() <= limit
    assert [int(sample["cls"]) for sample in limited.__getitems__(range(320))] == list(range(320))
    assert limited.cache.folder is not None
    for number in range(8):
        if limited.cache.has(number):
            limited.cache.folder.evict(limited.cache.shards.compute_key(number))  # and its index
    assert DiskTier(open_dataset.cache).count_used_bytes() == 0


@pytest.mark.parametrize("limit_name", ["size_limit", "memory_limit"])
def test_limits_below_the_largest_shard_are_refused_with_the_numbers(
    tmp_path: Path, open_dataset: Opener, limit_name: str
) -> None:
    write_files(tmp_path / "source", 20)  # two shards of 10 records
    with pytest.raises(DatasetError, match=r"1,000 bytes; the largest shard has 30,720 bytes"):
        open_dataset(tmp_path / "source", group_bytes=33_000, **{limit_name: 1000})


@pytest.mark.parametrize("ranks", [1, 4])
def test_limits_count_every_rank_of_the_node(ranks: int) -> None:
    shards = Shards("u", Listing.from_objects([RemoteObject("a", 600, "v"), RemoteObject("b", 1000, "v")], "u"), "tar")
    least = 1000 * ranks
    check_limits(shards, size_limit=least, memory_limit=least, ranks_per_node=ranks)
    no_limit = 0
    for size_limit, memory_limit in ((least - 1, no_limit), (no_limit, least - 1)):
        with pytest.raises(DatasetError, match=rf"largest shard has 1,000 bytes.*at least {least:,} bytes"):
            check_limits(shards, size_limit, memory_limit, ranks)


@pytest.mark.parametrize("tested_step", ["recorded", "renamed", "published"])
def test_a_shard_never_counts_twice_against_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tested_step: str
) -> None:
    """The limit has room for two shards: the shard that is being published, and the shard of another process."""
    limits = DiskLimits(size=2000, free=0)
    folder = DiskTier(tmp_path / "cache", limits).open_folder("file:///x")
    reservations = []

    def reserve_room(step: str) -> None:
        if step == tested_step:
            other = DiskTier(tmp_path / "cache", limits)
            # Raises Full if the shard that is being published counts twice.
            reservations.append(other.reserve(1000, folder.path / "part", folder))

    monkeypatch.setattr(publication, "notify_step", reserve_room)
    os.close(folder.publish("0" * 32, 1000, lambda file: None))
    (reservation,) = reservations  # the tested step was reached
    reservation.release()
