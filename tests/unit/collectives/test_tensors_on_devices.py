"""`allreduce_` of tensors on a device: the same engine on CPU tensors, in a world of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import topkube
from topkube import collectives
from topkube.errors import ArgumentError
from topkube.world import World


@pytest.fixture
def world() -> World:
    return replace(topkube.world.init(), cache={}, at_end=[])


def reduce_on_device(world: World, x: torch.Tensor, residual: Any = None, algorithm: str = "hitopk") -> torch.Tensor:
    result: torch.Tensor = collectives._reduce_on_device(
        world, x, "mean", algorithm, 0.1, "fp32", "topk", residual, "fp32"
    )
    return result


def test_a_residual_of_any_shape_keeps_what_was_not_sent(world: World) -> None:
    x, residual = torch.randn(20, 10), torch.randn(20, 10)
    total = x + residual
    assert reduce_on_device(world, x, residual) is x
    assert 0 < int(x.count_nonzero()) < x.numel()
    assert torch.equal(x + residual, total)


def test_a_parameter_is_reduced_in_place(world: World) -> None:
    class Engine:
        """An engine that adds up the arrays of two equal ranks."""

        def begin(self, _: Any, request: Any) -> None:
            request.array.mul_(2)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: True

    world.cache["all-reduce on cpu"] = Engine()
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert reduce_on_device(world, parameter, algorithm="dense") is parameter
    assert torch.equal(parameter, torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("x", "residual", "problem"),
    [
        (torch.ones(4, 6).double(), None, "array has dtype torch.float64"),
        (torch.ones(4, 6).t(), None, "array is not contiguous"),
        (torch.ones(24), torch.zeros(4, 6).t(), "residual is not contiguous"),
        (torch.ones(24), torch.zeros(24).half(), "residual has dtype torch.float16"),
        (torch.ones(24), torch.zeros(23), "residual is not a float32 tensor of 24 elements"),
    ],
)
def test_tensors_that_cannot_be_reduced_are_refused_before_anything_is_sent(
    world: World, x: torch.Tensor, residual: Any, problem: str
) -> None:
    calls = world.calls
    with pytest.raises(ArgumentError, match=problem):
        reduce_on_device(world, x, residual)
    assert world.calls == calls
