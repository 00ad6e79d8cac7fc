"""Unused parameters, frozen parameters, parameters that differ between ranks, and the state from which all ranks
start."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    sum_residuals,
    take_own_part,
)
from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.training import optimizer_step
from topkube.world import World


class Forked(nn.Module):
    """Three large layers. A forward uses the layers that are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(24, 48) for _ in range(3))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).sum(1) for name in used.split())  # type: ignore[return-value]


def case_unused_parameters_are_as_with_one_process(world: World) -> None:
    model, reference = Forked(), Forked()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        x, _ = draw_samples(4 * topkube.size(), step)
        used = "first second" if topkube.rank() == 0 else "first"
        model(take_own_part(x), used).mean().backward()
        share = len(take_own_part(x)) / len(x)
        (reference(x, "first").mean()).backward()
        if topkube.rank() == 0:
            second = reference(take_own_part(x), "second").mean() * share
        else:
            second = reference(x[0 :: topkube.size()], "second").mean() * share
        second.backward()
        assert model.third.weight.grad is None
        torch.testing.assert_close(model.second.weight.grad, reference.second.weight.grad, rtol=1e-5, atol=1e-6)
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)
    assert are_equal_on_all_ranks(copy_weights(model))


def case_the_residual_of_an_unused_parameter_is_sent(world: World) -> None:
    model = Forked()
    optimizer = build_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1), aggregation="hitopk", density=0.05)
    x, _ = draw_samples(4 * topkube.size())
    model(take_own_part(x), "first second").mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = sum_residuals(optimizer, model)["second.weight"].abs().sum()
    assert before > 0
    for _ in range(30):
        model(take_own_part(x), "first").mean().mul(1e-6).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum_residuals(optimizer, model)["second.weight"].abs().sum() < before / 2


def case_frozen_parameters_stay_and_thaw(world: World) -> None:
    model, reference = build_network(), build_network()
    for network in (model, reference):
        network[0].requires_grad_(False)
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(6):
        if step == 2:  # thaw a layer that has never been exchanged, freeze one that has
            for network in (model, reference):
                network[0].requires_grad_(True)
                network[3].requires_grad_(False)
        x, y = draw_samples(4 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        if step == 2:
            assert model[3].weight.grad is None
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)


def case_a_layer_may_be_frozen_between_forward_and_backward(world: World) -> None:
    """Its bucket then waits for one gradient less, although autograd still calls the layer's hooks."""
    for options in (
        {},
        {"aggregation": "dense"},
        {"aggregation": "dense", "overlap": "dear"},
        {"aggregation": "hitopk"},
    ):
        more: dict[str, object] = options | ({"density": 1.0, "wire": "fp32"} if "hitopk" in options.values() else {})
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, **more), build_sgd(reference.parameters())
        for step in range(5):
            x, y = draw_samples(4 * topkube.size(), step)
            loss = compute_loss(model, take_own_part(x), take_own_part(y))
            whole = compute_loss(reference, x, y)
            for network in (model, reference):
                network[3].requires_grad_(step < 2)
            loss.backward()
            whole.backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
            for network in (model, reference):
                network[3].requires_grad_(True)
        assert_close(model, reference)
        optimizer.unwrap()


def case_a_run_from_a_saved_state_has_the_same_bits(world: World) -> None:
    for correction in (False, True):
        resume_in_the_middle({"momentum_correction": correction})


def resume_in_the_middle(changed_options: dict[str, object]) -> None:
    """Compare a run of twelve steps with a run that continues from the state after seven steps, bit for bit."""

    def train(model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: Iterable[int]) -> None:
        for step in steps:
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {"aggregation": "hitopk", "density": 0.03, "warmup_steps": 4, "wire": "bf16", **changed_options}
    model = build_network()
    optimizer = build_optimizer(model, **options)
    train(model, optimizer, range(7))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(7, 12))
    again = build_network()
    optimizer_again = build_optimizer(again, **options)
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    assert optimizer_again.steps == 7
    train(again, optimizer_again, range(7, 12))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def case_broadcast_copies_weights_buffers_and_optimizer_state(world: World) -> None:
    torch.manual_seed(topkube.rank())
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model(torch.randn(4, 1, 5, 5) + topkube.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (topkube.rank() + 1))
    if topkube.rank() == 0:  # the others have no state yet
        model(torch.randn(4, 1, 5, 5)).sum().backward()
        optimizer.step()
    topkube.broadcast_parameters(model)
    topkube.broadcast_optimizer_state(optimizer)
    assert are_equal_on_all_ranks(list(model.state_dict().values()))
    assert model[1].num_batches_tracked == 2
    state = optimizer.state_dict()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(state["state"]) == 4
    keys = ("exp_avg", "exp_avg_sq", "step")
    assert are_equal_on_all_ranks([state["state"][i][key] for i in range(4) for key in keys])


def case_ranks_with_different_models_raise_an_error(world: World) -> None:
    model = nn.Linear(24, 64 if topkube.rank() else 32)
    optimizer = build_optimizer(model)
    with pytest.raises(TrainingError, match="different parameters"):
        model(draw_samples(4)[0]).sum().backward()
    assert optimizer.steps == 0


def case_gradients_that_no_optimizer_exchanges_are_named(world: World) -> None:
    """Clipping with them makes ranks diverge; clipping with the optimizer does not. Parameters of another distributed
    optimizer, and frozen parameters, need no warning."""
    warnings: list[str] = []
    original, optimizer_step.warn = optimizer_step.warn, warnings.append
    try:
        for way in ("clip all", "clip with the optimizer", "frozen", "two optimizers"):
            model = Forked()
            model.second.requires_grad_(way != "frozen")
            names = list(model.named_parameters())
            used = [*model.first.parameters(), *model.third.parameters()]
            settings = Settings(check_weights_every=2)
            optimizer = topkube.DistributedOptimizer(build_sgd(used), names, aggregation="dense", settings=settings)
            rest = build_sgd(model.second.parameters())
            if way == "two optimizers":
                rest = topkube.DistributedOptimizer(rest, names, aggregation="dense")
            for step in range(3):
                loss = model(draw_samples(4, 10 * step + topkube.rank())[0], "first second third").square().mean()
                if way == "clip all" and step == 2:
                    with pytest.raises(TrainingError, match=r"clip with optimizer\.clip_grad_norm_"):
                        loss.backward()
                    break
                loss.backward()
                if way == "clip with the optimizer":
                    optimizer.clip_grad_norm_(0.1)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                model.zero_grad()
            assert len(warnings) == (way.startswith("clip") and topkube.rank() == 0), (way, warnings)
            assert all("second.weight and 1 more" in warning for warning in warnings), warnings
            warnings.clear()
            assert way == "clip all" or are_equal_on_all_ranks(copy_weights(model)), way
            optimizer.unwrap()
            if way == "two optimizers":
                rest.unwrap()
    finally:
        optimizer_step.warn = original
