"""Ranks that differ, and scripts with mistakes: all ranks raise an error that names the cause."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_plain_sgd,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    shrink,
    take_own_part,
)
from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.world import World


def case_ranks_that_start_from_different_weights_are_named(world: World) -> None:
    model = build_network()
    with torch.no_grad():
        model[0].weight += topkube.rank() == topkube.size() - 1
    build_optimizer(model)  # a world with an optimizer that is gone already
    optimizer = build_optimizer(model)
    compute_loss(model, *draw_samples(4)).backward()
    with pytest.raises(TrainingError, match=rf"rank {topkube.size() - 1} differ.*0\.weight.*broadcast_parameters"):
        optimizer.step()
    optimizer.unwrap()


def case_ranks_that_drift_apart_are_named(world: World) -> None:
    for mode in ("error", "warn"):
        model = build_network()
        settings = Settings(check_weights=mode, check_weights_every=2)
        optimizer = build_optimizer(model, settings=settings)
        for step in range(3):
            compute_loss(model, *draw_samples(4, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model[3].bias[0] += 1e-6 * (topkube.rank() == 0)
        compute_loss(model, *draw_samples(4, 3)).backward()
        optimizer.step()  # the fourth: its weights are compared in the next backward
        optimizer.zero_grad()
        if mode == "error":
            with pytest.raises(TrainingError, match=r"the weights of.*rank"):
                compute_loss(model, *draw_samples(4, 4)).backward()
        else:
            compute_loss(model, *draw_samples(4, 4)).backward()
        assert optimizer.differing_ranks == 1
        optimizer.unwrap()


def case_weights_may_differ_between_a_step_and_the_next(world: World) -> None:
    """Every rank perturbs its weights on its own, as sharpness-aware steps over micro-batches do, and restores them."""
    model, reference = build_network(), build_network()
    optimizer = build_optimizer(model, build_plain_sgd, settings=Settings(check_weights_every=1))
    plain = build_plain_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        kept = copy_weights(model)
        torch.manual_seed(topkube.rank())
        moves = [0.01 * torch.randn_like(p) for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), kept)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(topkube.size()):
            torch.manual_seed(rank)
            moved = copy.deepcopy(reference)
            with torch.no_grad():
                for parameter in moved.parameters():
                    parameter += 0.01 * torch.randn_like(parameter)
            part = x[rank :: topkube.size()], y[rank :: topkube.size()]
            gradients = torch.autograd.grad(shrink(compute_loss(moved, *part)), list(moved.parameters()))
            for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                share = gradient / topkube.size()
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def case_parameters_of_the_inner_optimizer_alone_are_refused(world: World) -> None:
    model, extra = build_network(), nn.Linear(24, 4)
    optimizer = build_optimizer(model)
    optimizer.inner.add_param_group({"params": list(extra.parameters())})
    compute_loss(model, *draw_samples(4)).backward()
    with pytest.raises(TrainingError, match="add_param_group"):
        optimizer.step()


def case_a_parameter_that_one_rank_froze_is_named(world: World) -> None:
    for steps_before in (0, 2):
        model = build_network()
        optimizer = build_optimizer(model)
        for step in range(steps_before):
            compute_loss(model, *draw_samples(4, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if topkube.rank() == topkube.size() - 1:
            model[3].requires_grad_(False)
        with pytest.raises(TrainingError, match=rf"rank {topkube.size() - 1} train different parameters"):
            compute_loss(model, *draw_samples(4, 9)).backward()
        optimizer.unwrap()


def case_a_model_that_is_wrapped_twice_is_refused(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    with pytest.raises(ArgumentError, match="another distributed optimizer"):
        build_optimizer(model)
    optimizer.unwrap()
    optimizer = build_optimizer(model)
    compute_loss(model, *draw_samples(4)).backward()
    optimizer.step()


def case_a_checkpoint_inside_backward_is_refused(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    x, y = draw_samples(4)
    kept = x.requires_grad_()
    with pytest.raises(TrainingError, match="use_reentrant=False"):
        ((checkpoint(model, kept, use_reentrant=True) - y) ** 2).mean().backward()
    optimizer.zero_grad()
    model.zero_grad()
    reference = build_network()
    ((checkpoint(model, x, use_reentrant=False) - y) ** 2).mean().backward()
    compute_loss(reference, x, y).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def case_lazy_modules_are_refused_until_they_have_shapes(world: World) -> None:
    model = nn.Sequential(nn.LazyLinear(40), nn.Linear(40, 1))
    with pytest.raises(ArgumentError, match="no shape yet"):
        build_optimizer(model, lambda p: torch.optim.SGD(list(p), lr=0.1))
    with pytest.raises(ArgumentError, match="no shape yet"):
        topkube.broadcast_parameters(model)
    with torch.no_grad():
        model(draw_samples(4)[0])
    topkube.broadcast_parameters(model)
    build_optimizer(model)


def case_a_parameter_that_is_replaced_is_refused(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    model[0].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(model[0].weight.detach().clone())
    compute_loss(model, *draw_samples(4)).backward()
    with pytest.raises(TrainingError, match="replaced"):
        optimizer.step()


def case_a_step_of_the_torch_optimizer_itself_is_refused(world: World) -> None:
    model = build_network()
    inner = build_sgd(model.parameters())
    optimizer = topkube.DistributedOptimizer(inner, model.named_parameters(), "dense")
    compute_loss(model, *draw_samples(4)).backward()
    with pytest.raises(TrainingError, match="was called on the torch optimizer"):
        inner.step()
    optimizer.unwrap().step()


def case_an_interrupted_backward_is_not_a_step(world: World) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("out of memory")

    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model, bucket_bytes=1 << 20), build_sgd(reference.parameters())
    for step in range(4):
        x, y = draw_samples(4 * topkube.size(), step)
        if step == 2:
            hidden = Break.apply(model[:4](take_own_part(x)))
            with pytest.raises(RuntimeError, match="out of memory"):
                model[4:](hidden).sum().backward()
            with pytest.raises(TrainingError, match="did not finish"):
                optimizer.step()
            optimizer.zero_grad()
            continue
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)


def case_one_rank_keeps_a_copy_of_its_best_model(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    kept = None
    for step in range(4):
        compute_loss(model, *draw_samples(4, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and topkube.rank() == 0:
            kept = copy.deepcopy((model, optimizer))
    assert (kept is not None) == (topkube.rank() == 0)
    assert are_equal_on_all_ranks(copy_weights(model))


def case_ranks_that_step_differently_are_named(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, settings=Settings(check_weights="off"))
    for _ in range(2):
        compute_loss(model, *draw_samples(4)).backward()
        optimizer.step()
    if topkube.rank() == 0:
        optimizer.step()
    with pytest.raises(TrainingError, match="a different number of optimizer steps"):
        compute_loss(model, *draw_samples(4)).backward()
    optimizer.unwrap()


def case_a_state_of_another_model_that_one_rank_loads_is_refused(world: World) -> None:
    if world.nodes == 1:  # `auto` chooses nothing, and such a state has nothing to compare
        return
    model = build_network()
    named = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = topkube.DistributedOptimizer(build_plain_sgd(model.parameters()), named, aggregation="auto")
    compute_loss(model, *draw_samples(4)).backward()
    state = optimizer.state_dict()
    optimizer.unwrap()
    optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
    if world.rank == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(TrainingError, match="a rank loaded the state of another model"):
        compute_loss(model, *draw_samples(4)).backward()
    optimizer._backward.end()


def case_scalers_with_other_factors_are_named(world: World) -> None:
    """A rank without a scaler is not named, because it may send a loss of zero."""
    model = build_network()
    optimizer = build_optimizer(model)
    x, y = draw_samples(4 * topkube.size())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = compute_loss(model, take_own_part(x), take_own_part(y))
    (scaler.scale(loss) if world.rank else loss * 0).backward()
    optimizer.zero_grad()
    other = torch.amp.GradScaler("cpu", init_scale=8.0 if world.rank == world.size - 1 else 4.0)
    with pytest.raises(TrainingError, match=rf"scalers of rank {world.size - 1} have another factor .*4 to 8"):
        other.scale(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
    optimizer._backward.end()
