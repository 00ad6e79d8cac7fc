"""The correction of Adam's second moment on a node, without an exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.second_moment import SecondMoment


def test_an_error_in_the_step_leaves_the_second_moment_as_it_was() -> None:
    tensor = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([tensor])
    tensor.grad = torch.full((4,), 2.0)
    optimizer.step()
    before = optimizer.state[tensor]["exp_avg_sq"].clone()
    world: Any = SimpleNamespace(nodes=2, node=0, shards=1)
    correction = SecondMoment(world, [Parameter(0, "weight", tensor)], [0.5, 0.5], optimizer)
    correction.ratios[:] = 2.0
    tensor.grad = torch.zeros(4)

    def fail() -> None:
        with correction.corrected():
            assert torch.equal(optimizer.state[tensor]["exp_avg_sq"], before / 2)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert torch.equal(optimizer.state[tensor]["exp_avg_sq"], before)
