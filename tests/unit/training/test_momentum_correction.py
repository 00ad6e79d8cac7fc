"""Momentum correction on one rank, against a reference of the paper's algorithm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import topkube
from topkube.errors import ArgumentError

MOMENTUM, RATE, DENSITY, STEPS = 0.8, 0.05, 0.1, 12


@pytest.fixture(autouse=True)
def world() -> None:
    topkube.init()


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 2))


def compute_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
    return ((model(x) - x[:, :2]) ** 2).mean()


def wrap(model: nn.Module, plain: torch.optim.Optimizer, **options: object) -> topkube.DistributedOptimizer:
    settings = {"aggregation": "hitopk", "density": DENSITY, "warmup_steps": 0, "wire": "fp32"}
    return topkube.DistributedOptimizer(
        plain, model.named_parameters(), **{**settings, "momentum_correction": True, **options}
    )


class ReferenceExchange:
    """The exchange of the large weight by algorithm 1 of Lin et al., with factor masking: the velocity of an entry is
    cleared when the entry is sent. A gradient enters the velocity times `gain`."""

    def __init__(self, gain: float) -> None:
        self._gain = gain
        self._velocity, self._residual = torch.zeros(40, 30), torch.zeros(40, 30)

    def run(self, gradient: torch.Tensor | None, momentum: float = MOMENTUM) -> torch.Tensor:
        """Return what is sent in this step; the other entries are zero."""
        assert gradient is not None
        self._velocity = momentum * self._velocity + self._gain * gradient
        self._residual += self._velocity
        velocity, residual = self._velocity.view(-1), self._residual.view(-1)
        sent = residual.abs().topk(math.ceil(residual.numel() * DENSITY)).indices
        update = torch.zeros_like(residual)
        update[sent] = residual[sent]
        residual[sent] = velocity[sent] = 0
        return update.view_as(gradient)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_follows_the_algorithm_of_the_paper(decay: float) -> None:
    """Biases and the small last layer are exchanged dense, so plain SGD with momentum trains them."""
    model, reference = build_model(), build_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=decay))
    large, *other_parameters = reference.parameters()
    plain = torch.optim.SGD(other_parameters, RATE, MOMENTUM, weight_decay=decay)
    exchange = ReferenceExchange(gain=1.0)
    for step in range(STEPS):
        compute_loss(model, step).backward()
        exchanged = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), exchanged, strict=True))
        optimizer.zero_grad()
        reference.zero_grad()
        compute_loss(reference, step).backward()
        with torch.no_grad():
            large -= RATE * (exchange.run(large.grad) + decay / (1 - MOMENTUM) * large)
        plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_schedule_may_set_the_momentum_to_zero_for_a_step() -> None:
    model, reference = build_model(), build_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM))
    large, *other_parameters = reference.parameters()
    plain = torch.optim.SGD(other_parameters, RATE, MOMENTUM)
    exchange = ReferenceExchange(gain=1.0)
    for step in range(STEPS):
        momentum = 0.0 if step == 2 else MOMENTUM
        optimizer.param_groups[0]["momentum"] = plain.param_groups[0]["momentum"] = momentum
        compute_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        compute_loss(reference, step).backward()
        with torch.no_grad():
            large -= RATE * exchange.run(large.grad, momentum)
        plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_groups_with_another_momentum_are_refused_at_any_time() -> None:
    model, more = build_model(), nn.Linear(30, 40)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM))
    for options in ({"momentum": 0.5}, {"nesterov": True}):
        with pytest.raises(ArgumentError, match="momentum correction does not support"):
            optimizer.add_param_group({"params": list(more.named_parameters("more")), **options})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(more.named_parameters("more"))})
    compute_loss(model, 0).backward()
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(ArgumentError, match="the same in all groups"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_applies_the_exchanged_gradients_without_its_own_first_moment(kind: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.01, "weight_decay": 0.05, "eps": 1e-6}
    model, reference = build_model(), build_model()
    optimizer = wrap(model, kind(model.parameters(), betas=(MOMENTUM, 0.99), **options))
    large, *other_parameters = reference.parameters()
    plain = kind(
        [{"params": [large], "betas": (0.0, 0.99)}, {"params": other_parameters, "betas": (MOMENTUM, 0.99)}], **options
    )
    exchange = ReferenceExchange(gain=1 - MOMENTUM)
    for step in range(STEPS):
        compute_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        compute_loss(reference, step).backward()
        large.grad = exchange.run(large.grad)
        plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dense_training_keeps_the_optimizers_own_momentum() -> None:
    model, reference = build_model(), build_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM), aggregation="dense")
    plain = torch.optim.SGD(reference.parameters(), RATE, MOMENTUM)
    for step in range(5):
        compute_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        compute_loss(reference, step).backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_step_that_is_not_finite_leaves_the_velocity_as_it_was() -> None:
    model = build_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM))

    def read_velocity() -> torch.Tensor:
        [(_, values)] = optimizer.state_dict()["topkube"]["residuals"]["pieces"]["0.weight velocity"]
        return values

    for step in range(3):
        compute_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = read_velocity()
    assert before.any()
    (compute_loss(model, 3) * torch.nan).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(read_velocity(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.AdamW(p, betas=(0.0, 0.99)),
        lambda p: torch.optim.SGD(p, RATE),
        lambda p: torch.optim.SGD(p, RATE, MOMENTUM, nesterov=True),
        lambda p: torch.optim.SGD(p, RATE, MOMENTUM, dampening=0.1),
    ],
)
def test_other_optimizers_are_refused(make) -> None:
    model = build_model()
    with pytest.raises(ArgumentError, match="momentum correction does not support this"):
        wrap(model, make(model.parameters()))
