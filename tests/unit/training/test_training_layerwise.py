"""LARS, LAMB, master weights and the parallel tensor operator against their papers' formulas, written plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from topkube.errors import ArgumentError
from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.training.optimizers.parallel_tensor import assign_layers, compute_norms
from topkube.training.optimizers.parallel_tensor import map as map_layers

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def build_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 3, bias=False))


def train(model: nn.Module, optimizer: Any, steps: int = 6, dtype: torch.dtype = torch.float32) -> None:
    device = next(model.parameters()).device
    for step in range(steps):
        torch.manual_seed(100 + step)
        x = torch.randn(5, 7).to(device, dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class PlainLARS:
    """Algorithm 1 of the paper of LARS, one tensor after another."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float, trust: float) -> None:
        self.model, self.lr, self.momentum, self.decay, self.trust = model, lr, momentum, weight_decay, trust
        self.velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            if p.ndim > 1:
                rate = self.trust * p.norm() / (p.grad.norm() + self.decay * p.norm())
                change = rate * self.lr * (p.grad + self.decay * p)
            else:
                change = self.lr * p.grad
            self.velocity[name] = self.momentum * self.velocity[name] + change
            p -= self.velocity[name]

    def zero_grad(self) -> None:
        self.model.zero_grad()


class PlainLAMB:
    """Algorithm 2 of the paper of LAMB, one tensor after another."""

    def __init__(self, model: nn.Module, lr: float, decay: float) -> None:
        self.model, self.lr, self.decay, self.steps = model, lr, decay, 0
        self.m = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.m[name] = 0.9 * self.m[name] + 0.1 * p.grad
            self.v[name] = 0.999 * self.v[name] + 0.001 * p.grad**2
            r = self.m[name] / (1 - 0.9**self.steps) / ((self.v[name] / (1 - 0.999**self.steps)).sqrt() + 1e-6)
            if p.ndim > 1:
                r = r + self.decay * p
                p -= self.lr * p.norm() / r.norm() * r
            else:
                p -= self.lr * r

    def zero_grad(self) -> None:
        self.model.zero_grad()


PAIRS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "lars": (
        lambda m: LARS(m.parameters(), lr=2.0, momentum=0.8, weight_decay=0.01, trust=0.02),
        lambda m: PlainLARS(m, 2.0, 0.8, 0.01, 0.02),
    ),
    "lamb": (lambda m: LAMB(m.parameters(), lr=0.02, weight_decay=0.1), lambda m: PlainLAMB(m, 0.02, 0.1)),
}
"""By name: TopKube's optimizer, and the plain one."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PAIRS)
def test_steps_follow_the_papers(device: str, name: str) -> None:
    fused, plain = build_network().to(device), build_network().to(device)
    before = copy.deepcopy(list(fused.parameters()))
    train(fused, PAIRS[name][0](fused))
    train(plain, PAIRS[name][1](plain))
    for start, a, b in zip(before, fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
        assert not torch.equal(start, a)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PAIRS)
def test_a_state_that_is_loaded_continues_bit_for_bit(name: str, dtype: torch.dtype, device: str) -> None:
    """Moments are float32, also those of 16-bit parameters."""
    model = build_network().to(device, dtype)
    optimizer = PAIRS[name][0](model)
    train(model, optimizer, dtype=dtype)
    resumed_model = copy.deepcopy(model)
    resumed = PAIRS[name][0](resumed_model)
    resumed.load_state_dict(optimizer.state_dict())  # copies it: both go on
    for each_model, each_optimizer in ((model, optimizer), (resumed_model, resumed)):
        train(each_model, each_optimizer, dtype=dtype)
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)
        moments = optimizer.state[a], resumed.state[b]
        assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
        assert {moment.dtype for moment in moments[1].values()} == {torch.float32}


@pytest.mark.parametrize("name", [*PAIRS, "masters"])
def test_a_closure_is_evaluated_with_gradients_before_the_step(name: str) -> None:
    model, reference = build_network(), build_network()
    wrap = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1)) if name == "masters" else PAIRS[name][0](model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1) if name == "masters" else PAIRS[name][0](reference)
    x = torch.randn(5, 7)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    loss = reference(x).square().mean()
    loss.backward()
    plain.step()
    assert torch.equal(wrap.step(closure), loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=1.0), lambda p: LAMB(p, lr=0.1)], ids=["lars", "lamb"])
def test_layers_without_weights_or_gradients_move_as_plain_steps(make: Callable[[Any], Any]) -> None:
    zero, unused, still = (nn.Parameter(torch.full((2, 2), value)) for value in (0.0, 3.0, 2.0))
    optimizer = make([zero, unused, still])
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert bool((zero < 0).all())
    assert bool((unused == 3).all())
    assert bool(still.isfinite().all())


def test_training_continues_from_a_state_dict() -> None:
    for make, _ in PAIRS.values():
        whole, first = build_network(), build_network()
        train(whole, make(whole), 6)
        optimizer = make(first)
        train(first, optimizer, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        second = copy.deepcopy(first)
        resumed = make(second)
        resumed.load_state_dict(saved)
        for step in range(3, 6):
            torch.manual_seed(100 + step)
            second(torch.randn(5, 7)).square().mean().backward()
            resumed.step()
            resumed.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"lr": -1.0}, "lr = -1"), ({"lr": 1.0, "momentum": 1.0}, "below 1"), ({"lr": float("nan")}, "lr")],
)
def test_invalid_rates_are_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        LARS(build_network().parameters(), **arguments)


# ---- the parallel tensor operator


@given(sizes=st.lists(st.integers(0, 10**7), max_size=60), ranks=st.integers(1, 9))
def test_shares_are_balanced(sizes: list[int], ranks: int) -> None:
    owner = assign_layers(sizes, ranks)
    loads = [sum(size for size, rank in zip(sizes, owner, strict=True) if rank == r) for r in range(ranks)]
    assert len(owner) == len(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)  # moving a layer to another rank would not help


def test_a_rank_alone_gets_floats_like_many_ranks() -> None:
    """Whatever the function returns: tensors would keep their dtype, and their graph."""
    numbers = map_layers(lambda layers: torch.ones(len(layers), 2, dtype=torch.bfloat16), [3, 5], 2, parallel=False)
    assert [[type(number) for number in row] for row in numbers] == [[float] * 2] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_several_dtypes_are_computed_at_once(device: str) -> None:
    weights = [torch.randn(n, 3, device=device) for n in (1, 40, 7)]
    halves = [weight.bfloat16() for weight in weights]
    actual = compute_norms(weights, halves)
    for kind, values in zip((weights, halves), actual, strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.stack([x.float().norm() for x in kind]).cpu())
    assert compute_norms([], []) == [[], []]


def test_lamb_corrects_the_moments_of_a_parameter_for_its_own_start() -> None:
    """As torch's Adam does: with a constant gradient of 1, every step is as long as the learning rate."""
    early, late = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = LAMB([early, late], lr=0.25)
    for step in range(40):
        early.grad = torch.ones(3)
        late.grad = torch.ones(3) if step >= 30 else None
        optimizer.step()
    torch.testing.assert_close(early.detach(), torch.full((3,), -0.25 * 40), rtol=1e-4, atol=0)
    torch.testing.assert_close(late.detach(), torch.full((3,), -0.25 * 10), rtol=1e-4, atol=0)


def test_lamb_goes_on_with_a_state_without_counts_of_parameters() -> None:
    """Older versions counted the steps of a group."""
    models = [build_network() for _ in range(2)]
    optimizers = [LAMB(model.parameters(), lr=0.02) for model in models]
    train(models[0], optimizers[0], 6)
    train(models[1], optimizers[1], 3)
    state = copy.deepcopy(optimizers[1].state_dict())
    for values in state["state"].values():
        del values["step"]
    optimizers[1] = LAMB(models[1].parameters(), lr=0.02)
    optimizers[1].load_state_dict(state)
    for step in range(3, 6):
        torch.manual_seed(100 + step)
        models[1](torch.randn(5, 7)).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_complex_parameters_are_refused(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="complex"):
        kind([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
