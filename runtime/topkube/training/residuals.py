"""Residuals by (parameter name, shard): made when first needed, saved, loaded, and cut anew for another world.

A rank keeps the residual of its shard of every sparse bucket. What leaves this module is keyed by parameter name,
each piece with its place in the flattened parameter, so that neither the bucket layout nor the number of ranks
matters to who reads it. Residuals are in units of the mean gradient: the sum of all copies of an element is what
training still owes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from topkube.collectives.call import own_shard
from topkube.collectives.registry import Algorithm
from topkube.compression.error_feedback import Residual
from topkube.training.buckets import Bucket
from topkube.world import World

Pieces = dict[str, list[tuple[int, torch.Tensor]]]
"""Parameter name -> (first element in the flattened parameter, float32 values), ...; overlapping pieces add up."""


Momentum = Callable[[], tuple[float, float]]
"""The momentum that is corrected for (0: none) and what a gradient counts in its velocity."""


class Residuals:
    """This rank's residuals under one algorithm. The velocity of a parameter, with momentum correction, is kept among
    the pieces as that of "NAME velocity". They lie on `device` where buckets are reduced on one
    (collectives/device.py)."""

    def __init__(
        self,
        world: World,
        algorithm: Algorithm,
        momentum: Momentum = lambda: (0.0, 1.0),
        device: torch.device | None = None,
    ) -> None:
        self._world, self._algorithm, self._momentum, self._device = world, algorithm, momentum, device
        self._buckets: list[Bucket] = []
        self._loaded: Pieces = {}

    def of(self, bucket: Bucket) -> Residual:
        """The bucket's residual: zeros, or what was loaded, the first time."""
        if bucket.residual is None:
            start, stop = self._range(bucket.length)
            bucket.residual = Residual(stop - start, *self._momentum(), self._device)
            for name, begin, end, at in _overlaps(bucket, start, stop):
                for key, array in _tensors(name, bucket.residual):
                    for first, values in self._loaded.pop(key, []):
                        low, high = max(begin, first), min(end, first + values.numel())
                        if low < high:
                            target = array[at + low - begin : at + high - begin]
                            target += values[low - first : high - first].to(target.device)
            self._buckets.append(bucket)
        if bucket.residual.momentum:
            bucket.residual.momentum, bucket.residual.gain = self._momentum()  # schedules may change it
        return bucket.residual

    def commit(self) -> None:
        """The step is finite everywhere: what was not sent is the residual of the next one."""
        for bucket in self._buckets:
            assert bucket.residual is not None
            bucket.residual.commit()

    def discard(self) -> None:
        """The step counts for nothing: residuals stay as they were, bit for bit."""
        for bucket in self._buckets:
            assert bucket.residual is not None
            bucket.residual.discard()

    def arrays(self) -> list[torch.Tensor]:
        """The residuals themselves, one per bucket (float32, this rank's shard), not copied."""
        residuals = [_tensor(bucket.residual.current) for bucket in self._buckets if bucket.residual is not None]
        return [values for values in residuals if values.numel()]

    def save(self) -> Pieces:
        """Copies of all pieces that this rank owns."""
        pieces: Pieces = {name: list(entries) for name, entries in self._loaded.items()}
        for bucket in self._buckets:
            assert bucket.residual is not None
            start = self._range(bucket.length)[0]
            for name, begin, end, at in _overlaps(bucket, start, start + len(bucket.residual)):
                for key, array in _tensors(name, bucket.residual):
                    values = array[at : at + end - begin].to("cpu", copy=True)
                    pieces.setdefault(key, []).append((begin, values))
        return pieces

    def load(self, pieces: Mapping[str, Iterable[tuple[int, torch.Tensor]]]) -> None:
        """Replaces all residuals. Pieces that this rank does not own are dropped when their bucket is first
        exchanged."""
        for bucket in self._buckets:
            bucket.residual = None
        self._buckets.clear()
        self._loaded = {name: list(entries) for name, entries in pieces.items()}

    def _range(self, length: int) -> tuple[int, int]:
        """This rank's part of a bucket: its shard, or the whole of it where every rank keeps a residual of its own."""
        shard = own_shard(self._world, length)
        kept = self._algorithm.residual_length(self._world, length)
        return shard if kept == shard[1] - shard[0] else (0, kept)

    @property
    def copies(self) -> int:
        """How many residuals every element has in the whole world: one per node, or one per rank."""
        lone_shard = replace(self._world, local_rank=0, shards=2)
        return self._world.nodes if self._algorithm.residual_length(lone_shard, 2) == 1 else self._world.size

    @property
    def copy(self) -> int:
        """Which of them this rank holds a part of."""
        return self._world.rank if self.copies == self._world.size else self._world.node


def _tensors(name: str, residual: Residual) -> Iterator[tuple[str, torch.Tensor]]:
    """What is kept of a parameter: (key among the pieces, the shard's values wherever they lie)."""
    yield name, _tensor(residual.current)
    if residual.momentum:
        yield f"{name} velocity", _tensor(residual.velocity)


def _tensor(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _overlaps(bucket: Bucket, start: int, stop: int) -> Iterable[tuple[str, int, int, int]]:
    """Parameters with elements in [start, stop) of the bucket: (name, first and end element in the parameter, offset
    from start)."""
    for parameter, begin, end in zip(bucket.parameters, bucket.starts, bucket.starts[1:], strict=False):
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield parameter.name, low - begin, high - begin, low - start


def redistribute(saved: Iterable[Mapping[str, Any]], copy: int, copies: int) -> Pieces:
    """Residuals for copy number `copy` of `copies` from what all ranks of another world saved.

    `saved` holds, per old rank, its `copy`, `copies` and `pieces`. With as many copies as before each copy keeps its
    own, cut into new shards; else all are added up and spread evenly. Either way the sum over the world stays.
    """
    merged: Pieces = {}
    for state in saved:
        same = state["copies"] == copies
        if same and state["copy"] != copy:
            continue
        for name, entries in state["pieces"].items():
            for first, values in entries:
                merged.setdefault(name, []).append((first, values if same else values / copies))
    return merged
