"""Trainings of one process that take turns, so that their steps can be compared. A training pauses while another makes
steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from topkube.training import DistributedOptimizer

Step = Callable[[], None]


@dataclass
class Training:
    """A training that can pause: a function that makes a step, those that are called before and after the steps of a
    turn, and a function that ends the training. `is_final` returns False as long as what `auto` or `dense` stands for
    may change, and `describe_choice` returns what that is, "" for all other names."""

    step: Step
    resume: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None
    end: Callable[[], object] = lambda: None
    is_final: Callable[[], bool] = lambda: True
    describe_choice: Callable[[], str] = lambda: ""


def build_step(model: Callable[..., Any], optimizer: Any, codes: torch.Tensor, targets: torch.Tensor) -> Step:
    """Return a function that makes a step on one batch. The model returns its loss."""

    def step() -> None:
        model(codes, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_training(optimizer: DistributedOptimizer, step: Step) -> Training:
    """Return the training that makes a `step` with `optimizer`."""
    # Imported here, because ranks without TopKube's optimizer use this module too.
    from topkube.training.exchange.autograd.backward_pass import current_pass
    from topkube.training.exchange.late import watched_tensors

    def resume() -> None:
        if optimizer._backward.late is not None:
            watched_tensors.watch()

    def pause() -> None:
        optimizer.state_dict()  # finishes what is left for the next forward
        watched_tensors.unwatch()  # it costs time in each call of torch
        # With several optimizers, buckets are exchanged after backward. This one counts again when it goes on.
        current_pass.remove(optimizer._backward)
        optimizer._backward.number = 0

    def describe_choice() -> str:
        choice = optimizer.tuning.choice
        return "" if choice is None else choice.name

    return Training(step, resume, pause, optimizer.unwrap, lambda: optimizer.tuning.is_settled, describe_choice)
