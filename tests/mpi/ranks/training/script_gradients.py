"""Gradients that a script takes, changes, replaces or assigns. One process does the same for comparison."""

from __future__ import annotations

import contextlib
import copy
import io
from contextlib import nullcontext

import pytest
import torch

import topkube
from ranks.training.scene import (
    SPARSE,
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_plain_sgd,
    build_sgd,
    check_conservation,
    compute_loss,
    copy_weights,
    draw_samples,
    shrink,
    take_own_part,
)
from topkube.errors import TrainingError
from topkube.world import World


def case_autograd_grad_on_one_rank_starts_nothing(world: World) -> None:
    for options in ({}, SPARSE):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, **options), build_sgd(reference.parameters())
        for step in range(4):
            x, y = draw_samples(8 * topkube.size(), step)
            if topkube.rank() == 0:
                loss = compute_loss(model, take_own_part(x), take_own_part(y))
                copied_model = copy.deepcopy(model)
                loss_of_copy = compute_loss(copied_model, take_own_part(x), take_own_part(y))
                expected = torch.autograd.grad(loss_of_copy, list(copied_model.parameters()))
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
                assert all(p.grad is None for p in model.parameters())
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
        if not options:
            assert_close(model, reference)
        assert are_equal_on_all_ranks(copy_weights(model))


def case_a_gradient_penalty_takes_gradients_inside_the_loss(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        for network, part, target in ((model, take_own_part(x), take_own_part(y)), (reference, x, y)):
            part = part.clone().requires_grad_()
            slope = torch.autograd.grad(network(part).sum(), part, create_graph=True)[0]
            (compute_loss(network, part, target) + slope.square().sum(1).mean()).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)


def case_gradients_with_a_graph_are_means_and_a_warning_names_what_is_not(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    with contextlib.redirect_stderr(io.StringIO()) as output:
        for step in range(3):
            x, y = draw_samples(4 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward(create_graph=step > 0)
            compute_loss(reference, x, y).backward()
            assert step > 0 or "create_graph" not in output.getvalue()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
    assert_close(model, reference)
    warned = output.getvalue().count("topkube: warning: after backward(create_graph=True)")
    assert warned == (topkube.rank() == 0), output.getvalue()


def case_gradients_by_hand_are_noticed_and_exchanged_on_demand(world: World) -> None:
    for options in ({}, {"aggregation": "hitopk", "density": 1.0}):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, **options), build_sgd(reference.parameters())
        for step in range(3):
            x, y = draw_samples(4 * topkube.size(), step)
            for network, part, target in ((model, take_own_part(x), take_own_part(y)), (reference, x, y)):
                gradients = torch.autograd.grad(compute_loss(network, part, target), list(network.parameters()))
                for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
            with pytest.raises(TrainingError, match=r"not exchanged.*synchronize"):
                optimizer.step()
            optimizer.synchronize()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad(set_to_none=False)
        assert_close(model, reference)
        assert are_equal_on_all_ranks(copy_weights(model))


def case_gradients_that_a_script_changes_after_the_exchange_are_its_own(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        for network, each_optimizer in ((model, optimizer), (reference, plain)):
            for parameter in network.parameters():
                parameter.grad = parameter.grad / 2
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)


def case_gradients_that_a_script_replaces_add_up_with_those_of_some_ranks(world: World) -> None:
    """Between two exchanges, the script replaces the means; only one rank uses all parameters after that."""
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        for network in (model, reference):
            for parameter in network.parameters():
                parameter.grad = parameter.grad * 0.5
        own, first = take_own_part(x), x[:: topkube.size()]
        (model(own).mean() if topkube.rank() == 0 else model[0](own).mean()).backward()
        others = [reference[0](x[rank :: topkube.size()]).mean() for rank in range(1, topkube.size())]
        (sum(others, reference(first).mean()) / topkube.size()).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)
    assert are_equal_on_all_ranks(copy_weights(model))


def case_a_rank_with_gradients_of_zero_keeps_the_means_of_an_earlier_exchange(world: World) -> None:
    """Between two exchanges of a step, a backward under no_sync() leaves zeros on rank 0, and on no other rank."""
    for options in ({}, {"aggregation": "hitopk", "density": 1.0}, SPARSE):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, build_plain_sgd, **options), build_plain_sgd(reference.parameters())
        with check_conservation(model, optimizer) as count:
            for step in range(3):
                batches = [draw_samples(4 * topkube.size(), 10 * step + n) for n in range(3)]
                losses = []
                for number, (x, y) in enumerate(batches):
                    weight = float(number != 1 or topkube.rank() > 0)
                    with optimizer.no_sync() if number == 1 else nullcontext():
                        shrink(compute_loss(model, take_own_part(x), take_own_part(y)) * weight).backward()
                    parts = range(number == 1, topkube.size())
                    own = [(x[rank :: topkube.size()], y[rank :: topkube.size()]) for rank in parts]
                    losses.append(own)
                for network in (model, reference):
                    pairs = [pair for own in losses for pair in own]
                    total = sum((compute_loss(network, *pair) for pair in pairs), torch.zeros(())) / topkube.size()
                    count(shrink(total)) if network is model else shrink(total).backward()
                for each_optimizer in (optimizer, plain):
                    each_optimizer.step()
                    each_optimizer.zero_grad()
        if options is not SPARSE:
            assert_close(model, reference)
        optimizer.unwrap()


def case_gradients_that_a_script_assigns_before_backward_are_its_own(world: World) -> None:
    model = build_network()
    reference = build_network()
    optimizer, plain = build_optimizer(model, build_plain_sgd), build_plain_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.001 * topkube.rank())
        for parameter in reference.parameters():
            parameter.grad = torch.full_like(parameter, 0.001 * (topkube.size() - 1) / 2)
        shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
        shrink(compute_loss(reference, x, y)).backward()
        optimizer.step()
        plain.step()
    assert_close(model, reference)
