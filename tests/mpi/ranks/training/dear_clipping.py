"""DeAR with gradients that are clipped before they are gathered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import topkube
from ranks.training.dear_scene import STEPS, check_equal, is_late, run_backward, train
from ranks.training.scene import are_equal_on_all_ranks, copy_weights
from topkube.algorithms import cost
from topkube.world import World


def check_clipped(world: World, calls: int = 1) -> list[float]:
    """Train with DeAR and without; clip `calls` times before each step, and once after it, which changes nothing any
    more. Compare norms and weights. Return the norms with DeAR: those before a step, one step after another."""
    results = []
    for overlap in ("dear", "backward"):
        norms: list[float] = []

        def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int, norms=norms) -> None:
            run_backward(model, step)
            norms.extend(optimizer.clip_grad_norm_(0.1) for _ in range(calls))
            assert is_late(optimizer) is (step > 0 and optimizer.aggregation.overlap == "dear" and world.nodes > 1)
            optimizer.step()
            if step % 2:
                assert type(optimizer.clip_grad_norm_(0.01)) is float
            optimizer.zero_grad()

        results.append((copy_weights(train(overlap, script)[0]), norms))
    (late, late_norms), (reference, expected_norms) = results
    assert late_norms == pytest.approx(expected_norms, rel=1e-5)
    for weights, expected in zip(late, reference, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert are_equal_on_all_ranks(late)
    return late_norms


def case_clipping_by_the_optimizer_needs_no_gather(world: World) -> None:
    check_clipped(world)


def case_clipping_works_in_rounds(world: World) -> None:
    """As with many nodes."""
    limit = cost.PAIRWISE_LIMIT
    try:
        cost.PAIRWISE_LIMIT = 1
        check_clipped(world)
    finally:
        cost.PAIRWISE_LIMIT = limit


def case_clipping_again_scales_no_more(world: World) -> None:
    """As a script and a callback do, or a script that logs the norm."""
    norms = check_clipped(world, calls=2)
    assert norms[1::2] == pytest.approx([0.1] * STEPS, rel=1e-3)


def case_clipping_by_torch_gathers_the_gradients(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        run_backward(model, step)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        model.zero_grad()

    check_equal(script)
