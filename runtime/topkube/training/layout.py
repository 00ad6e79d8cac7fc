"""The buckets of all ranks: planned once gradients have been seen, the same everywhere, and again after a restart."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from topkube.errors import TrainingError
from topkube.training.aggregation import Aggregation
from topkube.training.buckets import Bucket, Parameter, plan
from topkube.world import World

SumsOf = Callable[[Iterable[float]], npt.NDArray[np.float64]]
"""Sums of a few numbers over all ranks, in order with the exchanges."""


class Layout:
    """Which parameter lies in which bucket, in the order of the exchanges.

    `order` names the parameters in that order, None before the first plan: selection is per bucket, so a run that goes
    on bit for bit needs the same order.
    """

    def __init__(self, world: World, parameters: list[Parameter], aggregation: Aggregation, sums: SumsOf) -> None:
        self.buckets: list[Bucket] = []
        self.order: list[str] | None = None
        self._world, self._parameters, self._aggregation, self._sums = world, parameters, aggregation, sums
        self._bucket_of: dict[int, Bucket] = {}

    def bucket_of(self, parameter: Parameter) -> Bucket | None:
        """The parameter's bucket, None for one that was frozen whenever buckets were planned."""
        return self._bucket_of.get(parameter.index)

    def complete(self, seen: Iterable[int]) -> None:
        """Plans buckets: for all trainable parameters at the end of the first backward, in the order in which rank 0
        saw them (`seen`, indices); later for parameters that were unfrozen since. Residuals begin with the first
        exchange, so nothing has to move. All ranks together."""
        new = [p for p in self._parameters if p.tensor.requires_grad and p.index not in self._bucket_of]
        if not new:
            return
        if self.order is None:
            self._check_equal()
            self.order = self._ready_order(seen)
            position = {name: i for i, name in enumerate(self.order)}
            new.sort(key=lambda p: position.get(p.name, len(position) + len(self._parameters) - p.index))
        else:
            new.reverse()
            self.order += [parameter.name for parameter in new]
        self._plan(new)
        for parameter in new:
            self._bucket_of.setdefault(parameter.index, Bucket(parameter.tensor.dtype, True))  # no elements

    def restore(self, order: list[str] | None) -> None:
        """The buckets of a saved `order`; none yet where it is None or names parameters that are not here."""
        self.buckets, self._bucket_of, self.order = [], {}, None
        by_name = {parameter.name: parameter for parameter in self._parameters}
        if order is not None and all(name in by_name for name in order):
            self.order = list(order)
            self._plan([by_name[name] for name in order])

    def _plan(self, parameters: list[Parameter]) -> None:
        for bucket in plan(parameters, self._aggregation.bucket_bytes):
            self.buckets.append(bucket)
            self._bucket_of.update({parameter.index: bucket for parameter in bucket.parameters})

    def _ready_order(self, seen: Iterable[int]) -> list[str]:
        ranks = [0.0] * len(self._parameters)
        if self._world.rank == 0:
            once = dict.fromkeys(seen)
            rest = [p.index for p in reversed(self._parameters) if p.index not in once and p.tensor.requires_grad]
            for position, index in enumerate([*once, *rest], start=1):
                ranks[index] = position
        agreed = self._sums(ranks)
        return [self._parameters[i].name for i in np.argsort(agreed, kind="stable") if agreed[i] > 0]

    def _check_equal(self) -> None:
        """All ranks must have the same parameters and settings: else they would exchange different things."""
        described = [
            (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.tensor.requires_grad) for p in self._parameters
        ]
        digest = zlib.crc32(repr((described, self._aggregation)).encode()) & 0xFFFFFF  # squares of 24 bits are exact
        total, squares = self._sums([digest, digest**2])
        if squares * self._world.size != total**2:
            raise TrainingError(
                "ranks have different parameters or aggregation settings",
                cause="the model depends on the rank, parameters are frozen on some ranks only, or settings differ",
                next_step="build the same model with the same arguments on every rank",
            )
