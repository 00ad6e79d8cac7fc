"""onebit on real ranks: nothing is lost, no NaN spreads, few bytes are sent, and the guard holds on all ranks."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from ranks.training.onebit_scene import (
    build_adamw,
    build_onebit,
    draw_batch,
    read_agreed_weights,
    read_bits,
    sum_unsent_changes,
    train,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss, copy_weights
from topkube.collectives import one_stage
from topkube.telemetry import phases
from topkube.training.node_weights import exchange, guard
from topkube.world import World


def case_nothing_is_lost(world: World) -> None:
    """At learning rate 1 without momentum, the change of the agreed weights plus what is owed is the sum of all mean
    gradients."""
    for delay in (0, 1):
        check_that_nothing_is_lost(world, delay)


def check_that_nothing_is_lost(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), delay=delay)
    start, totals = copy_weights(model), [np.zeros(tuple(p.shape)) for p in model.parameters()]
    for step in range(6):
        (0.01 * compute_loss(model, *draw_batch(world.rank, step))).backward()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            total += world.comm.allreduce(parameter.grad.double().numpy()) / world.size
        optimizer.step()
        optimizer.zero_grad()
    unsent_changes = sum_unsent_changes(world, optimizer, model)
    agreed_weights = read_agreed_weights(optimizer, model)
    for first, x, unsent, total in zip(start, agreed_weights, unsent_changes, totals, strict=True):
        moved = (first.double() - x.double()).numpy()
        np.testing.assert_allclose(moved - (unsent if world.nodes > 1 else 0), total, rtol=0, atol=2e-6)
    assert world.nodes == 1 or max(float(np.abs(unsent).max()) for unsent in unsent_changes) > 1e-4
    optimizer.unwrap()


def case_a_nan_on_one_rank_changes_nothing_anywhere(world: World) -> None:
    for delay in (0, 1):
        check_a_skipped_step(world, delay)


def check_a_skipped_step(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, build_adamw, delay=delay)
    train(world, model, optimizer, range(2))
    before, x = copy_weights(model), read_agreed_weights(optimizer, model)
    moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    loss = compute_loss(model, *draw_batch(world.rank, 2))
    (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.steps, optimizer.skipped_steps) == (2, 1)
    for a, b in zip([*copy_weights(model), *read_agreed_weights(optimizer, model)], [*before, *x], strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    for state, second in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg_sq"], second)
    train(world, model, optimizer, range(3, 5))
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_a_grad_scaler_skips_on_all_nodes(world: World) -> None:
    for delay in (0, 1):
        check_a_grad_scaler(world, delay)


def check_a_grad_scaler(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, delay=delay)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        loss = compute_loss(model, *draw_batch(world.rank, step))
        scaler.scale(loss * torch.inf if step == 1 and world.rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**9
    assert optimizer.steps == 3
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_the_same_run_gives_the_same_bits(world: World) -> None:
    results = []
    for _ in range(2):
        model = build_network()
        optimizer = build_onebit(model, build_adamw, period=2)
        train(world, model, optimizer, range(5))
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert results[0] == results[1]


def case_chunks_and_parts_that_overlap_give_the_same_bits(world: World) -> None:
    """Small chunks and parts are under way at the same time, the second larger than the first. The signs do not depend
    on how the tensors are cut."""
    results = []
    for chunk_bytes, part_elements in ((25 * 2**20, 2**19), (20_000, 2**19), (20_000, 1), (200_000, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "BUCKET_BYTES", chunk_bytes)
            patch.setattr(one_stage, "PART_ELEMENTS", part_elements)
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(n, m) for n, m in ((24, 64), (64, 64), (64, 200), (200, 100), (100, 1))))
            optimizer = build_onebit(model)
        train(world, model, optimizer, range(6))
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert all(bits == results[0] for bits in results)


def case_accumulated_gradients_make_one_step(world: World) -> None:
    for delay in (0, 1):
        check_accumulated_gradients(world, delay)


def check_accumulated_gradients(world: World, delay: int) -> None:
    results = []
    for accumulates in (True, False):
        model = build_network()
        optimizer = build_onebit(model, delay=delay)
        for step in range(0, 6, 2):
            with optimizer.no_sync() if accumulates else contextlib.nullcontext():
                compute_loss(model, *draw_batch(world.rank, step)).backward()
            compute_loss(model, *draw_batch(world.rank, step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(copy_weights(model))
        optimizer.unwrap()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def case_uneven_batches_end_together(world: World) -> None:
    """Rank 0 has one batch more than the others: its node alone has a gradient in the last step."""
    for delay in (0, 1):
        check_uneven_batches(world, delay)


def check_uneven_batches(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, delay=delay)
    count = 4 if world.rank == 0 else 3
    for x, y in optimizer.join([draw_batch(world.rank, step) for step in range(count)]):
        compute_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 4
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_clipping_uses_one_norm(world: World) -> None:
    model = build_network()
    optimizer = build_onebit(model)
    compute_loss(model, *draw_batch(world.rank, 0)).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norms = world.comm.allgather(float(sum((gradient.double() ** 2).sum() for gradient in before)))
    expected = (sum(norms) / world.size) ** 0.5
    norm = optimizer.clip_grad_norm_(expected / 2)
    assert len(set(world.comm.allgather(norm))) == 1
    assert abs(norm - expected) < 1e-5 * expected
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2, rtol=1e-5, atol=1e-8)
    optimizer.unwrap()


def case_few_bytes_travel(world: World) -> None:
    """Per node and step at most 1/24 of the bytes of a dense float32 exchange among two nodes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Linear(256, 1))
    count = sum(parameter.numel() for parameter in model.parameters())
    for period in (1, 4):
        optimizer = build_onebit(model, build_adamw, period=period)
        phases.current.take()
        for step in range(16):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(world.rank + 100 * step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.consensus():
            pass
        sent = float(world.sum_small(np.array([phases.current.take().inter_bytes], np.float64))[0])
        of_node = sent / world.nodes / 16
        if world.nodes < 8:
            dense = 4 * count * (world.nodes - 1)  # of two nodes; an all-gather sends as much to every further node
        else:
            dense = 4 * count * 2 * (world.nodes - 1) / world.nodes
        assert of_node <= dense / {1: 24, 4: 75}[period], (period, dense / max(of_node, 1))
        assert (of_node > 0) == (world.nodes > 1)
        optimizer.unwrap()


def case_the_guard_shortens_the_period_on_all_ranks(world: World) -> None:
    """If every step exceeds the guard's limit, the period is 4, then 2, then 1 step, and a state dict keeps it."""
    model = build_network()
    optimizer = build_onebit(model, period=4)
    limit, guard.MOST_SPREAD = guard.MOST_SPREAD, 1e-9
    try:
        periods = []
        for step in range(36):
            train(world, model, optimizer, range(step, step + 1))
            periods.append(optimizer.guard.period)
    finally:
        guard.MOST_SPREAD = limit
    if world.nodes == 1:
        assert optimizer.guard.unsent_ratio is None
        assert set(periods) == {4}
    else:
        assert periods == [4] * 3 + [2] * 30 + [1] * 3
        assert len(set(world.comm.allgather((optimizer.guard.unsent_ratio, optimizer.guard.weight_spread)))) == 1
        assert optimizer.guard.unsent_ratio > 0
        assert 0 < optimizer.guard.weight_spread < 1
        state = optimizer.state_dict()
        optimizer.unwrap()
        for period, expected in ((4, 1), (8, 8)):  # a job that asks for another period gets it
            again = build_onebit(model, period=period)
            again.load_state_dict(state)
            assert again.guard.period == expected
            again.unwrap()
        return
    optimizer.unwrap()
