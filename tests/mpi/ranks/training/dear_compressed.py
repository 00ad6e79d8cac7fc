"""DeAR with algorithms that compress: the second half of their exchange comes with the next forward. Every script gets
the bits that it gets without DeAR, also in the residuals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.dear_scene import (
    STEPS,
    DearNetwork,
    build_adamw,
    check_equal,
    check_resumed,
    is_late,
    run_backward,
    take_step,
    train,
    wait_for,
)
from ranks.training.scene import (
    are_equal_on_all_ranks,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)
from topkube.algorithms import cost, find_algorithm
from topkube.collectives import call, exchange
from topkube.collectives.all_reduce import load
from topkube.collectives.decoupled import DecoupledAllReduce, HalvedArray
from topkube.collectives.dense import Hierarchical
from topkube.collectives.overlapped import TAGS
from topkube.collectives.request import Request
from topkube.training.exchange.tuning import step_times
from topkube.world import World

INT4, HITOPK = {"aggregation": "int4"}, {"aggregation": "hitopk", "density": 0.1}
COMPRESSED: list[dict[str, Any]] = [
    INT4,
    {"aggregation": "int8"},
    {"aggregation": "int3"},
    HITOPK,
    HITOPK | {"wire": "fp16"},
    HITOPK | {"selection": "mstopk", "wire": "bf16", "warmup_steps": 3},
]


@contextmanager
def set_pairwise_limit(limit: int) -> Iterator[None]:
    modules = (cost, exchange)
    limits = [module.PAIRWISE_LIMIT for module in modules]
    try:
        for module in modules:
            module.PAIRWISE_LIMIT = limit
        yield
    finally:
        for module, before in zip(modules, limits, strict=True):
            module.PAIRWISE_LIMIT = before


def case_compressed_updates_come_with_the_next_forward(world: World) -> None:
    late: list[bool] = []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        take_step(model, optimizer, step)
        late.append(is_late(optimizer))

    for bucket_bytes in (8192, None):
        for options in COMPRESSED:
            late.clear()
            check_equal(script, bucket_bytes=bucket_bytes, **options)
            is_always_late = "warmup_steps" not in options  # dense buckets of a warm-up are not in place
            assert any(late) is (world.nodes > 1)
            assert not is_always_late or late[1:STEPS] == [world.nodes > 1] * (STEPS - 1), (options, late)


def case_many_nodes_gather_in_rounds(world: World) -> None:
    with set_pairwise_limit(1):
        for options in COMPRESSED:
            check_equal(take_step, **options)


def train_16_bits(overlap: str, **options: Any) -> list[torch.Tensor]:
    """Return the weights of a model of bfloat16 after some steps."""
    model = DearNetwork().bfloat16()
    del model.unused
    optimizer = build_optimizer(model, build_adamw, overlap=overlap, **options)
    for step in range(STEPS):
        x, y = draw_samples(8 * topkube.size(), step)
        compute_loss(model, take_own_part(x).bfloat16(), take_own_part(y).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.unwrap()
    return copy_weights(model)


def case_parameters_of_16_bits_are_exchanged_in_halves(world: World) -> None:
    for options in (INT4, HITOPK):
        weights = [train_16_bits(overlap, **options) for overlap in ("dear", "backward")]
        assert all(torch.equal(own, expected) for own, expected in zip(*weights, strict=True))
        assert are_equal_on_all_ranks([values.float() for values in weights[0]])


def case_a_sum_beyond_float16_skips_the_step(world: World) -> None:
    """What a node sends is in the range, but from the second step on, with residuals, the sum of two nodes is not."""
    results = []
    for overlap in ("dear", "backward"):
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False).half()
        options: dict[str, Any] = {"aggregation": "hitopk", "density": 0.001, "overlap": overlap}
        optimizer = build_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-9), **options)
        for _ in range(STEPS):
            out = model(torch.ones(1, 256, dtype=torch.float16))
            out.backward(torch.full_like(out, 60_000.0))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.unwrap()
        results.append((optimizer.skipped_steps, copy_weights(model)))
    (skipped, weights), (expected_skipped, expected) = results
    assert skipped == expected_skipped
    assert skipped > 0 or world.nodes == 1
    assert all(torch.equal(own, other) and own.isfinite().all() for own, other in zip(weights, expected, strict=True))


def case_clipping_gathers_only_what_has_no_results_yet(world: World) -> None:
    """With int4, each rank has the results of its own segments after the first half, with hitopk none."""
    for options in (INT4, HITOPK):
        norms: dict[str, list[float]] = {"dear": [], "backward": []}

        def script(
            model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int, norms=norms, options=options
        ) -> None:
            run_backward(model, step)
            norms[optimizer.aggregation.overlap].append(optimizer.clip_grad_norm_(1e9))
            may_be_late = options is INT4 and optimizer.aggregation.overlap == "dear" and world.nodes > 1
            assert is_late(optimizer) is (may_be_late and step > 0)
            optimizer.step()
            optimizer.zero_grad()

        check_equal(script, **options)
        assert norms["dear"] == pytest.approx(norms["backward"], rel=1e-5)


def case_residuals_are_final_after_the_first_half(world: World) -> None:
    """Skipped steps, discarded gradients, gradients of two exchanges, and a frozen layer."""

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        model.middle.requires_grad_(step != 2)
        x, y = draw_samples(8 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
        (loss * torch.nan if step == 3 and world.rank == world.size - 1 else loss).backward()
        if step == 4:
            optimizer.zero_grad()
            run_backward(model, 50 + step)
        if step == 5:
            run_backward(model, 50 + step)  # adds to gradients that are exchanged already
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == (step >= 3)

    for options in COMPRESSED:
        residuals = []
        for overlap in ("dear", "backward"):
            _, optimizer = train(overlap, script, 8, **options)
            residuals.append(optimizer.state_dict()["topkube"]["residuals"]["pieces"])
        assert residuals[0].keys() == residuals[1].keys()
        for name, pieces in residuals[0].items():
            for (start, values), (other_start, others) in zip(pieces, residuals[1][name], strict=True):
                assert start == other_start
                assert torch.equal(values, others), (options, name)
        check_equal(script, 8, **options)


def case_compressed_gathers_begin_in_backward(world: World) -> None:
    """Backward waits in the first layer until a bucket of later layers is gathered."""
    gathered: list[int] = []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        parts = optimizer._backward.exchange.reduced_parts
        is_early = parts is not None and step > 1

        def wait_for_gather(gradient: torch.Tensor) -> None:
            if is_early:
                wait_for(lambda: any(part.halved.is_gathered for part in parts.parts))
                gathered.append(step)

        def enter(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(wait_for_gather)

        hook = model.first.register_forward_hook(enter)
        take_step(model, optimizer, step)
        hook.remove()

    for options in (INT4, HITOPK):
        gathered.clear()
        check_equal(script, bucket_bytes=20_000, **options)
        assert gathered == list(range(2, STEPS)) * (world.nodes > 1)


def case_a_resumed_run_with_compressed_late_updates_has_the_same_bits(world: World) -> None:
    for options in (INT4, HITOPK):
        check_resumed("dear", **options)


def case_auto_compresses_with_late_updates(world: World) -> None:
    """`auto` tries int8, int4 or int3 if one is predicted to be faster, and sends what is left when it returns."""
    if world.nodes == 1:
        return
    for is_faster in (True, False):
        model = DearNetwork()
        del model.unused
        optimizer = build_optimizer(model, build_adamw, aggregation="auto", overlap="dear")
        names, late = [], []
        for step in range(4 * (step_times.SKIPPED_STEPS + step_times.COUNTED_STEPS)):
            tuning = optimizer._backward.plan.tuning
            if step == 1:
                machines = tuning.machines
                tuning.machines = type(machines)(machines.nodes, machines.slots, 1e5, machines.memory, 1e-6)
            if (trial := tuning._trial) is not None and tuning._times._steps:
                measured = trial.earlier.measured
                trial.earlier.measured = [dataclasses.replace(m, steps=(m.step,) * len(m.steps)) for m in measured]
                factor = 0.5 if is_faster else 2.0
                seconds = trial.earlier.step * (factor if trial.in_force is trial.tried else 1.0)
                tuning._times._steps = [(seconds, *rest) for _, *rest in tuning._times._steps]
            take_step(model, optimizer, step)
            names.append(tuning.choice.algorithm.name)
            late.append(is_late(optimizer))
        tried = next(name for name in names if name != names[0])
        assert tried in ("int8", "int4", "int3")
        assert names[-1] == (tried if is_faster else names[0])
        assert late[-1]
        assert all(late[step] for step, name in enumerate(names) if step and name == names[step - 1] == tried), late
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_a_second_optimizer_does_not_disturb_pending_gathers(world: World) -> None:
    """Messages and buffers of gathers belong to one optimizer at a time."""
    for options in (INT4, HITOPK, {"aggregation": "dense", "dense_wire": "bf16"}):
        weights = []
        for overlap in ("dear", "backward"):
            model, optimizer = train(overlap, take_step, **options)
            second = DearNetwork()
            del second.unused
            second_optimizer = build_optimizer(second, build_adamw, overlap=overlap, **options)
            assert not is_late(optimizer)
            for step in range(STEPS):
                take_step(second, second_optimizer, 20 + step)
            second_optimizer.unwrap()
            take_step(model, optimizer, STEPS)
            weights.append(copy_weights(model) + copy_weights(second))
            optimizer.unwrap()
        assert all(torch.equal(own, expected) for own, expected in zip(*weights, strict=True))


def case_messages_of_two_objects_have_different_tags(world: World) -> None:
    """Gathers of one object may be on their way when another object begins its own."""

    def begin(pieces: DecoupledAllReduce) -> HalvedArray:
        request = Request(np.ones(64, np.float32))
        hierarchical = load(find_algorithm("hierarchical"))
        assert isinstance(hierarchical, Hierarchical)
        halved = pieces.halve(hierarchical.enter(world, request, is_in_halves=True), request.array, 1.0)
        pieces.finish()
        pieces.gather([halved])
        return halved

    if world.nodes == 1:
        return
    objects = [DecoupledAllReduce(world) for _ in range(5)]
    pending = [begin(pieces) for pieces in objects]
    tags = [piece.number % TAGS for halved in pending for piece in halved.pieces]
    assert len(set(tags)) == len(tags)
    for pieces, halved in zip(objects, pending, strict=True):
        pieces.finish_gather(halved)


def case_gathers_leave_the_buffers_of_other_collectives_alone(world: World) -> None:
    """Another collective may have its values in a scratch buffer when a gather writes values of 16 bits."""
    if world.nodes == 1:  # nothing is gathered: values are summed inside the node, with this buffer
        return
    scratch = call.reserve_workspace(world, "scratch float32 values", 1 << 16, "uint8")
    scratch[:] = 0xA5
    train_16_bits("dear", **INT4)
    assert (scratch == 0xA5).all()
