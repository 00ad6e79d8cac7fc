"""The current backward pass, and the optimizers whose parameters it reaches.

Several distributed optimizers can take part in one `backward()`, and ranks may reach them in different orders or reach
different optimizers. All ranks must nevertheless exchange the same gradients in the same order. If a process has one
optimizer, its buckets are exchanged while backward continues. If it has several, all ranks agree at the end of backward
which optimizers took part on any rank, and exchange their gradients in the order in which they were created.
"""

from __future__ import annotations

import gc
import weakref
from typing import Protocol

import torch

from topkube.errors import TrainingError
from topkube.training.exchange.autograd.loss_scale import find_loss_scale
from topkube.training.exchange.autograd.nested_backward import refuse_nested_backward
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import digest, open_agreement
from topkube.world import World


class Participant(Protocol):
    """The exchange of one optimizer, as the backward pass sees it. `number` orders the optimizers of a process, 0 for
    none. `synchronizes` is False while gradients only accumulate."""

    number: int
    synchronizes: bool
    world: World

    def begin(self) -> None:
        """Begin a backward, before its first gradient is accumulated."""

    def finish(self) -> None:
        """Finish the backward, in the thread that called it."""

    def abandon(self) -> None:
        """Undo a backward that did not finish."""

    def finish_late(self) -> None:
        """Finish what is left for the next forward."""


class BackwardPass:
    """The current backward pass of this process. `has_several` is True if more than one distributed optimizer
    exists."""

    def __init__(self) -> None:
        self.has_several = False
        self._registered: list[weakref.ref[Participant]] = []
        self._created_count = 0
        self._task: int | None = None
        self._reached: list[Participant] = []

    def register(self, exchange: Participant) -> int:
        """Add an optimizer's exchange. Return its number, which is the same on every rank if all ranks create their
        optimizers in the same order. The other optimizers finish what they have left for the next forward: messages and
        buffers of such work are those of one optimizer at a time."""
        self._free_cycles()
        for other in self._list_living():
            other.finish_late()
        self._registered = [reference for reference in self._registered if reference() is not None]
        self.has_several = bool(self._registered)
        self._registered.append(weakref.ref(exchange))
        self._created_count += 1
        return self._created_count

    def remove(self, exchange: Participant) -> None:
        """Remove an optimizer's exchange."""
        self._registered = [reference for reference in self._registered if reference() not in (None, exchange)]
        self.has_several = len(self._registered) > 1

    def is_broken_off(self, exchange: Participant) -> bool:
        """Return True if the last backward that reached `exchange` did not finish."""
        return exchange in self._reached

    @property
    def loss_scale(self) -> torch.Tensor | float:
        """The factor that a gradient scaler put on the loss of the backward pass that runs; else 1.0."""
        return find_loss_scale(self._task) if self._task is not None else 1.0

    def reach(self, exchange: Participant) -> None:
        """Note that a gradient of `exchange` arrives. The first gradient of a backward begins the pass. Raises
        TrainingError for a backward() inside another, and if the previous backward did not finish after ranks had
        exchanged gradients."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            refuse_nested_backward()
            reached, self._reached, self._task = self._reached, [], None
            for broken_off in reached:
                broken_off.abandon()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if exchange not in self._reached:
            exchange.number = exchange.number or self.register(exchange)  # a copy counts when it trains
            self._reached.append(exchange)
            exchange.begin()

    def _end(self) -> None:
        """Finish every optimizer that took part, in the thread that called backward()."""
        reached, self._reached = self._reached, []
        try:
            accumulates = all(not exchange.synchronizes for exchange in reached)  # nothing is exchanged
            for exchange in self._agree_on_reached(reached) if self.has_several and not accumulates else reached:
                if exchange not in reached:
                    exchange.begin()
                exchange.finish()
        finally:
            self._task = None

    def _free_cycles(self) -> None:
        """Free the optimizers that only a reference cycle keeps alive: they would count on some ranks only. A rank that
        replays batches freezes its objects again if the script had frozen some (`batches/replays.py`), so frozen
        objects are searched as well. That is slow, and is done only if it can matter."""
        if self._list_living():
            communication_thread.run(lambda: None)  # the thread may still hold work of an optimizer that is gone
            gc.collect()
        if self._list_living() and gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _list_living(self) -> list[Participant]:
        return [exchange for reference in self._registered if (exchange := reference()) is not None]

    def _agree_on_reached(self, reached: list[Participant]) -> list[Participant]:
        """Return the optimizers that were reached on any rank, in the order in which they were created."""
        living = sorted(self._list_living(), key=lambda exchange: exchange.number)
        chosen = [exchange for exchange in reached if not exchange.synchronizes]
        worlds = dict.fromkeys(id(exchange.world) for exchange in living)
        for key in worlds:
            synchronizing = [exchange for exchange in living if id(exchange.world) == key and exchange.synchronizes]
            if synchronizing:
                own_numbers = [exchange.number for exchange in synchronizing if exchange in reached]
                numbers = _gather_union(synchronizing[0].world, own_numbers)
                by_number = {exchange.number: exchange for exchange in synchronizing}
                if missing := [number for number in numbers if number not in by_number]:
                    raise TrainingError(
                        f"other ranks exchange gradients of an optimizer that this rank does not have (the"
                        f" optimizer with number {missing[0]})",
                        cause="an optimizer was deleted, or is under no_sync(), on some ranks only",
                        next_step="create, use and delete the same optimizers on every rank",
                    )
                chosen += [by_number[number] for number in numbers]
        return sorted(chosen, key=lambda exchange: exchange.number)


def _gather_union(world: World, numbers: list[int]) -> list[int]:
    """Return the numbers that any rank has, sorted."""
    if world.size == 1:
        return numbers
    own = sorted(numbers)
    own_digest = digest(own)
    largest_count, largest_digest, largest_negative_digest = communication_thread.run(
        lambda: open_agreement(world).maximum([len(own), own_digest, -own_digest])
    )
    if largest_digest == -largest_negative_digest:  # the largest digest is also the smallest: all ranks have the same
        return own
    padded = [float(number) for number in own] + [-1.0] * (int(largest_count) - len(own))
    rows = communication_thread.run(lambda: open_agreement(world).gather(padded))
    return sorted({int(number) for number in rows.flat if number >= 0})


current_pass = BackwardPass()
"""The backward pass of this process."""
