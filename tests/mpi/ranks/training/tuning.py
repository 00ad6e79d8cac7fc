"""The choices of `auto` and `dense` on real ranks: the same on all ranks, switched together, kept in the state."""

from __future__ import annotations

import copy

import torch

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
    write_weights,
)
from ranks.training.tuning_scene import (
    STEPS,
    distort_measured_links,
    have_same_choice,
    mixes_small_tensors,
    read_algorithm,
    simulate_slow_links,
    simulate_step_times,
    train,
)
from topkube.algorithms import Stage
from topkube.training.exchange.bucket_queue import read_exchange_seconds
from topkube.training.exchange.tuning.trial import MOST_MEASUREMENTS
from topkube.world import World


def case_auto_measures_and_all_ranks_choose_alike(world: World) -> None:
    for name in ("auto", "dense"):
        model, reference = build_network(), build_network()
        optimizer = build_optimizer(model, aggregation=name, bucket_bytes=None)
        plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        tried_integers = False  # on a busy machine, the link may seem slow for some steps
        for step in range(2 * STEPS):
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
            assert have_same_choice(world, optimizer)
            tried_integers = tried_integers or read_algorithm(optimizer).startswith("int")
        assert_close(model, reference, tolerance=0.06 if tried_integers else 2e-5)
        last = MOST_MEASUREMENTS * STEPS + 2
        for step in range(2 * STEPS, last):
            if not optimizer.tuning.is_settled:  # the same on all ranks
                train(model, optimizer, step, step + 1)
                assert have_same_choice(world, optimizer)
        assert are_equal_on_all_ranks(copy_weights(model))
        if world.nodes == 1:
            assert (optimizer.tuning.choice, optimizer.tuning.summary) == (None, "")
        else:
            assert optimizer.tuning.choice is not None
            assert optimizer.tuning.is_settled
            assert not optimizer.tuning.choice.algorithm.compresses or "kept" in optimizer.tuning.summary
            assert f"{name} is " in optimizer.tuning.summary
        optimizer.unwrap()


def case_a_wrong_measurement_is_corrected_by_all_ranks_together(world: World) -> None:
    """A link that seems a million times faster. Ranks then measure different times of their steps: all of them choose
    16 bits after the same step, and keep them, because steps become faster. With a schedule, `auto` does not
    compress."""
    if world.nodes == 1:
        return
    with distort_measured_links(world, 1e6), simulate_step_times(world, 1.0, 0.5):
        model = build_network()
        optimizer = build_optimizer(
            model, aggregation="auto", dense_wire="bf16", bucket_bytes=None, schedule=(Stage(1000, "hierarchical"),)
        )
        train(model, optimizer, 0, 1)
        believed = optimizer.tuning.rate
        wires = []
        for step in range(1, 2 * STEPS + 2):
            wires.append(optimizer.tuning.choice.dense_wire if optimizer.tuning.choice else "")
            train(model, optimizer, step, step + 1)
            assert have_same_choice(world, optimizer)
        assert wires == ["fp32"] * (STEPS - 1) + ["bf16"] * (STEPS + 2), wires
        assert optimizer.tuning.rate < believed / 10
        assert optimizer.tuning.is_settled
        assert "kept: 500 ms per step, 1e+03 ms before" in optimizer.tuning.summary
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_auto_tries_int4_and_all_ranks_keep_it_if_steps_become_faster(world: World) -> None:
    """A run that resumes from the state of int4 makes the same steps."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.5, 0.4):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
        names, mixed = [], []
        for step in range(2 * STEPS + 2):
            train(model, optimizer, step, step + 1)
            assert have_same_choice(world, optimizer)
            names.append(read_algorithm(optimizer))
            mixed.append(mixes_small_tensors(optimizer))
        assert names == ["hierarchical"] * (STEPS - 1) + ["int4"] * (STEPS + 3), names
        assert mixed == [name != "int4" for name in names], mixed
        assert optimizer.tuning.is_settled
        assert "kept: 400 ms per step, 500 ms before" in optimizer.tuning.summary
        assert (optimizer.density, optimizer.density_used) == (1.0, 1.0)
        assert are_equal_on_all_ranks(copy_weights(model))
        owes = any(values.any() for values in optimizer._backward.exchange.residuals.list_arrays())
        assert any(world.comm.allgather(owes))
        state, start = copy.deepcopy(optimizer.state_dict()), copy_weights(model)
        train(model, optimizer, len(names), 3 * STEPS)
        optimizer.unwrap()
    resumed = build_network()
    write_weights(resumed, start)
    again = build_optimizer(resumed, aggregation="auto", bucket_bytes=None)
    again.load_state_dict(state)
    train(resumed, again, 2 * STEPS + 2, 3 * STEPS)
    assert read_algorithm(again) == "int4"
    assert all(torch.equal(a, b) for a, b in zip(copy_weights(model), copy_weights(resumed), strict=True))
    again.unwrap()


def case_a_schedule_keeps_auto_dense(world: World) -> None:
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.5, 0.4):
        model, schedule = build_network(), (Stage(1000, "hierarchical"),)
        optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None, schedule=schedule)
        train(model, optimizer, 0, STEPS + 2)
        assert read_algorithm(optimizer) == "hierarchical"
        optimizer.unwrap()


def case_a_saved_state_ends_the_tuning_and_a_resumed_run_makes_the_same_steps(world: World) -> None:
    """Only one rank saves before the comparison is due: no rank changes the choice after it."""
    with distort_measured_links(world, 1e6):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="auto", dense_wire="bf16", bucket_bytes=None)
        train(model, optimizer, 0, 4)
        state, start = (
            copy.deepcopy(optimizer.state_dict()) if world.rank == world.size - 1 else None,
            copy_weights(model),
        )
        train(model, optimizer, 4, 3 * STEPS)
        chosen = optimizer.tuning.save()
        assert optimizer.tuning.is_settled
        assert optimizer.tuning.measured is None
        optimizer.unwrap()
    state = world.comm.bcast(state, root=world.size - 1)
    resumed = build_network()
    write_weights(resumed, start)
    again = build_optimizer(resumed, aggregation="auto", dense_wire="bf16", bucket_bytes=None)
    again.load_state_dict(state)
    train(resumed, again, 4, 3 * STEPS)
    saved = again.tuning.save()
    assert {**(saved or {}), "summary": ""} == {**(chosen or {}), "summary": ""}
    assert all(torch.equal(a, b) for a, b in zip(copy_weights(model), copy_weights(resumed), strict=True))
    again.unwrap()


def case_a_stage_of_auto_is_chosen_by_all_ranks_together(world: World) -> None:
    """The machines are measured at the start, the choice is made when the stage begins, and its first steps correct it.
    The next stage has an algorithm of its own again."""
    if world.nodes == 1:
        return
    stages = (Stage(3, "auto"), Stage(3 + 2 * STEPS + 2, "hitopk"))
    with distort_measured_links(world, 1e6), simulate_step_times(world, 1.0, 0.5):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="hitopk", density=0.05, schedule=stages, dense_wire="bf16")
        wires = []
        for step in range(stages[1].from_step + 1):
            train(model, optimizer, step, step + 1)
            assert have_same_choice(world, optimizer)
            assert optimizer.tuning.machines is not None
            choice = optimizer.tuning.choice
            assert optimizer._backward.exchange.algorithms.choice is choice
            assert optimizer._backward.exchange.algorithms.large.compresses is (choice is None)
            wires.append("" if choice is None else choice.dense_wire)
        assert wires == [""] * 2 + ["fp32"] * STEPS + ["bf16"] * (STEPS + 2) + [""] * 2, wires
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_a_stage_after_a_saved_state_is_chosen_alike_in_a_resumed_run(world: World) -> None:
    """The state is saved before the stage begins, on one rank only. The resumed run measures other machines."""
    stage, last = Stage(4, "auto"), 4 + 2 * STEPS
    ends, state, start = [], None, list[torch.Tensor]()
    for factor in (1e6, 1e-6):
        with distort_measured_links(world, factor):
            model = build_network()
            optimizer = build_optimizer(
                model, aggregation="dense", schedule=(stage,), dense_wire="bf16", bucket_bytes=None
            )
            if state is None:
                train(model, optimizer, 0, 2)
                own = copy.deepcopy(optimizer.state_dict()) if world.rank == world.size - 1 else None
                state, start = world.comm.bcast(own, root=world.size - 1), copy_weights(model)
            else:
                write_weights(model, start)
                optimizer.load_state_dict(state)
            train(model, optimizer, 2, last)
            assert optimizer.tuning.is_settled
            assert optimizer.tuning.measured is None
            ends.append((optimizer.tuning.save(), copy_weights(model)))
            optimizer.unwrap()
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def case_a_rank_that_loads_a_state_alone_brings_all_ranks_into_its_stage(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, aggregation="dense", schedule=(Stage(3, "auto"),), bucket_bytes=None)
    train(model, optimizer, 0, 5)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.unwrap()
    resumed = build_network()
    again = build_optimizer(resumed, aggregation="dense", schedule=(Stage(3, "auto"),), bucket_bytes=None)
    if world.rank == world.size - 1:
        again.load_state_dict(state)
    topkube.broadcast_parameters(resumed)
    try:
        train(resumed, again, 5, 6)
        assert again.steps == 6
        assert have_same_choice(world, again)
        assert (again.tuning.choice is not None) is (world.nodes > 1)
    finally:
        again.unwrap()


def case_a_link_is_measured_once_for_all_optimizers(world: World) -> None:
    world.cache.pop("measured machines", None)
    before = world.calls
    counts = []
    for _ in range(2):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="auto")
        train(model, optimizer, 0, 2)
        counts.append(world.calls - before)
        before = world.calls
        optimizer.unwrap()
    assert counts[1] == counts[0] - (3 if world.nodes > 1 else 0), counts


def case_each_optimizer_counts_its_own_exchanges(world: World) -> None:
    """The steps of a small and a large model alternate. The process counts the seconds of both."""
    if world.nodes == 1:
        return
    models = [torch.nn.Linear(8, 4), torch.nn.Linear(1024, 512)]
    optimizers = [build_optimizer(model, aggregation="hierarchical") for model in models]
    before = read_exchange_seconds()
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            width = model.weight.shape[1]
            model(torch.ones(2, width) * step).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    counted = [optimizer._backward.queue.exchange_seconds for optimizer in optimizers]
    for index, (now, first) in enumerate(zip(read_exchange_seconds(), before, strict=True)):
        own = [seconds[index] for seconds in counted]
        assert abs(sum(own) - (now - first)) < 1e-6, (own, now - first)
    # Not between nodes alone: messages may have arrived before a rank waits for them.
    assert max(world.comm.allgather(max(counted[1]))) > 0
    for optimizer in optimizers:
        optimizer.unwrap()


def case_a_state_before_the_first_step_does_not_end_the_comparison(world: World) -> None:
    """Scripts save an initial state, or copy the optimizer: a run that resumes from it measures too."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, 0.4, 0.3):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="auto", bucket_bytes=None)
        assert optimizer.state_dict()["topkube"]["choice"] is None
        train(model, optimizer, 0, STEPS + 1)
        assert read_algorithm(optimizer).startswith("int"), optimizer.tuning.summary
        optimizer.unwrap()
