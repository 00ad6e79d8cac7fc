"""Uses of a tensor that is not complete yet are noticed, however a script reads it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from topkube.training.exchange.late.watched_tensors import (
    Use,
    forget_tensors,
    is_watching,
    register_tensors,
    unwatch,
    watch,
)


@pytest.fixture(autouse=True)
def active_watch() -> Iterator[None]:
    watch()
    yield
    unwatch()


def list_uses(read: Callable[[nn.Parameter], object]) -> set[Use]:
    layer, uses = nn.Linear(4, 4), set()
    tensor = layer.weight
    tensor.layer = layer
    register_tensors([tensor], lambda _, use: uses.add(use))
    try:
        read(tensor)
    finally:
        forget_tensors([tensor])
    return uses


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.layer(torch.ones(2, 4)),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p[0, 0],
        lambda p: p.data_ptr(),
        lambda p: p.untyped_storage(),
        lambda p: p.tolist(),
        lambda p: torch.stack([p, p]),
        lambda p: torch._foreach_norm([p]),
        lambda p: torch.where(condition=p > 0, input=p, other=p),
        lambda p: nn.functional.linear(torch.ones(2, 4), weight=p),
        lambda p: p.layer.state_dict(),
        lambda p: p.layer.load_state_dict(nn.Linear(4, 4).state_dict()),
        lambda p: nn.init.zeros_(p),
        lambda p: torch.save(p.layer, io.BytesIO()),
        lambda p: pickle.dumps(p.detach()),
        lambda p: copy.deepcopy(p),
        lambda p: torch.func.functional_call(p.layer, {"bias": torch.ones(4)}, torch.ones(2, 4)),
    ],
)
def test_a_use_of_the_values_is_noticed(read: Callable[[nn.Parameter], object]) -> None:
    assert Use.VALUES in list_uses(read)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: (p.shape, p.size(), p.dtype, p.device, p.numel(), p.dim(), len(p), p.requires_grad, p.is_leaf),
        lambda p: p.grad is None,
        lambda p: {p: 1},
        lambda p: isinstance(p, nn.Parameter),
        lambda p: torch.optim.SGD([p]),
        lambda p: p.layer.bias.sum(),
    ],
)
def test_a_call_that_needs_no_values_passes(read: Callable[[nn.Parameter], object]) -> None:
    assert not list_uses(read)


def test_a_replaced_gradient_is_noticed_as_such() -> None:
    def replace(parameter: nn.Parameter) -> None:
        parameter.grad = None

    assert list_uses(replace) == {Use.GRADIENT}


def test_modes_of_the_script_leave_the_watch_in_place() -> None:
    unwatch()
    with torch.device("cpu"):
        watch()
        assert is_watching()
    assert is_watching()
    torch.set_default_device("cpu")
    assert is_watching()
    unwatch()
    watch()
    torch.set_default_device(None)
    assert is_watching()
    unwatch()
    assert not is_watching()
