"""The factor of torch's GradScaler on the loss of a backward pass.

A sparse exchange adds residuals to later gradients, which a scaler may have multiplied by another factor. The
exchange needs the factor of each backward pass. The scaler does not pass it on, so `watch_scalers` makes
`GradScaler.scale` leave a hook on the loss that it returns: the hook runs first in the backward pass of that loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp import grad_scaler

from topkube.errors import TrainingError

_latest: tuple[int, torch.Tensor] = (-1, torch.ones(()))
"""The backward pass (torch's task number) of the last scaled loss, and its factor."""


def find_loss_scale(task: int) -> torch.Tensor | float:
    """Return the factor on the loss of backward pass `task`, on the scaler's device: 1.0 if no scaler scaled it."""
    return _latest[1] if _latest[0] == task else 1.0


def has_scaled_losses() -> bool:
    """Return True if a backward pass of this process had a loss that a scaler scaled."""
    return _latest[0] >= 0


def watch_scalers() -> None:
    """Make every GradScaler, also those that exist already, leave its factor with the losses that it scales. Subclasses
    with their own `scale`, such as FSDP's ShardedGradScaler, are watched too, whenever they are defined."""
    if "_watched_by_topkube" in vars(grad_scaler.GradScaler):
        return
    grad_scaler.GradScaler._watched_by_topkube = True  # type: ignore[attr-defined]
    scaler_classes = [grad_scaler.GradScaler]
    for scaler_class in scaler_classes:  # the list grows during the loop
        scaler_classes += scaler_class.__subclasses__()
        _watch(scaler_class)
    define = grad_scaler.GradScaler.__init_subclass__

    def on_definition(scaler_class: type[grad_scaler.GradScaler], **options: Any) -> None:
        define(**options)
        _watch(scaler_class)

    grad_scaler.GradScaler.__init_subclass__ = classmethod(on_definition)  # type: ignore[assignment, arg-type]


def _watch(scaler_class: type[grad_scaler.GradScaler]) -> None:
    """Replace the `scale` that the class itself defines, if it defines one."""
    if "scale" not in vars(scaler_class):
        return
    original = scaler_class.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled() and self._scale is not None:
            factor = self._scale.detach().clone()  # the scaler changes its own in place
            scaled = _hook_losses(scaled, factor)
        return scaled

    scaler_class.scale = scale  # type: ignore[method-assign]


def _hook_losses(scaled: Any, factor: torch.Tensor) -> Any:
    def note_factor(_: torch.Tensor) -> None:
        global _latest
        task, (latest_task, latest_factor) = torch._C._current_graph_task_id(), _latest
        if task == latest_task and latest_factor is not factor and float(latest_factor) != float(factor):
            raise TrainingError(
                f"a backward() contains losses that are scaled by {float(latest_factor):g} and by {float(factor):g}",
                cause="the losses of two gradient scalers were added",
                next_step="use one GradScaler for losses that share a backward()",
            )
        _latest = (task, factor)

    if isinstance(scaled, torch.Tensor):
        if scaled.requires_grad:
            scaled.register_hook(note_factor)  # type: ignore[no-untyped-call]
        return scaled
    if isinstance(scaled, list | tuple):
        for entry in scaled:
            _hook_losses(entry, factor)
        return scaled
    if isinstance(scaled, Iterable):  # a generator: each loss gets its hook when it is yielded
        return (_hook_losses(entry, factor) for entry in scaled)
    return scaled
