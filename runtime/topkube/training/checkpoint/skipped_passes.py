"""Passes over the data that a script asks for after a resume although the checkpoint covers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from topkube.errors import TrainingError


class SkippedPasses:
    """A check that nothing changes while a script's loop goes through passes that a checkpoint covers. Their batches
    are skipped, but the rest of the loop's body runs: a `scheduler.step()` there would count an epoch twice.

    `optimizer` is one whose learning rates and other options count, as do those of optimizers in `more`. Other objects
    in `more` have a `state_dict`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> None:
        self._optimizer, self._more = optimizer, more
        self._before: dict[str, int] = {}

    def note(self) -> None:
        """Note that a pass is skipped."""
        self._before = self._before or self._digest_states()

    def check(self) -> None:
        """Raise TrainingError if something has changed since the first pass was skipped. A pass begins."""
        before, self._before = self._before, {}
        now = self._digest_states() if before else {}
        changed = [name for name, digest in before.items() if now[name] != digest]
        if changed:
            raise TrainingError(
                f"the script changed {' and '.join(changed)} while it went through epochs that the checkpoint covers",
                cause="the loop over epochs begins with 0 after a resume, so what follows its batches, such as"
                " scheduler.step(), ran a second time for these epochs",
                next_step="write the loop as `for epoch in run.epochs(...):`, which begins where the checkpoint ends",
            )

    def _digest_states(self) -> dict[str, int]:
        states: dict[str, Any] = {"the optimizer's options": _list_options(self._optimizer)}
        for name, item in self._more.items():
            if isinstance(item, torch.optim.Optimizer):
                states[f"the options of {name}"] = _list_options(item)
            else:
                states[f"the state of {name}"] = item.state_dict()
        return {name: _digest(state) for name, state in states.items()}


def _list_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _digest(state: Any) -> int:
    total = xxhash.xxh3_64()

    def update(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            values = value.detach().cpu().contiguous().flatten()
            update((str(value.dtype), tuple(value.shape), values.view(torch.uint8).numpy().tobytes()))
        elif isinstance(value, Mapping):
            update([*value.items()])
        elif isinstance(value, list | tuple):
            total.update(f"{type(value).__name__} {len(value)}:".encode())
            for item in value:
                update(item)
        elif isinstance(value, bytes):
            total.update(value)
        else:
            total.update(f"{value!r};".encode())

    update(state)
    return int(total.intdigest())
