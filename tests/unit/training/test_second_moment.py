"""The correction of Adam's second moment on a node, without an exchange."""

from __future__ import annotations

import pytest
import torch

from topkube.training.node_weights.second_moment import SecondMoment


def test_an_error_in_the_step_leaves_the_second_moment_as_it_was() -> None:
    tensor = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([tensor])
    tensor.grad = torch.full((4,), 2.0)
    optimizer.step()
    before = optimizer.state[tensor]["exp_avg_sq"].clone()
    correction = SecondMoment(optimizer)
    tensor.grad = torch.zeros(4)

    def fail() -> None:
        with correction.corrected({tensor: 2.0}):
            assert torch.equal(optimizer.state[tensor]["exp_avg_sq"], before / 2)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert torch.equal(optimizer.state[tensor]["exp_avg_sq"], before)
