"""A training script gets the right samples in the sampler's order, in every epoch, with every style of torch's
loader."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openers import Opener, wait_until
from remotes import RemoteServer, write_files, write_tars
from torch.utils.data import DataLoader

from topkube.data import ArrayOf, DistributedSampler, collate
from topkube.data.base.batch import Batch
from topkube.data.base.open_datasets import sum_statistics
from topkube.data.cache.memory.memory_tier import MemoryTier
from topkube.data.fill import memory_filler
from topkube.errors import DatasetError

RECORD = ArrayOf("uint8", (3072,))


def decode_tensors(sample: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8), int(sample["cls"])


@pytest.mark.parametrize("scheme", ["file", "http", "memory"])
@pytest.mark.parametrize("memory_limit", [0, 1 << 24])
def test_files_are_read_by_number(
    remote: RemoteServer, open_dataset: Opener, tmp_path: Path, scheme: str, memory_limit: int
) -> None:
    data = write_files(remote.folder, 60)
    uri = {"file": str(remote.folder), "http": remote.uri, "memory": f"memory://{tmp_path}"}[scheme]
    if scheme == "memory":
        import fsspec

        fsspec.filesystem("memory").put(str(remote.folder), str(tmp_path), recursive=True)
    dataset = open_dataset(uri, decode=RECORD, memory_limit=memory_limit, group_bytes=40_000)
    assert len(dataset) == 60
    for _ in range(2):
        np.testing.assert_array_equal(np.stack([dataset[at] for at in range(60)]), data)
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__([5, 59, 5, -60]))), data[[5, 59, 5, 0]])
    with pytest.raises(IndexError):
        dataset[60]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory_limit", [0, 1 << 24])
def test_every_epoch_has_every_sample_of_a_tar_dataset_once(
    remote: RemoteServer, open_dataset: Opener, workers: int, memory_limit: int
) -> None:
    data = write_tars(remote.folder, [30, 1, 17, 40])  # uneven shards
    dataset = open_dataset(remote.uri, decode=decode_tensors, memory_limit=memory_limit)
    sampler = DistributedSampler(dataset, window=2)
    loader: Any = DataLoader(
        dataset, 16, sampler=sampler, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate
    )
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        labels = []
        for images, numbers in loader:
            np.testing.assert_array_equal(images.numpy(), data[numbers.numpy()])
            labels += numbers.tolist()
        assert sorted(labels) == list(range(88))
        orders.append(labels)
    assert orders[0] != orders[1] != orders[2]
    if memory_limit:  # the third epoch came from memory alone
        assert dataset.statistics()["memory_misses"] == 88
    loader = None  # ends persistent workers


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (1, "spawn"), (1, "forkserver")])
def test_the_iterable_style_follows_set_epoch_and_the_position_in_persistent_workers(
    remote: RemoteServer, open_dataset: Opener, workers: int, start: str | None
) -> None:
    data = write_files(remote.folder, 50)
    dataset = open_dataset(remote.uri, decode=RECORD, group_bytes=20_000)
    sampler = DistributedSampler(dataset, window=2)
    loader: Any = DataLoader(
        dataset.batches(8, sampler),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context=start,
    )
    for epoch, position in [(0, 0), (1, 0), (2, 24)]:
        sampler.set_epoch(epoch)
        sampler.advance(position)
        order = sampler.indices()
        assert order.size == 50 - position
        np.testing.assert_array_equal(torch.cat(list(loader)).numpy(), data[order])
    loader = None


def test_a_position_is_resumed_on_the_same_permutation(remote: RemoteServer, open_dataset: Opener) -> None:
    write_files(remote.folder, 50)
    dataset = open_dataset(remote.uri, decode=RECORD, group_bytes=20_000)
    sampler = DistributedSampler(dataset, seed=3, window=2)
    sampler.set_epoch(4)
    whole = list(sampler)
    sampler.advance(20)
    resumed = DistributedSampler(dataset, window=2)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == whole[20:]


def test_random_transforms_are_applied_after_the_cache(remote: RemoteServer, open_dataset: Opener) -> None:
    write_files(remote.folder, 8)
    random = np.random.default_rng(0)
    dataset = open_dataset(
        remote.uri,
        decode=RECORD,
        memory_limit=1 << 20,
        prefetch=False,  # no other thread stores samples in memory
        transform=lambda sample: (sample, random.random()),
    )
    drawn = {dataset[3][1] for _ in range(5)}
    assert len(drawn) == 5
    assert dataset.statistics()["memory_misses"] == 1


def test_another_decode_never_gets_samples_of_the_first(remote: RemoteServer, open_dataset: Opener) -> None:
    write_tars(remote.folder, [5])
    first = open_dataset(remote.uri, decode=lambda sample: int(sample["cls"]), memory_limit=1 << 20)
    assert [first[at] for at in range(5)] == [0, 1, 2, 3, 4]
    second = open_dataset(remote.uri, decode=lambda sample: int(sample["cls"]) * 10, memory_limit=1 << 20)
    assert [second[at] for at in range(5)] == [0, 10, 20, 30, 40]


def test_samples_of_different_shapes_and_kinds_come_back_as_they_were(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    write_tars(remote.folder, [12])

    def decode_ragged(sample: dict[str, bytes]) -> dict[str, Any]:
        number = int(sample["cls"])
        return {
            "image": np.frombuffer(sample["bin"][: 6 * (number + 1)], np.int16).reshape(3, number + 1),
            "name": f"näme {number}",
            "raw": sample["bin"][:number],
            "share": number / 7,
            "even": number % 2 == 0,
        }

    dataset = open_dataset(remote.uri, decode=decode_ragged, memory_limit=1 << 20)
    fresh = list(dataset.__getitems__(range(12)))
    kept = list(dataset.__getitems__(range(12)))
    assert dataset.statistics()["memory_misses"] == 12
    for before, after in zip(fresh, kept, strict=True):
        assert before.keys() == after.keys()
        np.testing.assert_array_equal(before.pop("image"), after.pop("image"))
        assert before == after
        assert [type(value) for value in before.values()] == [type(value) for value in after.values()]


def test_the_counters_of_a_dataset_stay_after_it_was_deleted(remote: RemoteServer, open_dataset: Opener) -> None:
    """A dataset that an evaluation opens and deletes must not make the counters of the run fall."""
    write_tars(remote.folder, [20])
    before = sum_statistics().get("disk_requests", 0.0)
    for turn in (1, 2):
        dataset = open_dataset(remote.uri, decode=decode_tensors)
        dataset.__getitems__(range(20))
        assert sum_statistics()["disk_requests"] == before + 20 * turn
        open_dataset.close()
        deleted = weakref.ref(dataset)
        del dataset
        gc.collect()
        assert deleted() is None
        assert sum_statistics()["disk_requests"] == before + 20 * turn


def test_a_second_job_reads_nothing_from_the_remote(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_tars(remote.folder, [20, 20])
    first = open_dataset(remote.uri, decode=decode_tensors)
    assert len(list(first)) == 40
    open_dataset.close()
    before = remote.sent_bytes
    second = open_dataset(remote.uri, decode=decode_tensors)
    np.testing.assert_array_equal(second[33][0].numpy(), data[33])
    assert second.statistics()["remote_bytes"] == 0
    assert remote.sent_bytes - before < 1000  # the listing


def test_a_manifest_has_counts_before_any_shard_is_fetched(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_tars(remote.folder / "data", [20, 25])
    lines = [
        f'{{"path": "{number:03}.tar", "size": {(remote.folder / "data" / f"{number:03}.tar").stat().st_size}, '
        f'"samples": {samples}}}'
        for number, samples in enumerate([20, 25])
    ]
    (remote.folder / "data" / "manifest.jsonl").write_text("\n".join(lines))
    dataset = open_dataset(f"{remote.uri}/data", decode=decode_tensors, prefetch=False)
    assert len(dataset) == 45
    assert dataset.statistics()["remote_bytes"] == 0
    np.testing.assert_array_equal(dataset[44][0].numpy(), data[44])


def test_spawned_workers_read_the_same_samples(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_files(remote.folder, 20)
    dataset = open_dataset(remote.uri, decode=RECORD)
    loader: Any = DataLoader(dataset, 10, num_workers=1, multiprocessing_context="spawn", collate_fn=collate)
    np.testing.assert_array_equal(torch.cat(list(loader)).numpy(), data)


def test_a_batch_that_is_referenced_is_never_overwritten(remote: RemoteServer, open_dataset: Opener) -> None:
    data = write_files(remote.folder, 300)  # batches large enough for reused buffers
    for memory_limit in (0, 1 << 22):
        dataset = open_dataset(str(remote.folder), decode=RECORD, memory_limit=memory_limit)
        sampler = DistributedSampler(dataset)
        for _ in range(2):
            held = [(batch, order) for batch, order in zip(
                dataset.batches(100, sampler, ahead=2), np.split(sampler.indices(), 3), strict=True
            )]  # fmt: skip
            views = [batch[3] for batch, _ in held]
            for batch in dataset.batches(100, sampler):  # buffers are free again after each turn
                del batch
            for (batch, order), view in zip(held, views, strict=True):
                np.testing.assert_array_equal(batch.numpy(), data[order])
                np.testing.assert_array_equal(view.numpy(), data[order[3]])


def decode_kinds(raw: bytes) -> dict[str, Any]:
    number = raw[0]
    return {
        "tensor": torch.frombuffer(bytearray(raw[:6]), dtype=torch.int16),
        "no dimensions": torch.tensor(number / 3),
        "array": np.frombuffer(raw, np.float16, 4),
        "array without dimensions": np.array(number, np.int32),
        "scalar": np.float32(number),
        "even": number % 2 == 0,
        "whole": number,
        "real": number / 7,
        "text": f"sample {number}",
        "bytes": raw[: 1 + number % 3],
    }


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # by torch's own collate function
def test_a_batch_that_is_partly_in_memory_is_collated_like_any_other(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 24)
    plain = open_dataset(tmp_path / "source", decode=decode_kinds)
    dataset = open_dataset(tmp_path / "source", decode=decode_kinds, memory_limit=1 << 20)
    for _ in dataset.__getitems__(range(0, 24, 2)):
        pass
    for turn in range(2):  # in the first turn half of the samples are in memory, in the second all
        batch, expected = dataset.__getitems__(range(24)), plain.__getitems__(range(24))
        assert dataset.statistics()["memory_misses"] == 24
        for sample, expected_sample in zip(batch, expected, strict=True):
            assert {name: type(value) for name, value in sample.items()} == {
                name: type(value) for name, value in expected_sample.items()
            }, turn
            torch.testing.assert_close(sample["no dimensions"], expected_sample["no dimensions"], rtol=0, atol=0)
        for make in (collate, torch.utils.data.default_collate):
            batch_made, expected_batch = make(batch), torch.utils.data.default_collate(expected)
            for name, value in expected_batch.items():
                if isinstance(value, torch.Tensor):
                    assert batch_made[name].dtype == value.dtype, name
                    np.testing.assert_array_equal(batch_made[name].numpy(), value.numpy())
                else:
                    assert batch_made[name] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3, dtype=torch.bfloat16), "bfloat16 as float32"),
        (torch.eye(3).to_sparse(), "dense tensor on the CPU"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "arrays of numbers"),
        ({3: 1}, "text as keys"),
        (torch.return_types.max((torch.ones(1), torch.ones(1))), "only arrays, tensors"),
    ],
)
def test_values_that_cannot_be_restored_are_refused(
    tmp_path: Path, open_dataset: Opener, value: Any, message: str
) -> None:
    write_files(tmp_path / "source", 2)
    dataset = open_dataset(tmp_path / "source", decode=lambda raw: value, fingerprint=message, memory_limit=1 << 20)
    with pytest.raises(DatasetError, match=message):
        dataset[0]


def test_arrays_that_are_partly_in_memory_stay_in_one_piece(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 24)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20)
    _ = dataset.__getitems__([3, 4, 9, 23])
    order = np.random.default_rng(0).permutation(24)
    for _ in range(2):
        batch = dataset.batch(order)
        assert isinstance(batch, Batch)
        np.testing.assert_array_equal(collate(batch).numpy(), data[order])


def test_batches_are_whole_if_memory_has_room_for_some_samples(
    tmp_path: Path, open_dataset: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_files(tmp_path / "source", 24)
    record = data[0].nbytes
    limits = {"memory_limit": 10 * record + record // 2, "group_bytes": 9000}
    dataset = open_dataset(tmp_path / "source", decode=RECORD, prefetch=False, **limits)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(24)
        for part in (order[:7], order[7:]):
            np.testing.assert_array_equal(collate(dataset.batch(part)).numpy(), data[part])
    assert dataset.statistics()["memory_used_bytes"] == 10 * record
    assert dataset.statistics()["memory_misses"] == 24 + 3 * 14, "10 of 24 samples are in memory after the first turn"
    assert dataset.statistics()["memory_bytes"] == 3 * 10 * record
    assert capfd.readouterr().err.count("takes no more samples") == 1


@pytest.mark.parametrize("room", [24, 10])
def test_memory_is_filled_in_the_background_with_samples_that_were_not_read(
    tmp_path: Path, open_dataset: Opener, room: int
) -> None:
    data = write_files(tmp_path / "source", 24)
    record = data[0].nbytes
    dataset = open_dataset(
        tmp_path / "source", decode=RECORD, memory_limit=room * record, group_bytes=9000, prefetch=True
    )
    memory: Any = dataset._samples.memory
    wait_until(lambda: np.count_nonzero(memory.has(np.arange(24))) == room)
    np.testing.assert_array_equal(collate(dataset.batch(np.arange(24))).numpy(), data)
    assert dataset.statistics()["memory_misses"] == 24 - room


def test_memory_is_filled_when_nobody_reads(
    tmp_path: Path, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_checks, is_idle = 0, threading.Event()

    def count_and_check(reads: memory_filler.ReadsInProgress) -> bool:
        nonlocal idle_checks
        idle_checks += 1
        return is_idle.is_set()

    monkeypatch.setattr(memory_filler.ReadsInProgress, "are_over", property(count_and_check))
    write_files(tmp_path / "source", 20)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=True)
    assert dataset._samples.memory is not None
    wait_until(lambda: idle_checks > 3)
    assert not dataset._samples.memory.used_bytes
    is_idle.set()
    wait_until(lambda: dataset._samples.memory.has(np.arange(20)).all())


def test_reads_are_over_after_the_last_thread_and_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(memory_filler.time, "monotonic", lambda: now)
    reads = memory_filler.ReadsInProgress()
    reads.begin()
    assert not reads.are_over
    reads.end()
    assert not reads.are_over
    now += 2 * memory_filler._IDLE_SECONDS
    assert reads.are_over


def test_a_memory_filler_does_not_keep_its_dataset_alive(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 24)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=True)
    open_dataset.opened.clear()
    held = weakref.ref(dataset)
    del dataset
    wait_until(lambda: gc.collect() >= 0 and held() is None)


def test_samples_that_two_processes_store_take_space_once(tmp_path: Path) -> None:
    batch = RECORD.decode_many(np.zeros(4 * RECORD.record_bytes, np.uint8), 4)
    tier = MemoryTier(tmp_path, "twice", 8, 8 * RECORD.record_bytes)
    try:
        for indices in ([0, 1, 2, 3], [2, 3, 4, 4]):
            tier.admit(np.array(indices), batch)
        assert tier.used_bytes == 5 * RECORD.record_bytes
    finally:
        tier.close()


def test_arrays_of_too_many_dimensions_are_refused_and_take_no_space(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 4)

    def decode_six_dimensions(raw: bytes) -> Any:
        return np.zeros((1, 1, 1, 1, 1, 1 + raw[0] % 5 + raw[1] % 3))

    dataset = open_dataset(tmp_path / "source", decode=decode_six_dimensions, memory_limit=1 << 20, prefetch=False)
    with pytest.raises(DatasetError, match="6 dimensions"):
        dataset.__getitems__(range(4))
    assert dataset.statistics()["memory_used_bytes"] == 0


def test_the_path_of_a_local_dataset_may_have_any_characters(tmp_path: Path, open_dataset: Opener) -> None:
    folder = tmp_path / "été #1 100% a?b"
    data = write_files(folder, 4)
    np.testing.assert_array_equal(open_dataset(folder, decode=RECORD)[3], data[3])
