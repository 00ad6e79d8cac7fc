"""Running statistics stay as they are while a rank replays a batch; a loop over `join()` that ends early."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import topkube
from topkube.training.batches.replays import KeptStatistics
from topkube.training.batches.uneven_batches import find_batch_scale, is_replay_batch


class ModelWithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True))
        self.frozen = nn.BatchNorm1d(4).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.block[1](self.block[0](x))
        if self.fails:
            raise RuntimeError("on purpose")
        return self.frozen(self.block[2](y[:, :, None].expand(-1, -1, 2))[:, :, 0])


def read_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name != "calls"}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


KINDS: dict[str, Callable[[ModelWithStatistics], Any]] = {
    "plain": lambda model: model,
    "traced": lambda model: torch.jit.trace(model, torch.randn(5, 3), check_trace=False),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": lambda model: (model.compile(backend="eager"), model)[1],
}


@pytest.mark.filterwarnings("ignore:.*(torch.jit.trace|Python boolean)")
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_leaves_statistics_and_a_real_batch_moves_them(kind: str) -> None:
    model = ModelWithStatistics()
    called = KINDS[kind](model)
    kept = KeptStatistics()
    before = read_statistics(model)
    called(torch.randn(5, 3))
    assert not are_equal(before, read_statistics(model))
    before, calls = read_statistics(model), model.calls.item()
    for _ in range(2):
        kept.keep()
        loss = called(torch.randn(5, 3)).sum()
        assert not are_equal(before, read_statistics(model))
        kept.restore()
        loss.backward()  # autograd saved the buffers: they are still valid
        kept.release()
        assert are_equal(before, read_statistics(model))
    assert model.calls.item() > calls  # other buffers are not restored
    called(torch.randn(5, 3))
    kept.release()
    assert not are_equal(before, read_statistics(model))


def test_statistics_of_every_model_are_kept() -> None:
    """The model is in evaluation mode when `keep()` is called, and frozen by gc.freeze(). A lazy module without weights
    and a module whose constructor did not run raise no error."""
    unfinished = ModelWithStatistics.__new__(ModelWithStatistics)
    model = ModelWithStatistics().eval()
    lazy = nn.LazyBatchNorm1d()
    gc.freeze()
    try:
        kept = KeptStatistics()
        kept.keep()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    before = read_statistics(model)
    model.train()(torch.randn(5, 3))
    lazy(torch.randn(5, 3))
    kept.restore()
    assert are_equal(before, read_statistics(model))
    assert not vars(unfinished)


def test_a_model_in_evaluation_is_left_to_the_script() -> None:
    """The averaged model is in evaluation mode and updates no statistics; only the script changes its buffers."""
    average = ModelWithStatistics().eval()
    kept = KeptStatistics()
    kept.keep()
    with torch.no_grad():
        average.block[1].running_mean.fill_(3)
    kept.release()
    assert (average.block[1].running_mean == 3).all()


def test_leaving_a_loop_over_join_resets_the_weight_of_batches() -> None:
    topkube.init()
    model = nn.Linear(3, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert list(optimizer.join([torch.zeros(2, 3)] * 3))
    batches = optimizer.join([torch.zeros(2, 3)] * 3)
    next(batches)
    del batches
    assert find_batch_scale() == 1.0
    assert optimizer.batch(4) == 4
    assert optimizer.batch(0) == 0
    assert not is_replay_batch()
    assert find_batch_scale() == 1.0
