"""Steps about which the device decides: the host launches the optimizer's step before it has read if the
gradients are finite.

The fused optimizers of torch take a tensor `found_inf`, and change nothing if it is 1. All ranks compute the same flag
on their devices (`DeviceAllReduce.flush_undecided`), so a step counts on all ranks or on none. The host reads the flag
one backward later, and then corrects its numbers of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from topkube.collectives.device.memory import DeviceFlag


@dataclass
class StepDecision:
    """The decision about the gradients of a backward: the flag is 1 if they are not finite. `steps` is how many steps
    the optimizer has launched with them."""

    flag: DeviceFlag
    steps: int = 0


class DeviceDecisions:
    """The decisions of an optimizer that the host has not read: the current decision, about the gradients in `.grad`,
    and earlier decisions, about gradients that have been zeroed or replaced."""

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._current: StepDecision | None = None
        self._earlier: list[StepDecision] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the steps of this optimizer to the device, whenever its kernels can skip a step."""
        self._optimizer = optimizer

    @property
    def is_undecided(self) -> bool:
        """True if the host has not read if the gradients in `.grad` are finite."""
        return self._current is not None

    @property
    def are_possible(self) -> bool:
        """True if the device can skip the next step of the optimizer."""
        return self._optimizer is not None and can_skip_on_device(self._optimizer)

    def hold(self, flag: DeviceFlag) -> None:
        """Hold the decision about the gradients that a backward has just exchanged."""
        self.end_current()
        self._current = StepDecision(flag)

    def end_current(self) -> None:
        """Note that the gradients of the current decision were zeroed or replaced."""
        if self._current is not None:
            self._earlier.append(self._current)
        self._current = None

    @contextmanager
    def passing_flag(self) -> Iterator[None]:
        """Return a context in which a step of the optimizer changes nothing if the current flag is 1."""
        if self._current is None:
            yield
            return
        self._current.steps += 1
        optimizer: Any = self._optimizer
        optimizer.found_inf = self._current.flag.tensor
        try:
            yield
        finally:
            del optimizer.found_inf

    def take_earlier(self) -> list[StepDecision]:
        """Return the earlier decisions, and forget them."""
        decisions, self._earlier = self._earlier, []
        return decisions

    def take_current(self) -> StepDecision | None:
        """Return the current decision, and forget it; None if there is none."""
        decision, self._current = self._current, None
        return decision


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer takes `found_inf` and a step with 1 changes nothing.

    The fused optimizers of torch do. SGD must have its momentum buffers already: a skipped first step allocates them
    without filling them, and the next step would read memory of unknown contents. Hooks of the script
    on the optimizer's step must not run for a skipped step, so an optimizer with such hooks does not qualify
    (`StepGuard` has registered one)."""
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not is_fused or not type(optimizer).__module__.startswith("torch.optim."):
        return False
    if len(optimizer._optimizer_step_pre_hooks) > 1 or optimizer._optimizer_step_post_hooks:
        return False
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return False
    return all(group.get("fused") and _has_buffers(optimizer, group) for group in optimizer.param_groups)


def _has_buffers(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("momentum"):
        return True
    return all(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
        for parameter in group["params"]
        if parameter.requires_grad
    )
