"""The number of samples in a batch: from the script, from the DataLoader, or from the batch itself.

With a wrong number, ranks have wrong weights and a resumed run repeats or skips data, without an error. An ambiguous
batch therefore raises an error.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from topkube.data.sampler import DistributedSampler
from topkube.errors import TrainingError

Samples = int | Callable[[Any], int] | None
"""The argument `samples=`: the number of samples of every batch, or a function that counts them."""
_SCALARS = (str, bytes, int, float, complex, type(None))


class SampleCounter:
    """A counter for the samples of the batches of a pass over `loader`. Create it before the loader's iterator, because
    it reads the length of the sampler."""

    def __init__(self, loader: Iterable[Any], samples: Samples = None) -> None:
        self._script_samples = samples
        self._items_are_batches = isinstance(loader, DataLoader) and loader.batch_sampler is None
        self._sizes = iter(_list_drawn_sizes(loader))

    def count(self, batch: Any) -> tuple[int, int]:
        """Return the samples by which the loader's next batch counts, and the samples that the loader drew for it: the
        same number, unless a collate function drops samples, the script counts something else, or the dataset's items
        are batches themselves. Raises TrainingError if the number is not certain."""
        drawn = next(self._sizes, None)
        if self._script_samples is None:
            samples = count_samples(batch, None if self._items_are_batches else drawn)
            return samples, samples if drawn is None else drawn
        samples = self._count_by_script(batch)
        if drawn is None:  # the script may count something else, such as tokens
            with contextlib.suppress(TrainingError):
                drawn = count_samples(batch)
        return samples, samples if drawn is None else drawn

    def _count_by_script(self, batch: Any) -> int:
        value: Any = self._script_samples(batch) if callable(self._script_samples) else self._script_samples
        try:
            samples = operator.index(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
        except (TypeError, RuntimeError):
            samples = -1
        if samples < 0:
            raise TrainingError(
                f"samples= returned {value!r} for a batch, which is not a number of samples",
                next_step="return a whole number, 0 or more: samples=lambda batch: len(batch[0])",
            )
        return samples


def has_own_order(loader: Iterable[Any]) -> bool:
    """Return True if a DataLoader may yield samples in another order than that of its sampler."""
    if not isinstance(loader, DataLoader):
        return False
    return not getattr(loader, "in_order", True) or type(loader.batch_sampler) not in (BatchSampler, type(None))


def _list_drawn_sizes(loader: Iterable[Any]) -> Iterable[int]:
    """Return the number of samples that a DataLoader draws for each batch of its next pass; nothing if that is not
    certain. An IterableDataset may end early, batches may arrive out of order, and a script's own batch sampler may do
    anything."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return ()
    batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not getattr(loader, "in_order", True):
        return ()
    if loader.batch_sampler is None and isinstance(batches, DistributedSampler):
        return itertools.repeat(1)
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
        return ()
    try:
        total, size = len(batches.sampler), batches.batch_size
    except (TypeError, NotImplementedError):
        return ()
    return (min(size, total - first) for first in range(0, total, size))


def count_samples(batch: Any, drawn: int | None = None) -> int:
    """Return the number of samples in `batch`, for which a DataLoader has `drawn` samples (None: not known).

    The number is certain for a tensor or an array (its first dimension), a PackedSequence, and tuples, lists and dicts
    of them whose first dimensions agree. A list of equal objects can also be a list of samples; then `drawn` decides.
    Raises TrainingError if the number is ambiguous or unknown, or if it contradicts `drawn`.
    """
    readings = _list_readings(batch) or set()
    if drawn is not None and (not readings or drawn in readings):
        return drawn
    if drawn is None and _are_columns(batch):
        readings = _list_common_readings(batch) or set()
    if drawn is None and len(readings) == 1:
        return readings.pop()
    numbers = " or ".join(str(number) for number in sorted(readings)) or "an unknown number of"
    against = f", and the DataLoader drew {drawn}" if drawn is not None else ""
    raise TrainingError(
        f"the samples of a batch cannot be counted: {_describe_batch(batch)} reads as {numbers} samples{against}",
        cause="the batch is not a tensor, or a tuple or dict of tensors, with one sample per row",
        next_step="pass samples= to run.progress or optimizer.join: run.progress(loader,"
        f" samples={_suggest_samples(batch)})",
    )


def _list_readings(value: Any) -> set[int] | None:
    """Return the possible numbers of samples in `value`; None if there is none."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return {int(value.shape[0])} if value.ndim else None
    if isinstance(value, PackedSequence):
        return {int(value.batch_sizes[0])}
    if isinstance(value, Mapping):
        return _list_common_readings(value.values())
    if isinstance(value, list | tuple):
        columns = _list_common_readings(value)
        return columns | {len(value)} if columns is not None and _are_alike(value) else columns
    return None


def _list_common_readings(values: Iterable[Any]) -> set[int] | None:
    """Return the numbers of samples that fit all of `values`, if each contains a part of every sample."""
    common: set[int] | None = None
    for value in values:
        if isinstance(value, list | tuple) and all(isinstance(entry, _SCALARS) for entry in value):
            readings: set[int] | None = {len(value)}  # names, labels, identifiers
        else:
            readings = _list_readings(value)
        if readings is not None:
            common = readings if common is None else common & readings
    return common


def _are_alike(values: Sequence[Any]) -> bool:
    """Return True if `values` could be samples of one dataset."""
    first = values[0] if values else None
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, torch.Tensor | np.ndarray):
        return all(value.dtype == first.dtype and value.ndim == first.ndim for value in values)
    if isinstance(first, Mapping):
        return all(value.keys() == first.keys() for value in values)
    return not isinstance(first, list | tuple) or all(len(value) == len(first) for value in values)


def _are_columns(batch: Any) -> bool:
    """Return True for `(x,)`, and for `(x, y)` of vectors or matrices: these are columns by convention."""
    if not isinstance(batch, list | tuple) or not all(isinstance(value, torch.Tensor | np.ndarray) for value in batch):
        return False
    return len(batch) == 1 or (len(batch) == 2 and all(value.ndim <= 2 for value in batch))


def _describe_batch(value: Any, depth: int = 2) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple) and not isinstance(value, PackedSequence):
        name = f"{type(value).__name__} of {len(value)}"
        if not depth or not value:
            return name
        entries: Iterator[tuple[str, Any]] = (
            ((f"{key!r}: ", entry) for key, entry in value.items())
            if isinstance(value, Mapping)
            else (("", entry) for entry in value)
        )
        shown = [key + _describe_batch(entry, depth - 1) for (key, entry), _ in zip(entries, range(3), strict=False)]
        return f"{name} [{', '.join(shown)}{', ...' if len(value) > 3 else ''}]"
    return type(value).__name__


def _suggest_samples(batch: Any) -> str:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return "lambda batch: batch.shape[1]" if batch.ndim > 1 else "1"
    if isinstance(batch, Mapping) and batch:
        return f"lambda batch: len(batch[{next(iter(batch))!r}])"
    if isinstance(batch, tuple) and batch and isinstance(batch[0], list | tuple):
        return "lambda batch: len(batch[0])"
    if isinstance(batch, list | tuple):
        return "lambda batch: len(batch)"
    return "lambda batch: batch.batch_size"
