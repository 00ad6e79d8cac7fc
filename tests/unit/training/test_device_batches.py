"""Batches that are copied to a GPU ahead of time. Fake streams find a missing wait and memory that is freed early."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from topkube.collectives.device.memory import list_parts
from topkube.training.batches import device_batches
from topkube.training.batches.device_batches import begin_batches, is_prepared_elsewhere, map_tensors
from topkube.training.batches.samples import SampleCounter
from unit.training.fake_streams import FakeStream, Streams

HOST_BATCHES = [torch.full((4, 3), float(number)) for number in range(5)]
Pair = namedtuple("Pair", ["x", "y"])


class Loader:
    """A loader that notes which batches were taken."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            self.taken = number + 1
            yield HOST_BATCHES[number]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copies", fake))
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(device_batches, "_begin_copy", lambda tensor, device: tensor.clone())

    def lend(tensor: torch.Tensor, stream: FakeStream) -> torch.Tensor:
        fake.record_stream(tensor, stream)
        return tensor

    monkeypatch.setattr(device_batches, "_keep_until_used", lend)
    with fake.stream(FakeStream("script", fake)), fake.watch():
        yield fake


def iterate_on_device(loader: Iterable[Any], ahead: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(device_batches, "is_prepared_elsewhere", lambda loader: ahead)
    return begin_batches(loader, SampleCounter(loader), torch.device("cuda"))


@pytest.mark.parametrize("ahead", [True, False])
def test_the_script_sees_each_batch_after_its_copy(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    loader, sums = Loader(5), []
    for number, counted in enumerate(iterate_on_device(loader, ahead, monkeypatch)):
        assert loader.taken == min(number + 1 + ahead, 5)
        assert (counted.samples, counted.drawn) == (4, 4)
        sums.append((counted.batch * 2).sum())
    del counted
    streams.check_freed_memory()
    assert [float(value) for value in sums] == [24.0 * number for number in range(5)]
    assert not streams.hazards


def test_an_empty_loader_yields_no_batch(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(iterate_on_device(Loader(0), True, monkeypatch)) == []


def test_an_error_of_the_loader_reaches_the_script(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_batches() -> Iterator[torch.Tensor]:
        yield torch.zeros(2, 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(iterate_on_device(fail_after_batches(), True, monkeypatch))


def test_without_a_gpu_nothing_is_taken_early() -> None:
    for device in (None, torch.device("cpu")):
        loader = Loader(3)
        batches = begin_batches(loader, SampleCounter(loader), device)
        assert float(next(batches).batch.sum()) == 0
        assert loader.taken == 1


def test_only_loaders_with_workers_are_taken_from_early() -> None:
    data: Any = [torch.zeros(1)] * 4
    assert is_prepared_elsewhere(DataLoader(data, num_workers=2))
    assert not is_prepared_elsewhere(DataLoader(data))
    assert not is_prepared_elsewhere(data)


def test_tensors_are_found_in_every_kind_of_batch() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    x = torch.ones(2)
    batch = {"a": [x, (x, "name", None)], "b": OrderedDict(c=Pair(x, 3)), "d": packed, "e": {1, 2}}
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert changed["a"][0].tolist() == changed["a"][1][0].tolist() == changed["b"]["c"].x.tolist() == [2, 2]
    assert (changed["a"][1][1:], changed["b"]["c"].y, changed["e"]) == (("name", None), 3, {1, 2})
    assert (type(changed["b"]), type(changed["b"]["c"])) == (OrderedDict, Pair)
    assert changed["d"].data.tolist() == [2.0] * 5
    assert changed["d"].batch_sizes is packed.batch_sizes
    assert x.tolist() == [1, 1], "the loader's own batch stays as it is"
    assert batch["b"]["c"].x is x  # type: ignore[index]


def test_the_memory_of_a_sparse_batch_is_kept_until_it_is_used() -> None:
    """torch has no `record_stream` for sparse tensors: their parts are recorded."""
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for tensor in (dense, dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1))):
        parts = list_parts(tensor)
        assert all(part.layout is torch.strided for part in parts)
        assert len(parts) == {torch.strided: 1, torch.sparse_coo: 2}.get(tensor.layout, 3)
