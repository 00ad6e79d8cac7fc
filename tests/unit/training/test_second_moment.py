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


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_the_state_before_the_first_step_is_that_of_torch(options: dict[str, bool]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        states = []
        for is_corrected in (True, False):
            tensor = torch.nn.Parameter(torch.ones(4, dtype=torch.float32))
            tensor.grad = torch.zeros(4, dtype=torch.float32)
            optimizer = torch.optim.AdamW([tensor], **options)
            with SecondMoment(optimizer).corrected({tensor: 2.0} if is_corrected else {}):
                optimizer.step()
            states.append({name: (value.dtype, value.device) for name, value in optimizer.state[tensor].items()})
    finally:
        torch.set_default_dtype(torch.float32)
    assert states[0] == states[1]


@pytest.mark.parametrize(("options", "device"), [({}, "cpu"), ({"capturable": True}, "meta")], ids=str)
def test_the_number_of_steps_is_on_the_device_that_reads_it(options: dict[str, bool], device: str) -> None:
    tensor = torch.nn.Parameter(torch.ones(4, device="meta"))
    tensor.grad = torch.zeros(4, device="meta")
    optimizer = torch.optim.AdamW([tensor], **options)
    with SecondMoment(optimizer).corrected({tensor: 2.0}):
        assert optimizer.state[tensor]["step"].device.type == device
