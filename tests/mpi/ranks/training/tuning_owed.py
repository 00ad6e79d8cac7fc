"""Buckets and residuals when `auto` takes an algorithm that compresses, and returns to one that does not."""

from __future__ import annotations

import copy

import torch

import topkube
from ranks.training.scene import (
    DeliveredGradients,
    are_equal_on_all_ranks,
    build_network,
    build_optimizer,
    build_plain_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
    write_weights,
)
from ranks.training.tuning_scene import (
    STEPS,
    have_same_choice,
    mixes_small_tensors,
    read_algorithm,
    simulate_slow_links,
    train,
)
from topkube.algorithms import Stage
from topkube.world import World


def case_small_tensors_share_buckets_only_if_values_are_sent_as_they_are(world: World) -> None:
    """Also after a resume from the state of another algorithm, and in a stage of a schedule."""
    states = []
    for name, options, mixes in (
        ("dense", {}, True),
        ("dense", {"dense_wire": "bf16"}, False),
        ("dense", {"schedule": (Stage(3, algorithm="int8"),)}, False),
        ("int8", {}, False),
        ("hitopk", {}, False),
    ):
        model = build_network()
        optimizer = build_optimizer(model, aggregation=name, bucket_bytes=None, **options)
        if states and not options:
            optimizer.load_state_dict(states[0])
        train(model, optimizer, 0, 4)
        assert mixes_small_tensors(optimizer) == mixes, (name, options)
        states.append(copy.deepcopy(optimizer.state_dict()))
        optimizer.unwrap()


def accumulate(model: torch.nn.Module, world: World, steps: range) -> None:
    """Add up gradients without a step: each backward is an exchange."""
    for step in steps:
        compute_loss(model, *(take_own_part(part) for part in draw_samples(8 * world.size, step))).backward()


def case_auto_changes_buckets_with_the_algorithm_before_the_first_step(world: World) -> None:
    """A script adds up many backwards before its first step. Small tensors are sent as they are, alone."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.5, 0.6, 0.5):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
        accumulate(model, world, range(STEPS + 1))
        assert read_algorithm(optimizer) == "int4"
        assert not mixes_small_tensors(optimizer)
        algorithms = optimizer._backward.exchange.algorithms
        for bucket in optimizer._backward.plan.buckets:
            is_compressed = algorithms.choose(bucket, 1.0, False).algorithm.compresses
            assert is_compressed is not any(parameter.is_always_dense for parameter in bucket.parameters)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, STEPS + 1, 3 * STEPS)
        assert read_algorithm(optimizer) == "hierarchical"  # steps were not faster
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_auto_does_not_measure_backwards_that_send_loaded_residuals(world: World) -> None:
    """They are slower than dense, and small tensors share their buckets. Each backward before the step sends the
    residuals that int8 has left, so `auto` compares its choice only after the step."""
    if world.nodes == 1:
        return
    model = build_network()
    optimizer = build_optimizer(model, aggregation="int8")
    train(model, optimizer, 0, 3)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.unwrap()
    with simulate_slow_links(world, 0.5, 0.4):
        optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
        optimizer.load_state_dict(state)
        accumulate(model, world, range(2 * STEPS))
        assert read_algorithm(optimizer) == "hierarchical"
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 0, STEPS + 1)
        assert read_algorithm(optimizer) == "int4"
        assert not mixes_small_tensors(optimizer)
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_a_run_that_resumes_sends_what_int4_owes_in_the_same_steps(world: World) -> None:
    """A state is saved when `auto` has returned to dense, before and after each of the next steps. The run that resumes
    from it exchanges residuals, and plans its buckets again, when the run that goes on does."""
    if world.nodes == 1:
        return

    def describe(optimizer: topkube.DistributedOptimizer) -> tuple[object, ...]:
        backward = optimizer._backward
        buckets = [[parameter.name for parameter in bucket.parameters] for bucket in backward.plan.buckets]
        return backward.exchange.algorithms.drained_steps, backward.plan.is_outdated, buckets

    for steps in range(2 * STEPS - 1, 2 * STEPS + 3):
        with simulate_slow_links(world, 0.5, 0.49):
            model = build_network()
            optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
            train(model, optimizer, 0, steps)
            resumed = build_network()
            write_weights(resumed, copy_weights(model))
            again = build_optimizer(resumed, aggregation="auto", bucket_bytes=None)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for step in range(steps, steps + 4):
                train(model, optimizer, step, step + 1)
                train(resumed, again, step, step + 1)
                assert describe(again) == describe(optimizer), (steps, step, describe(again), describe(optimizer))
            assert all(torch.equal(a, b) for a, b in zip(copy_weights(model), copy_weights(resumed), strict=True))
            optimizer.unwrap()
            again.unwrap()


def case_what_int4_owes_is_sent_when_auto_returns_to_dense(world: World) -> None:
    """The steps with int4 are not faster. The first dense step after them has a NaN: it is skipped, and the next step
    sends what was owed."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.5, 0.49):
        model = build_network()
        optimizer = topkube.DistributedOptimizer(
            build_plain_sgd(model.parameters()), model.named_parameters(), aggregation="auto"
        )
        delivered, names, largest_owed = DeliveredGradients(world, model), [], 0.0
        for step in range(2 * STEPS + 4):
            is_skipped = step == 2 * STEPS
            loss = 0.01 * compute_loss(model, *(take_own_part(part) for part in draw_samples(8 * world.size, step)))
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if not is_skipped:
                delivered.count(own)
            (loss * torch.nan if is_skipped and world.rank == world.size - 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert have_same_choice(world, optimizer)
            names.append(read_algorithm(optimizer))
            missing = delivered.measure_missing()
            if step == 2 * STEPS - 1:
                largest_owed = missing
            elif step > 2 * STEPS:
                assert missing < largest_owed / 10, (step, missing, largest_owed)
        assert names == ["hierarchical"] * (STEPS - 1) + ["int4"] * STEPS + ["hierarchical"] * 5, names
        assert mixes_small_tensors(optimizer)  # buckets were planned again when nothing was owed any more
        assert (optimizer.steps, optimizer.skipped_steps) == (2 * STEPS + 3, 1)
        owed = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
        assert not any(values.any() for entries in owed.values() for _, values in entries)
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_int4_returns_after_a_second_measurement_without_it(world: World) -> None:
    """A gain below 10% is measured against dense steps once more."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.5, 0.46, 0.5):
        model = build_network()
        optimizer = topkube.DistributedOptimizer(
            build_plain_sgd(model.parameters()), model.named_parameters(), aggregation="auto"
        )
        delivered, names, missing = DeliveredGradients(world, model), [], []
        for step in range(3 * STEPS + 2):
            loss = 0.01 * compute_loss(model, *(take_own_part(part) for part in draw_samples(8 * world.size, step)))
            delivered.count(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert have_same_choice(world, optimizer)
            names.append(read_algorithm(optimizer))
            missing.append(delivered.measure_missing())
        dense, int4 = ["hierarchical"], ["int4"]
        assert names == dense * (STEPS - 1) + int4 * STEPS + dense * STEPS + int4 * 3, names
        assert optimizer.tuning.is_settled
        assert "kept: 460 ms per step, 500 ms before" in optimizer.tuning.summary
        assert max(missing[2 * STEPS + 1 : 3 * STEPS]) < max(missing[STEPS : 2 * STEPS]) / 10, missing
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()
