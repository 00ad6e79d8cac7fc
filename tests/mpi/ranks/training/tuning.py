"""What `auto` and `dense` choose on real ranks: the same on all of them, switched together, kept in the state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import topkube
from ranks.training.scene import (
    assert_close,
    distributed,
    loss_of,
    network,
    own_part,
    same_on_all_ranks,
    samples,
    weights,
)
from topkube.collectives.link import MeasuredMachine
from topkube.training.exchange import tuning
from topkube.world import World

STEPS = tuning.SKIPPED_STEPS + tuning.COUNTED_STEPS


def train(model: torch.nn.Module, optimizer: topkube.DistributedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = samples(8 * topkube.size(), step)
        loss_of(model, own_part(x), own_part(y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_choice(world: World, optimizer: topkube.DistributedOptimizer) -> bool:
    states = world.comm.allgather(repr(optimizer._backward.plan.state()))
    return all(state == states[0] for state in states)


@contextmanager
def measure_wrongly(world: World, factor: float) -> Iterator[None]:
    """A world whose links seem `factor` times as fast as they are."""
    measure = tuning.measure_machines

    def measure_falsely(of: World) -> MeasuredMachine:
        measured = measure(of)
        rate = measured.rate and measured.rate * factor
        return MeasuredMachine(rate, measured.latency and measured.latency / factor, measured.memory)

    world.cache.pop("measured machines", None)
    tuning.measure_machines = measure_falsely
    try:
        yield
    finally:
        tuning.measure_machines = measure
        world.cache.pop("measured machines", None)


def case_auto_measures_and_all_ranks_choose_alike(world: World) -> None:
    for name in ("auto", "dense"):
        model, reference = network(), network()
        optimizer = distributed(model, aggregation=name, bucket_bytes=None)
        plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for step in range(2 * STEPS + 2):
            x, y = samples(8 * topkube.size(), step)
            loss_of(model, own_part(x), own_part(y)).backward()
            loss_of(reference, x, y).backward()
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
            assert same_choice(world, optimizer)
        assert_close(model, reference)
        assert same_on_all_ranks(weights(model))
        if world.nodes == 1:
            assert (optimizer.tuning.choice, optimizer.tuning.summary) == (None, "")
        else:
            assert optimizer.tuning.choice is not None
            assert not optimizer.tuning.choice.algorithm.compresses
            assert optimizer.tuning.is_settled
            assert f"{name} is " in optimizer.tuning.summary
        optimizer.unwrap()


def case_a_wrong_measurement_is_corrected_by_all_ranks_together(world: World) -> None:
    """A link that seems a million times faster. Ranks then measure different times of their steps: all of them choose
    16 bits after the same step, and keep them, because steps become faster."""
    if world.nodes == 1:
        return
    steps = iter([1.0, 0.5])
    note_step = tuning.Tuning.note_step

    def note_times(self: tuning.Tuning, now: float) -> list[float] | None:
        measured = note_step(self, now)
        return measured and [next(steps) - 0.01 * world.rank, -0.2 - world.rank, -0.01 - world.rank]

    tuning.Tuning.note_step = note_times  # type: ignore[method-assign]
    try:
        with measure_wrongly(world, 1e6):
            model = network()
            optimizer = distributed(model, aggregation="auto", dense_wire="bf16", bucket_bytes=None)
            train(model, optimizer, 0, 1)
            believed = optimizer.tuning.rate
            wires = []
            for step in range(1, 2 * STEPS + 2):
                wires.append(optimizer.tuning.choice.dense_wire if optimizer.tuning.choice else "")
                train(model, optimizer, step, step + 1)
                assert same_choice(world, optimizer)
            assert wires == ["fp32"] * (STEPS - 1) + ["bf16"] * (STEPS + 2), wires
            assert optimizer.tuning.rate < believed / 10
            assert optimizer.tuning.is_settled
            assert "kept: 500 ms per step, 1e+03 ms before" in optimizer.tuning.summary
            assert same_on_all_ranks(weights(model))
            optimizer.unwrap()
    finally:
        tuning.Tuning.note_step = note_step  # type: ignore[method-assign]


def case_a_saved_state_ends_the_tuning_and_a_resumed_run_makes_the_same_steps(world: World) -> None:
    """Only one rank saves before the comparison is due: no rank changes the choice after it."""
    with measure_wrongly(world, 1e6):
        model = network()
        optimizer = distributed(model, aggregation="auto", dense_wire="bf16", bucket_bytes=None)
        train(model, optimizer, 0, 4)
        state, start = copy.deepcopy(optimizer.state_dict()) if world.rank == world.size - 1 else None, weights(model)
        train(model, optimizer, 4, 3 * STEPS)
        chosen = optimizer.tuning.state()
        assert optimizer.tuning.is_settled
        assert optimizer.tuning.measured is None
        optimizer.unwrap()
    state = world.comm.bcast(state, root=world.size - 1)
    resumed = network()
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), start, strict=True):
            parameter.copy_(value)
    again = distributed(resumed, aggregation="auto", dense_wire="bf16", bucket_bytes=None)
    again.load_state_dict(state)
    train(resumed, again, 4, 3 * STEPS)
    assert again.tuning.state() == chosen
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(resumed), strict=True))
    again.unwrap()


def case_a_link_is_measured_once_for_all_optimizers(world: World) -> None:
    world.cache.pop("measured machines", None)
    before = world.calls
    counts = []
    for _ in range(2):
        model = network()
        optimizer = distributed(model, aggregation="auto")
        train(model, optimizer, 0, 2)
        counts.append(world.calls - before)
        before = world.calls
        optimizer.unwrap()
    assert counts[1] == counts[0] - (3 if world.nodes > 1 else 0), counts
