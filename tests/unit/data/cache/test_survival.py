"""No crash, full disk or corrupt byte reaches a batch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openers import Opener, check_samples, list_shard_files
from processes import fork, run_on_volume, wait_for_end
from remotes import RemoteServer, write_files, write_tars

from topkube.data import ArrayOf
from topkube.data.base.file_lock import FileLock
from topkube.data.cache import node_state, shard_cache
from topkube.data.cache.disk import publication
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier
from topkube.data.cache.node_state import NodeState
from topkube.errors import CacheError, StoreError

RECORD = ArrayOf("uint8", (3072,))
STEPS = ("reserved", "created", "filled", "hashed", "synced", "recorded", "renamed", "published")


@pytest.mark.parametrize("at", STEPS)
def test_a_kill_at_any_step_of_a_publication_loses_at_most_that_shard(
    tmp_path: Path, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    data = write_files(tmp_path / "source", 20)

    def die(step: str) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        monkeypatch.setattr(publication, "notify_step", die)
        open_dataset(tmp_path / "source", decode=RECORD, group_bytes=20_000, prefetch=False)[0]

    assert wait_for_end(fork(train)) == -signal.SIGKILL
    dataset = open_dataset(tmp_path / "source", decode=RECORD, group_bytes=20_000)
    check_samples(dataset, data)
    dataset.warm()
    files = list_shard_files(open_dataset.cache)
    assert len(files) == len(dataset.cache.shards)
    assert not any(path.suffix == ".part" for path in files)
    assert not list((open_dataset.cache / "reservations").iterdir())
    assert DiskTier(open_dataset.cache).count_used_bytes() == data.nbytes
    assert dataset.statistics()["corruptions"] == 0


def test_a_fork_while_a_lock_is_released_keeps_its_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data loader starts its workers while other threads publish shards: a pipe to a worker may reuse the number of
    a lock's descriptor that has just been closed."""
    close, endings = os.close, []

    def close_then_fork(file: int) -> None:
        close(file)
        monkeypatch.setattr(os, "close", close)
        pipe = os.pipe()
        assert file in pipe
        endings.append(wait_for_end(fork(lambda: [os.fstat(end) for end in pipe])))
        for end in pipe:
            close(end)

    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    monkeypatch.setattr(os, "close", close_then_fork)
    lock.release()
    assert endings == [0]


def test_processes_that_were_killed_while_they_filled_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise readers of another job wait for them before each missing shard."""
    monkeypatch.setattr(node_state, "_SEARCH_SECONDS", 0.0)
    state = NodeState(tmp_path / "memory", "0", 4)
    ready, ready_writer = os.pipe()

    def fill() -> None:
        NodeState(tmp_path / "memory", "0", 4).change_filler_count(+1)
        os.write(ready_writer, b"x")
        signal.pause()

    filling = [fork(fill), fork(fill)]
    assert os.read(ready, 1) + os.read(ready, 1) == b"xx"
    assert state.filler_count == 2
    os.kill(filling[0], signal.SIGKILL)
    assert wait_for_end(filling[0]) == -signal.SIGKILL
    assert state.filler_count, "another process still fills the tier"
    os.kill(filling[1], signal.SIGKILL)
    assert wait_for_end(filling[1]) == -signal.SIGKILL
    assert state.filler_count == 0
    state.change_filler_count(+1)
    assert state.filler_count == 1
    state.change_filler_count(-1)
    assert state.filler_count == 0
    state.close()
    assert not list((tmp_path / "memory").iterdir())
    os.close(ready), os.close(ready_writer)


def test_temporaries_of_living_writers_are_left_alone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", DiskLimits(free=0))
    folder = tier.open_folder("file:///x")
    part = folder.get_shard_path("0" * 32).with_name(f".{'0' * 32}.{'1' * 32}.part")
    part.parent.mkdir()
    reservation = tier.reserve(1000, part, folder)
    part.write_bytes(b"being written")
    assert DiskTier(tmp_path / "cache").count_reserved_bytes() == 1000
    assert part.exists()
    reservation.lock.release()  # like the kernel when the writer dies
    assert DiskTier(tmp_path / "cache").count_reserved_bytes() == 0
    assert not part.exists()


def test_8_processes_that_race_for_a_shard_fetch_it_once(
    remote: RemoteServer, open_dataset: Opener, tmp_path: Path
) -> None:
    data = write_tars(remote.folder, [50])
    decode = ArrayOf("uint8", (3072,), field="bin")
    start_file = tmp_path / "go"

    def train() -> None:
        while not start_file.exists():
            time.sleep(0.001)
        check_samples(open_dataset(remote.uri, decode=decode, prefetch=False, wait_seconds=120), data)

    racing = [fork(train) for _ in range(8)]
    start_file.touch()
    assert [wait_for_end(process) for process in racing] == [0] * 8
    assert remote.requests["000.tar"] == 1


def test_a_waiter_takes_over_from_a_process_without_progress(
    remote: RemoteServer, open_dataset: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_tars(remote.folder, [5])
    decode = ArrayOf("uint8", (3072,), field="bin")

    def stop(step: str) -> None:
        if step == "created":
            os.kill(os.getpid(), signal.SIGSTOP)

    def train() -> None:
        monkeypatch.setattr(publication, "notify_step", stop)
        open_dataset(remote.uri, decode=decode, prefetch=False)

    stopped = fork(train)
    assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
    try:
        dataset = open_dataset(remote.uri, decode=decode, prefetch=False, wait_seconds=0.3)
        check_samples(dataset, data)
        assert dataset.statistics()["takeovers"] == 1
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for_end(stopped)
    check_samples(open_dataset(remote.uri, decode=decode), data)


@pytest.mark.parametrize("fault", ["truncate", "stall", "503"])
def test_a_remote_that_fails_for_a_while_is_retried(remote: RemoteServer, open_dataset: Opener, fault: str) -> None:
    data = write_tars(remote.folder, [50])
    remote.faults["000.tar"] = [fault, fault]
    dataset = open_dataset(remote.uri, decode=ArrayOf("uint8", (3072,), field="bin"), wait_seconds=20)
    check_samples(dataset, data)
    assert dataset.statistics()["remote_bytes"] == (remote.folder / "000.tar").stat().st_size


@pytest.mark.parametrize("fault", ["truncate", "stall", "503"])
def test_small_files_whose_remote_fails_for_a_while_are_retried(
    remote: RemoteServer, open_dataset: Opener, fault: str
) -> None:
    data = write_files(remote.folder, 20)
    remote.faults = {"a/00003.bin": [fault, fault], "b/00012.bin": [fault]}
    dataset = open_dataset(remote.uri, decode=RECORD, wait_seconds=20)
    check_samples(dataset, data)
    assert dataset.statistics()["remote_bytes"] == data.nbytes


def test_a_shard_stays_open_while_it_is_indexed(
    remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tars(remote.folder, [5])
    cache = open_dataset(remote.uri, prefetch=False).cache
    (path,) = open_dataset.cache.glob("datasets/*/shards/*/*.index")
    path.unlink()
    index_shard = shard_cache.index_shard

    def close_idle_and_index(shards: Any, shard: Any, file: int) -> Any:
        cache.open_shards.close_idle()
        return index_shard(shards, shard, file)

    monkeypatch.setattr(shard_cache, "index_shard", close_idle_and_index)
    assert len(cache.load_index(0)) == 5


def test_a_shard_that_one_thread_reads_is_not_closed_by_another_that_opens_it_too(
    remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may belong to another file by the time of the read."""
    write_files(remote.folder, 5)
    dataset = open_dataset(remote.uri, decode=RECORD, prefetch=False)
    dataset[0]
    cache, reader = dataset.cache, dataset._reader
    held_shards, first_shard = type(reader._held)(len(cache.shards)), np.array([0])
    open_samples = cache.open_samples
    descriptors_of_other_thread: list[int] = []

    def open_in_another_thread_first(shard: int) -> Any:
        monkeypatch.setattr(cache, "open_samples", open_samples)
        cache.open_shards.close_idle()
        reader._open_shards(held_shards, first_shard, count_misses=False)
        descriptors_of_other_thread.append(int(held_shards.descriptors[0]))
        cache.open_shards.close_idle()
        return open_samples(shard)

    monkeypatch.setattr(cache, "open_samples", open_in_another_thread_first)
    reader._open_shards(held_shards, first_shard, count_misses=False)
    assert held_shards.descriptors.tolist() == descriptors_of_other_thread
    assert os.fstat(descriptors_of_other_thread[0]).st_size == 5 * 3072


def test_a_remote_that_never_recovers_is_a_clear_error(remote: RemoteServer, open_dataset: Opener) -> None:
    write_files(remote.folder, 4)
    dataset = open_dataset(remote.uri, decode=RECORD, prefetch=False)
    remote.faults["a/00000.bin"] = ["503"] * 100
    with pytest.raises(StoreError, match=r"could not be read in 4 tries"):
        dataset[0]
    remote.faults.clear()
    dataset[0]


def test_a_changed_object_has_a_new_key_and_old_bytes_are_not_used(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_tars(remote.folder, [10])
    decode = ArrayOf("uint8", (3072,), field="bin")
    first = open_dataset(remote.uri, decode=decode)
    check_samples(first, data)
    changed = write_tars(remote.folder, [10], seed=1)
    second = open_dataset(remote.uri, decode=decode)
    assert second.cache.shards.compute_key(0) != first.cache.shards.compute_key(0)
    check_samples(second, changed)
    check_samples(first, data)  # the running job continues with its listing


@pytest.mark.parametrize("json_index", [False, True])
def test_an_object_that_changes_between_listing_and_reading_is_refused(
    remote: RemoteServer, open_dataset: Opener, json_index: bool
) -> None:
    remote.json_index = json_index
    write_files(remote.folder, 2)
    dataset = open_dataset(remote.uri, decode=RECORD, prefetch=False)
    path = remote.folder / "a" / "00000.bin"
    path.write_bytes(bytes(3072))
    os.utime(path, (later := time.time() + 2, later))
    with pytest.raises(StoreError, match="no longer the object that was listed"):
        dataset[0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend"])
def test_damage_on_disk_is_found_quarantined_and_fetched_again(
    remote: RemoteServer, open_dataset: Opener, damage: str
) -> None:
    data = write_files(remote.folder, 40)
    check_samples(open_dataset(remote.uri, decode=RECORD, group_bytes=30_000), data)
    open_dataset.close()
    shard_file = sorted(list_shard_files(open_dataset.cache))[0]
    damaged = bytearray(shard_file.read_bytes())
    if damage == "flip":
        damaged[len(damaged) // 3] ^= 4
    shard_file.chmod(0o644)
    shard_file.write_bytes({"flip": damaged, "truncate": damaged[:-1], "extend": damaged + b"x"}[damage])
    dataset = open_dataset(remote.uri, decode=RECORD, group_bytes=30_000)
    check_samples(dataset, data)
    assert dataset.statistics()["corruptions"] == 1
    assert dataset.statistics()["remote_bytes"] == shard_file.stat().st_size
    assert len(list(open_dataset.cache.glob("datasets/*/quarantine/*"))) == 1


def test_a_second_dataset_finds_damage_that_happened_after_the_first_verification(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    data = write_files(remote.folder, 40)
    first = open_dataset(remote.uri, decode=RECORD, group_bytes=30_000)
    check_samples(first, data)
    shard_file = sorted(list_shard_files(open_dataset.cache))[0]
    damaged = bytearray(shard_file.read_bytes())
    damaged[len(damaged) // 3] ^= 4
    shard_file.chmod(0o644)
    shard_file.write_bytes(damaged)
    second = open_dataset(remote.uri, decode=RECORD, group_bytes=30_000)
    check_samples(second, data)
    assert second.statistics()["corruptions"] == 1
    third = open_dataset(remote.uri, decode=RECORD, group_bytes=30_000)
    check_samples(third, data)
    assert third.statistics()["corruptions"] == 0


def test_a_shard_is_verified_once_per_node(
    remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_files(remote.folder, 40)
    check_samples(open_dataset(remote.uri, decode=RECORD), data)
    open_dataset.close()
    first, second = (open_dataset(remote.uri, decode=RECORD, prefetch=False) for _ in range(2))
    check_samples(first, data)
    monkeypatch.setattr(second.cache._cached, "is_good", None)  # the checksum is not verified again
    check_samples(second, data)


def test_a_shard_counts_as_verified_before_others_can_open_it(
    remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for the shard opens it at once. It must not read all of it again."""
    write_files(remote.folder, 10)
    dataset = open_dataset(remote.uri, prefetch=False)
    rename, verified = os.rename, []

    def record_and_rename(source: str, target: str, **folders: int) -> None:
        if target == dataset.cache.shards.compute_key(0):
            verified.append(dataset.node_state.is_verified(0))
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", record_and_rename)
    dataset.cache.open(0)
    assert verified == [True]


def test_a_damaged_record_or_index_costs_a_fetch_and_nothing_else(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_tars(remote.folder, [20, 20])
    decode = ArrayOf("uint8", (3072,), field="bin")
    check_samples(open_dataset(remote.uri, decode=decode), data)
    open_dataset.close()
    (records,) = open_dataset.cache.glob("datasets/*/records")
    index = sorted(open_dataset.cache.glob("datasets/*/shards/*/*.index"))[0]
    for path, at in ((records, 20), (index, 200)):
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 1
        path.write_bytes(damaged)
    check_samples(open_dataset(remote.uri, decode=decode), data)


def test_a_shard_that_shrinks_under_an_open_dataset_is_fetched_again(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    data = write_files(remote.folder, 10)
    dataset = open_dataset(remote.uri, decode=RECORD)
    check_samples(dataset, data)
    (path,) = list_shard_files(open_dataset.cache)
    path.chmod(0o644)
    os.truncate(path, 100)
    check_samples(dataset, data)
    assert dataset.statistics()["corruptions"] == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("fill_volume", "takes no more shards"),
        ("fill_memory", "memory cache takes no more samples"),
        ("train_on_read_only", "takes no more shards"),
        ("train_on_empty_read_only", "no disk cache"),
        ("lose_volume", "is no longer used"),
    ],
)
def test_a_volume_that_fails_costs_one_warning_and_training_continues(
    tmp_path: Path, script: str, message: str
) -> None:
    write_files(tmp_path / "source", 200)
    (tmp_path / "volume").mkdir()
    output = run_on_volume(script, tmp_path / "source", tmp_path / "volume")
    assert [line for line in output.splitlines() if line.startswith("topkube:")] == output.splitlines()
    assert len(output.splitlines()) == 1, output
    assert message in output


@pytest.mark.parametrize("mark", ['{"kind": "topkube-cache", "format": 99}', '{"kind": "else"}', "not JSON", None])
def test_a_cache_of_another_format_is_refused_and_untouched(
    tmp_path: Path, open_dataset: Opener, mark: str | None
) -> None:
    write_files(tmp_path / "source", 2)
    open_dataset.cache.mkdir()
    (open_dataset.cache / "theirs").write_text("precious")
    if mark is not None:
        (open_dataset.cache / "topkube-cache.json").write_text(mark)
    before = sorted((path.name, path.read_bytes()) for path in open_dataset.cache.iterdir())
    with pytest.raises(CacheError, match="nothing here was touched"):
        open_dataset(tmp_path / "source")
    assert sorted((path.name, path.read_bytes()) for path in open_dataset.cache.iterdir()) == before


def test_two_jobs_share_a_dataset_while_a_third_evicts_it(
    remote: RemoteServer, open_dataset: Opener, tmp_path: Path
) -> None:
    data = write_files(remote.folder, 60)
    stop = tmp_path / "stop"

    def train() -> None:
        for _ in range(15):
            opened = open_dataset(remote.uri, decode=RECORD, group_bytes=30_000)
            for _ in range(3):
                check_samples(opened, data)
            opened.close()

    def evict() -> None:
        while not stop.exists():
            for folder in DiskTier(open_dataset.cache).list_folders():
                folder.remove(force=True)
                time.sleep(0.005)

    DiskTier(open_dataset.cache)
    evicting, jobs = fork(evict), [fork(train), fork(train)]
    try:
        assert [wait_for_end(job) for job in jobs] == [0, 0]
    finally:
        stop.touch()
    assert wait_for_end(evicting) == 0
