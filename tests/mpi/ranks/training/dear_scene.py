"""The model of the cases of DeAR, and comparisons of a script with DeAR and without."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import nn

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)

Step = Callable[[nn.Module, topkube.DistributedOptimizer, int], None]
STEPS = 5


class DearNetwork(nn.Module):
    """A network of large and small tensors: one layer is used twice, one is frozen, and some steps leave layers out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(24, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.norm, self.frozen, self.odd, self.unused = (nn.LayerNorm(64), *(nn.Linear(64, 64) for _ in range(3)))
        self.frozen.requires_grad_(False)
        self.uses_odd = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        x = self.frozen(self.norm(x))
        return self.last(torch.tanh(self.odd(x) if self.uses_odd else x))


def build_adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run_backward(model: nn.Module, step: int) -> None:
    x, y = draw_samples(8 * topkube.size(), step)
    compute_loss(model, take_own_part(x), take_own_part(y)).backward()


def take_step(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
    run_backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def train(
    overlap: str, script: Step, steps: int = STEPS, **options: object
) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    model = DearNetwork()
    del model.unused  # with it, no step would be late
    optimizer = build_optimizer(model, build_adamw, overlap=overlap, **options)
    for step in range(steps):
        script(model, optimizer, step)
    return model, optimizer


def is_late(optimizer: topkube.DistributedOptimizer) -> bool:
    return optimizer._late is not None and optimizer._late.is_pending


def check_equal(script: Step, steps: int = STEPS, **options: object) -> None:
    """Compare a script with DeAR and without, bit for bit: weights, and the optimizer's state."""
    (late, late_optimizer), (reference, reference_optimizer) = (
        train(overlap, script, steps, **options) for overlap in ("dear", "backward")
    )
    for own, expected in zip(copy_weights(late), copy_weights(reference), strict=True):
        assert torch.equal(own, expected)
    states = zip(
        late_optimizer.state_dict()["state"].values(), reference_optimizer.state_dict()["state"].values(), strict=True
    )
    for own, expected in states:
        assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert are_equal_on_all_ranks(copy_weights(late))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def check_resumed(first_overlap: str, **options: object) -> None:
    """Compare a run with DeAR, and one that resumes with DeAR from a state of `first_overlap`, bit for bit."""
    whole, _ = train("dear", take_step, **options)
    model, optimizer = train(first_overlap, take_step, STEPS // 2, **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.unwrap()
    resumed, resumed_optimizer = train("dear", take_step, 0, **options)
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    for step in range(STEPS // 2, STEPS):
        take_step(resumed, resumed_optimizer, step)
    assert all(torch.equal(a, b) for a, b in zip(copy_weights(whole), copy_weights(resumed), strict=True))
