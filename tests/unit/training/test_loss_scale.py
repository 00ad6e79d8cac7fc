"""The factor of every kind of GradScaler reaches the backward pass of the loss that it scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from topkube.training.exchange.autograd.loss_scale import find_loss_scale, watch_scalers

watch_scalers()


class DefinedLater(GradScaler):
    """A subclass whose own `scale` calls that of torch."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)


class Inheriting(GradScaler):
    pass


def read_factor_in_backward(scaler: GradScaler) -> float:
    """Return the factor that a hook reads during the backward pass of a scaled loss."""
    weight, factors = torch.ones(3, requires_grad=True), []
    doubled = weight * 2
    doubled.register_hook(lambda _: factors.append(float(find_loss_scale(torch._C._current_graph_task_id()))))
    scaler.scale(doubled.sum()).backward()
    return factors[0]


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler, DefinedLater, Inheriting])
def test_the_factor_of_a_scaler_is_seen_in_backward(kind: type[GradScaler]) -> None:
    assert read_factor_in_backward(kind("cpu", init_scale=8.0)) == 8.0


def test_watching_again_changes_nothing() -> None:
    before = GradScaler.scale, ShardedGradScaler.scale
    watch_scalers()
    assert (GradScaler.scale, ShardedGradScaler.scale) == before


def test_a_scaler_that_is_off_has_no_factor() -> None:
    assert read_factor_in_backward(GradScaler("cpu", enabled=False)) == 1.0
