"""LARS and LAMB with the gradient of one node, which has more noise than the mean gradient, without an exchange."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.layerwise import (
    LayerwiseNoise,
    NoisyGradients,
    compute_noise_share,
    compute_ratio_of_mean,
)

NODES = 4
WORLD: Any = SimpleNamespace(nodes=NODES, size=1)


def draw(shape: tuple[int, ...] = (40, 30), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_lars_divides_the_norm_of_the_gradient_of_each_tensor() -> None:
    """A matrix with a ratio, a matrix without a ratio, and a vector, which LARS does not adapt."""
    tensors = [torch.nn.Parameter(draw(shape, n)) for n, shape in enumerate([(8, 8), (4, 4), (16,)])]
    before = [tensor.detach().clone() for tensor in tensors]
    for n, tensor in enumerate(tensors):
        tensor.grad = draw(tuple(tensor.shape), 10 + n)
    optimizer = LARS(tensors, lr=2.0, weight_decay=0.1, trust=0.01)
    with LayerwiseNoise(optimizer, NODES, WORLD).corrected({tensors[0]: 2.25, tensors[2]: 3.0}):
        optimizer.step()
    for tensor, start, root in zip(tensors, before, (1.5, 1.0, 1.0), strict=True):
        assert tensor.grad is not None
        norm = start.norm()
        rate = 0.01 * norm / (tensor.grad.norm() / root + 0.1 * norm)
        change = 2.0 * (rate * (tensor.grad + 0.1 * start) if tensor.ndim > 1 else tensor.grad)
        torch.testing.assert_close(tensor.detach(), start - change, rtol=1e-5, atol=1e-6)


def test_the_mean_of_nodes_steps_is_the_step_of_the_mean_gradient_with_lars() -> None:
    """Without the ratio, the mean of the steps would be half as long: the norm of each node's gradient contains all the
    noise of the node, but the norm of the mean gradient contains less."""
    signal, noises = 0.1 * draw(), [draw(seed=1 + node) for node in range(NODES)]
    gradients = [signal + noise for noise in noises]
    mean = torch.stack(gradients).mean(0)

    def compute_step(gradient: torch.Tensor, ratio: float) -> torch.Tensor:
        weight = torch.nn.Parameter(draw(seed=99))
        weight.grad = gradient
        optimizer = LARS([weight], lr=1.0, weight_decay=0.0)
        with LayerwiseNoise(optimizer, NODES, WORLD).corrected({weight: ratio}):
            optimizer.step()
        return weight.detach() - draw(seed=99)

    expected = compute_step(mean, 1.0)
    ratios = [float(gradient.square().sum() / mean.square().sum()) for gradient in gradients]
    corrected = torch.stack([compute_step(g, ratio) for g, ratio in zip(gradients, ratios, strict=True)]).mean(0)
    plain = torch.stack([compute_step(g, 1.0) for g in gradients]).mean(0)
    torch.testing.assert_close(corrected, expected, rtol=1e-3, atol=1e-6)
    assert plain.norm() < 0.6 * expected.norm()


@pytest.mark.parametrize(("steps", "decay"), [(1, 0.0), (40, 0.0), (40, 0.1)])
def test_the_mean_of_nodes_steps_is_as_long_as_that_of_the_mean_gradient_with_lamb(steps: int, decay: float) -> None:
    """Each gradient is a constant plus noise. Weights are reset before each step, and the last steps are compared."""
    gradients = [[0.1 * draw() + draw(seed=1000 * node + t) for t in range(1, steps + 1)] for node in range(NODES)]
    means = [torch.stack(row).mean(0) for row in zip(*gradients, strict=True)]
    squares = [float(gradient.square().sum()) for row in gradients for gradient in row]
    ratio = sum(squares) / NODES / sum(float(mean.square().sum()) for mean in means)

    def compute_last_step(rows: list[torch.Tensor], ratio: float) -> torch.Tensor:
        weight = torch.nn.Parameter(draw(seed=99))
        optimizer = LAMB([weight], lr=0.1, weight_decay=decay)
        with LayerwiseNoise(optimizer, NODES, WORLD).corrected({weight: ratio}):
            for gradient in rows:
                weight.data.copy_(draw(seed=99))
                weight.grad = gradient
                optimizer.step()
        return weight.detach() - draw(seed=99)

    expected = compute_last_step(means, 1.0)
    corrected = torch.stack([compute_last_step(row, ratio) for row in gradients]).mean(0)
    plain = torch.stack([compute_last_step(row, 1.0) for row in gradients]).mean(0)
    lengths = [float(change.norm() / expected.norm()) for change in (corrected, plain)]
    assert abs(lengths[0] - 1) < 0.04, lengths
    assert lengths[1] < 0.9, lengths


def test_lamb_keeps_its_second_moment_and_does_not_adapt_vectors() -> None:
    for ratio in (1.0, 4.0):
        vector = torch.nn.Parameter(torch.zeros(6))
        vector.grad = torch.full((6,), 0.5)
        optimizer = LAMB([vector], lr=0.1, eps=0.0)
        with LayerwiseNoise(optimizer, NODES, WORLD).corrected({vector: ratio}):
            optimizer.step()
        torch.testing.assert_close(optimizer.state[vector]["square"], torch.full((6,), 0.001 * 0.25))
        torch.testing.assert_close(vector.detach(), torch.full((6,), -0.1 * math.sqrt(ratio)))


@given(st.floats(1, 8), st.floats(0, 1), st.integers(2, 8))
def test_a_running_mean_has_less_noise_than_its_gradients(ratio: float, share: float, nodes: int) -> None:
    ratio = min(ratio, 0.999 * nodes)
    value = compute_ratio_of_mean(ratio, share, nodes)
    assert 1 - 1e-9 <= value <= ratio * (1 + 1e-9)
    assert compute_ratio_of_mean(ratio, 1.0, nodes) == pytest.approx(ratio)
    assert compute_ratio_of_mean(1.0, share, nodes) == 1
    if share > 0.01:
        assert compute_ratio_of_mean(nodes, share, nodes) == pytest.approx(nodes)


def test_the_share_of_noise_that_a_running_mean_keeps() -> None:
    for beta, steps in ((0.9, 1), (0.9, 3), (0.5, 20), (0.0, 4)):
        weights = [(1 - beta) * beta**age / (1 - beta**steps) for age in range(steps)]
        assert compute_noise_share(beta, steps) == pytest.approx(sum(weight**2 for weight in weights))


def test_an_error_in_the_step_ends_the_correction() -> None:
    weight = torch.nn.Parameter(draw())
    optimizer = LARS([weight], lr=1.0)

    def fail() -> None:
        with LayerwiseNoise(optimizer, NODES, WORLD).corrected({weight: 2.0}):
            assert optimizer.noise.list_ratios([weight]) == [2.0]
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert optimizer.noise == NoisyGradients()
    assert copy.deepcopy(optimizer).noise == pickle.loads(pickle.dumps(optimizer)).noise == NoisyGradients()
