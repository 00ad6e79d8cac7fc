"""A small network, its data, and functions that compare two trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

import topkube
from topkube.world import World

SPARSE: dict[str, object] = {"aggregation": "hitopk", "density": 0.05}
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build_network() -> nn.Module:
    """Return a network of large and small tensors: several buckets of 8 KB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))


def build_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def build_optimizer(model: nn.Module, make: Optimizers = build_sgd, **options: object) -> topkube.DistributedOptimizer:
    settings: dict[str, object] = {"aggregation": "dense", "warmup_steps": 0, "wire": "fp32", "bucket_bytes": 8192}
    return topkube.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **{**settings, **options})


def draw_samples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 24, generator=generator)
    return x, x[:, :1] * 2 - x[:, 1:2]


def take_own_part(x: torch.Tensor) -> torch.Tensor:
    return x[topkube.rank() :: topkube.size()]


def compute_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def train(model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: int) -> list[torch.Tensor]:
    """Take steps with 8 samples per rank, and return a copy of the weights, which all ranks must have alike."""
    for step in range(steps):
        x, y = draw_samples(8 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_all_ranks(copy_weights(model))
    return copy_weights(model)


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float = 2e-5) -> None:
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def copy_weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def write_weights(model: nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), weights, strict=True):
            parameter.copy_(values)


class DeliveredGradients:
    """A comparison of the change of a model's weights with the gradients that were computed for it. The optimizer's
    learning rate is 1, without momentum."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world, self._model, self._start = world, model, copy_weights(model)
        self._totals = [np.zeros(tuple(parameter.shape)) for parameter in model.parameters()]

    def count(self, gradients: Iterable[torch.Tensor]) -> None:
        """Add the mean over all ranks of these gradients, one for each parameter. All ranks call this together."""
        for total, gradient in zip(self._totals, gradients, strict=True):
            total += self._world.comm.allreduce(gradient.double().numpy()) / self._world.size

    def measure_missing(self) -> float:
        """Return the largest difference between the sum of the counted gradients and the change of the weights."""
        changes = [
            (a.double() - b.double()).numpy() for a, b in zip(self._start, copy_weights(self._model), strict=True)
        ]
        return max(float(np.abs(a - b).max()) for a, b in zip(changes, self._totals, strict=True))


def are_equal_on_all_ranks(tensors: list[torch.Tensor]) -> bool:
    everyone = topkube.world.current().comm.allgather([tensor.detach().numpy().tobytes() for tensor in tensors])
    return all(other == everyone[0] for other in everyone)


def sum_residuals(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sum of all ranks' residuals for every parameter."""
    return sum_pieces(optimizer.state_dict()["topkube"]["residuals"]["pieces"], model)


def sum_pieces(pieces: dict[str, list[tuple[int, torch.Tensor]]], model: nn.Module) -> dict[str, torch.Tensor]:
    totals = {}
    for name, parameter in model.named_parameters():
        full = np.zeros(parameter.numel())
        for start, values in pieces.get(name, []):
            full[start : start + values.numel()] += values.double().numpy()
        totals[name] = torch.from_numpy(topkube.world.current().comm.allreduce(full)).view_as(parameter)
    return totals


def build_plain_sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that moves weights by the gradients, so that their change shows what was sent."""
    return torch.optim.SGD(parameters, lr=1.0)


def shrink(x: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are small enough for a learning rate of 1."""
    return 0.01 * x


@contextmanager
def check_conservation(model: nn.Module, optimizer: topkube.DistributedOptimizer, tolerance: float = 1e-5):
    """Check that no gradient is lost. Yield a function: call it with each loss over the whole batch whose gradient a
    step uses. At the end, the change of the weights (learning rate 1) plus the change of the residuals must be the sum
    of these gradients."""
    start, before = copy_weights(model), sum_residuals(optimizer, model)
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]

    def count(loss: torch.Tensor) -> None:
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for total, gradient in zip(expected, gradients, strict=True):
            total += 0 if gradient is None else gradient

    yield count
    owed = sum_residuals(optimizer, model)
    for (name, parameter), first, total in zip(model.named_parameters(), start, expected, strict=True):
        paid = (first - parameter).double().detach()
        torch.testing.assert_close(
            paid + owed[name] - before[name], total, rtol=1e-4, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert are_equal_on_all_ranks(copy_weights(model))
