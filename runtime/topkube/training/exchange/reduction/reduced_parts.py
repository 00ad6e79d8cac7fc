"""Parts of buckets that are reduced but not gathered, for DeAR: the next forward gathers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import torch

from topkube.collectives.decoupled import DecoupledAllReduce, HalvedArray
from topkube.telemetry.trace import COMMUNICATION_THREAD
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import view_real
from topkube.training.exchange.reduction.delivery import Delivery
from topkube.training.exchange.reduction.grad_mode import without_grad
from topkube.training.ranks import communication_thread

_FINISHED_AT_END = "gathers that end before the links"


@dataclass(eq=False)
class ReducedPart:
    """A part of a bucket whose gradients are reduced but not gathered. `flat` holds them side by side."""

    part: Bucket
    flat: torch.Tensor
    halved: HalvedArray

    @property
    def is_in_place(self) -> bool:
        """True if `flat` is the memory of the gradients themselves, so that nothing is left to deliver."""
        address = self.flat.data_ptr()
        for parameter, start in zip(self.part.parameters, self.part.starts, strict=False):
            if not (parameter.tensor.requires_grad and parameter.is_local and parameter.stash is None):
                return False
            if view_real(parameter.tensor.grad).data_ptr() != address + start * self.flat.itemsize:
                return False
        return True


class ReducedParts:
    """The parts that the current backward has reduced but not gathered (`parts`). `gather`, `finish_gather` and
    `gather_now` run in the communication thread."""

    def __init__(self, all_reduce: DecoupledAllReduce, delivery: Delivery) -> None:
        self._all_reduce, self._delivery = all_reduce, delivery
        self.parts: list[ReducedPart] = []
        _finish_at_end(all_reduce)

    def take(self) -> list[ReducedPart]:
        """Return the parts, and forget them. The last part comes first, because the next forward needs it first."""
        parts, self.parts = self.parts[::-1], []
        return parts

    def gather(self, parts: Sequence[ReducedPart]) -> None:
        """Begin to gather the parts, in their order."""
        self._all_reduce.gather([part.halved for part in parts])
        links = self._all_reduce.world.links
        communication_thread.advance_meanwhile(self._all_reduce.advance, is_awaited=True, links=links)

    def finish_gather(self, parts: Sequence[ReducedPart]) -> None:
        """Wait until the parts are gathered."""
        for part in parts:
            self._all_reduce.finish_gather(part.halved)

    @without_grad
    def gather_now(self) -> None:
        """Gather and deliver all that this backward has reduced."""
        parts = self.take()
        if parts:
            self.gather(parts)
            self.finish_gather(parts)
        for part in parts:
            self._delivery.deliver(part.part, part.flat, None)


def _finish_at_end(all_reduce: DecoupledAllReduce) -> None:
    """Let `shutdown` finish the gathers of `all_reduce` before it closes the links of the world: other ranks may wait
    for them."""
    world = all_reduce.world
    existing: WeakSet[DecoupledAllReduce] | None = world.cache.get(_FINISHED_AT_END)
    if existing is None:
        existing = world.cache[_FINISHED_AT_END] = WeakSet()
        world.at_end.append(partial(_finish_gathers, existing))
    existing.add(all_reduce)


def _finish_gathers(all_reduces: WeakSet[DecoupledAllReduce]) -> None:
    for all_reduce in list(all_reduces):
        communication_thread.finish(COMMUNICATION_THREAD, all_reduce.finish_gathers)
