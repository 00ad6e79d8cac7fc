"""Limits hold, datasets are evicted in order, and memory has one copy, which the last user removes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from openers import Opener, check_samples, list_shard_files, wait_until
from processes import fork, wait_for_end
from remotes import RemoteServer, write_files, write_tars

from topkube.data import ArrayOf
from topkube.data.cache.disk import publication
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier
from topkube.data.cache.node_state import FROZEN
from topkube.data.formats.shards import Shards
from topkube.data.opening import check_limits
from topkube.data.remote.listing import Listing, RemoteObject
from topkube.errors import DatasetError

RECORD = ArrayOf("uint8", (3072,))


def test_the_least_recently_used_datasets_are_evicted_but_never_pinned_or_used_datasets(
    tmp_path: Path, open_dataset: Opener
) -> None:
    data = {name: write_files(tmp_path / name, 10) for name in ("old", "pinned", "new", "next", "last")}
    limit = 4 * 10 * 3072
    for name in ("pinned", "old", "new"):
        check_samples(open_dataset(tmp_path / name, decode=RECORD, size_limit=limit), data[name])
        open_dataset.close()
    tier = DiskTier(open_dataset.cache)
    folders = {folder.uri.rpartition("/")[2]: folder for folder in tier.list_folders()}
    folders["pinned"].pin()
    for age, name in enumerate(("new", "old", "pinned")):
        os.utime(folders[name].path / "dataset.json", (1000 - age, 1000 - age))
    using = open_dataset(tmp_path / "next", decode=RECORD, size_limit=limit)
    check_samples(using, data["next"])
    last = open_dataset(tmp_path / "last", decode=RECORD, size_limit=limit)
    check_samples(last, data["last"])
    last.warm()  # a shard can be read a moment before it is counted
    assert {folder.uri.rpartition("/")[2] for folder in tier.list_folders()} == {"pinned", "new", "next", "last"}
    assert last.statistics()["evictions"] == 1


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
    wait_until(lambda: sum(map(dataset.cache.has, shards)) == 3)  # readers do not wait for the last shard
    assert capfd.readouterr().err.count("takes no more shards") == 1


def test_outdated_shards_are_evicted_first(remote: RemoteServer, open_dataset: Opener) -> None:
    limit = 30 * 3072
    data = write_files(remote.folder, 20)
    check_samples(open_dataset(remote.uri, decode=RECORD, size_limit=limit), data)
    open_dataset.close()
    data = write_files(remote.folder, 20, seed=1)
    dataset = open_dataset(remote.uri, decode=RECORD, size_limit=limit)
    check_samples(dataset, data)
    dataset.warm()
    assert dataset.cache.has(0)
    assert len(list_shard_files(open_dataset.cache)) == 1


def test_check_detects_bits_that_flipped_in_memory(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(dataset, data)
    (column,) = open_dataset.memory.glob("*/memory-*/column-0")
    with column.open("r+b") as file:
        file.seek(7 * 3072 + 5)
        file.write(bytes([data[7, 5] ^ 1]))
    memory: Any = dataset._samples.memory
    assert memory.check() == [7]
    check_samples(dataset, data)
    assert memory.check() == []


def test_memory_is_one_copy_for_all_processes_and_the_last_removes_it(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)
    first = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(first, data)
    second = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(second, data)
    assert second.statistics()["memory_misses"] == 0
    assert second.statistics()["memory_used_bytes"] == data.nbytes
    open_dataset.close()
    assert not [path for path in open_dataset.memory.rglob("*") if path.is_file()]


def test_memory_of_killed_processes_is_not_used(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)

    def train() -> None:
        check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
        (column,) = open_dataset.memory.glob("*/memory-*/column-0")
        column.write_bytes(bytes(data.nbytes))
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_end(fork(train)) == -signal.SIGKILL
    check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)


def test_the_memory_limit_holds(tmp_path: Path, open_dataset: Opener, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_files(tmp_path / "source", 100)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=50 * 3072, group_bytes=30_000)
    for _ in range(2):
        check_samples(dataset, data)
    assert dataset.statistics()["memory_used_bytes"] == 50 * 3072
    assert capfd.readouterr().err.count("memory cache takes no more samples") == 1


def test_indexes_count_against_the_limit(tmp_path: Path, open_dataset: Opener) -> None:
    """The indexes of shards with many small samples are as large as the shards."""
    write_tars(tmp_path / "source", [40] * 8, size=10)
    whole = open_dataset(tmp_path / "source")
    whole.warm()
    tier = DiskTier(open_dataset.cache)
    on_disk = sum(path.stat().st_size for path in open_dataset.cache.glob("datasets/*/shards/*/*"))
    shards = int(whole.cache.shards.sizes.sum())
    assert tier.count_used_bytes() == on_disk > shards
    open_dataset.close()
    (folder,) = tier.list_folders()
    assert folder.log.sum_shard_bytes() == shards
    folder.remove()
    limit = shards + (on_disk - shards) // 2
    limited = open_dataset(tmp_path / "source", size_limit=limit)
    assert len(limited) == 320
    limited.warm()
    used = sum(path.stat().st_size for path in open_dataset.cache.glob("datasets/*/shards/*/*"))
    assert used == DiskTier(open_dataset.cache).count_used_bytes() <= limit
    assert [int(sample["cls"]) for sample in limited.__getitems__(range(320))] == list(range(320))
    for number in range(8):
        if limited.cache.has(number) and limited.cache.folder is not None:
            limited.cache.folder.evict(limited.cache.shards.compute_key(number))
    assert DiskTier(open_dataset.cache).count_used_bytes() == 0


@pytest.mark.parametrize("tier", ["size_limit", "memory_limit"])
def test_limits_below_the_largest_shard_are_refused_with_the_numbers(
    tmp_path: Path, open_dataset: Opener, tier: str
) -> None:
    write_files(tmp_path / "source", 20)
    with pytest.raises(DatasetError, match=r"1,000 bytes; the largest shard has 30,720 bytes"):
        open_dataset(tmp_path / "source", group_bytes=33_000, **{tier: 1000})


@pytest.mark.parametrize("ranks", [1, 4])
def test_limits_count_every_rank_of_the_node(ranks: int) -> None:
    shards = Shards("u", Listing.from_objects([RemoteObject("a", 600, "v"), RemoteObject("b", 1000, "v")], "u"), "tar")
    check_limits(shards, 1000 * ranks, 1000 * ranks, ranks)
    for limits in ((1000 * ranks - 1, 0), (0, 1000 * ranks - 1)):
        with pytest.raises(DatasetError, match=rf"largest shard has 1,000 bytes.*at least {1000 * ranks:,} bytes"):
            check_limits(shards, *limits, ranks)


@pytest.mark.parametrize("at", ["recorded", "renamed", "published"])
def test_a_shard_never_counts_twice_against_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    folder = DiskTier(tmp_path / "cache", DiskLimits(2000, 0)).open_folder("file:///x")
    reservations = []

    def reserve_room(step: str) -> None:
        if step == at and not reservations:
            other = DiskTier(tmp_path / "cache", DiskLimits(2000, 0))
            reservations.append(other.reserve(1000, folder.path / "part", folder))

    monkeypatch.setattr(publication, "notify_step", reserve_room)
    os.close(folder.publish("0" * 32, 1000, lambda file: None))
    assert reservations
    reservations[0].release()
