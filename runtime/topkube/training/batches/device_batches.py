"""Batches on a GPU: the next batch is copied while the GPU computes with the current batch.

The copy runs on a stream of its own, from pinned memory, so that neither the script nor the GPU waits for it. The next
batch is taken from the loader a step early if other processes prepare it (a DataLoader with workers). Otherwise
taking it early would change the order in which the process draws random numbers, so its copy begins when it is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from topkube.collectives.device.memory import record_stream
from topkube.training.batches.samples import SampleCounter


@dataclass(frozen=True)
class CountedBatch:
    """A batch, the number of its samples by which it is weighted, and the number of samples that the loader drew for
    it."""

    batch: Any
    samples: int
    drawn: int


def begin_batches(loader: Iterable[Any], counter: SampleCounter, device: torch.device | None) -> Iterator[CountedBatch]:
    """Return the batches of a pass over `loader`, with their tensors on `device` (None: they stay where they are).
    Samples are counted before the copy, because a count of tensors on a GPU would wait for it. The loader's iterator is
    created by this call."""
    iterator = iter(loader)
    counted = (CountedBatch(batch, *counter.count(batch)) for batch in iterator)
    if device is None or device.type != "cuda":
        return counted
    return _copy_to_device(counted, device, is_prepared_elsewhere(loader))


def is_prepared_elsewhere(loader: Iterable[Any]) -> bool:
    """Return True if other processes prepare the loader's batches. The random numbers of its samplers are then drawn
    when its iterator is created, and not by the script's process when a batch is taken."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _copy_to_device(
    batches: Iterator[CountedBatch], device: torch.device, copies_ahead: bool
) -> Iterator[CountedBatch]:
    """Yield `batches` on `device`. If `copies_ahead` is True, the copy of the next batch begins before a batch is
    yielded."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin_next() -> tuple[CountedBatch, Any] | None:
        counted = next(batches, None)
        if counted is None:
            return None
        with torch.cuda.stream(stream):
            on_device = map_tensors(counted.batch, lambda tensor: _begin_copy(tensor, device))
            return CountedBatch(on_device, counted.samples, counted.drawn), stream.record_event()

    next_batch = begin_next()
    while next_batch is not None:
        current_batch, copied = next_batch
        next_batch = begin_next() if copies_ahead else None
        stream_in_use = torch.cuda.current_stream(device)
        stream_in_use.wait_event(copied)
        map_tensors(current_batch.batch, lambda tensor: _keep_until_used(tensor, stream_in_use))  # noqa: B023  # called at once
        yield current_batch
        if not copies_ahead:
            next_batch = begin_next()


def _begin_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin the copy of a tensor in host memory to `device` in the current stream. Pinned memory lets it run beside
    computations; torch keeps the pinned memory until the copy has read it. Return other tensors as they are."""
    if tensor.device.type != "cpu":
        return tensor
    if tensor.layout is torch.strided and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _keep_until_used(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Keep the memory of a tensor of the copies' stream until `stream` has used it."""
    if tensor.is_cuda:
        record_stream(tensor, stream)
    return tensor


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `batch` with all its tensors changed, inside lists, tuples, named tuples, mappings and packed sequences.
    Other objects stay as they are."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):  # the sizes of its batches stay in host memory
        places = (batch.sorted_indices, batch.unsorted_indices)
        return PackedSequence(change(batch.data), batch.batch_sizes, *(p if p is None else change(p) for p in places))
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(value, change) for key, value in batch.items()}
        if type(batch) is dict:
            return changed
        copied_batch: Any = copy.copy(batch)  # such as a BatchEncoding of transformers
        copied_batch.update(changed)
        return copied_batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def move_to_device(batch: Any, device: torch.device | None) -> Any:
    """Return `batch` with its tensors on `device`; None leaves them."""
    return batch if device is None else map_tensors(batch, lambda tensor: tensor.to(device))
