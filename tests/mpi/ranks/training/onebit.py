"""onebit on real ranks: nothing is lost, no NaN spreads, few bytes travel, and the guard holds on all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.onebit_scene import (
    build_adamw,
    build_lamb,
    build_masters,
    build_onebit,
    draw_batch,
    read_agreed_weights,
    read_bits,
    sum_unsent_changes,
    train,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss, copy_weights
from topkube.collectives import one_stage
from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.node_weights import exchange, guard, layout, node_weights
from topkube.world import World


def case_nothing_is_lost(world: World) -> None:
    """At learning rate 1 without momentum, the change of the agreed weights plus what is owed is the sum of all mean
    gradients."""
    for delay in (0, 1):
        lose_nothing(world, delay)


def lose_nothing(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), delay=delay)
    start, total = copy_weights(model), [np.zeros(tuple(p.shape)) for p in model.parameters()]
    for step in range(6):
        (0.01 * compute_loss(model, *draw_batch(world.rank, step))).backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            sum_ += world.comm.allreduce(parameter.grad.double().numpy()) / world.size
        optimizer.step()
        optimizer.zero_grad()
    left = sum_unsent_changes(world, optimizer, model)
    for first, x, unsent, sum_ in zip(start, read_agreed_weights(optimizer, model), left, total, strict=True):
        moved = (first.double() - x.double()).numpy()
        np.testing.assert_allclose(moved - (unsent if world.nodes > 1 else 0), sum_, rtol=0, atol=2e-6)
    assert world.nodes == 1 or max(float(np.abs(unsent).max()) for unsent in left) > 1e-4
    optimizer.unwrap()


def case_a_nan_on_one_rank_changes_nothing_anywhere(world: World) -> None:
    for delay in (0, 1):
        skip_a_step(world, delay)


def skip_a_step(world: World, delay: int) -> None:
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
        scale_gradients(world, delay)


def scale_gradients(world: World, delay: int) -> None:
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
        cut = functools.partial(layout.cut_into_chunks, chunk_bytes=chunk_bytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "cut_into_chunks", cut)
            patch.setattr(one_stage, "PART_ELEMENTS", part_elements)
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(n, m) for n, m in ((24, 64), (64, 64), (64, 200), (200, 100), (100, 1))))
            optimizer = build_onebit(model)
        train(world, model, optimizer, range(6))
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert all(bits == results[0] for bits in results)


def case_nothing_of_the_next_step_waits_for_a_delayed_exchange(world: World) -> None:
    """An exchange begins when the next backward has ended: with the announcement of a batch, the gradients within a
    node, the agreement of all ranks, and calls of the script."""
    model = build_network()
    optimizer = build_onebit(model, delay=1)
    steps, waited, numbers = 3, [], itertools.count(1)
    has_computed = [threading.Event() for _ in range(steps + 1)]
    run = exchange.WeightExchange.run

    def run_after_next_backward(*arguments: object, **options: object) -> None:
        waited.append(has_computed[next(numbers)].wait(60))
        run(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.WeightExchange, "run", run_after_next_backward)
        for x, y in optimizer.join([draw_batch(world.rank, step) for step in range(steps)]):
            compute_loss(model, x, y).backward()
            has_computed[optimizer.steps].set()
            optimizer.step()
            optimizer.zero_grad()
            total = topkube.allreduce_(np.full(9, world.rank, np.float32), op="sum", algorithm="hierarchical")
            assert (total == sum(range(world.size))).all()
            topkube.broadcast_parameters(nn.Linear(2, 2))
        has_computed[steps].set()
        with optimizer.consensus():
            assert are_equal_on_all_ranks(copy_weights(model))
    assert waited == [True] * (steps if world.nodes > 1 else 0)
    optimizer.unwrap()
    assert are_equal_on_all_ranks(copy_weights(model))


def case_a_delayed_exchange_sends_what_the_step_has_left(world: World) -> None:
    """A script puts other weights into the model for an evaluation, while the exchange begins."""
    results = []
    run = exchange.WeightExchange.run
    for swaps in (True, False):
        model = build_network()
        optimizer = build_onebit(model, build_adamw, delay=1)
        for step in range(3):
            has_swapped = threading.Event()

            def run_after_swap(*arguments: object, event: threading.Event = has_swapped, **options: object) -> None:
                assert event.wait(60)
                run(*arguments, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange.WeightExchange, "run", run_after_swap)
                train(world, model, optimizer, range(step, step + 1))
                own = copy_weights(model)
                if swaps:
                    for parameter in model.parameters():
                        parameter.data.fill_(100.0)
                has_swapped.set()
                optimizer._node_weights.exchange.wait_for_delayed()
            for parameter, weights in zip(model.parameters(), own, strict=True):
                parameter.data.copy_(weights)
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert results[0] == results[1]


def case_optimizers_with_delayed_exchanges_train_as_alone(world: World) -> None:
    """Two optimizers with delayed exchanges and a dense optimizer take turns."""

    def train_together(seeds: tuple[int, ...]) -> dict[int, list[bytes]]:
        models, optimizers = {}, {}
        for seed in seeds:
            torch.manual_seed(seed)
            models[seed] = nn.Sequential(nn.Linear(24, 64 + seed), nn.Tanh(), nn.Linear(64 + seed, 1))
            options = {"aggregation": "hierarchical"} if seed == 2 else {"delay": 1}
            optimizers[seed] = build_onebit(models[seed], build_adamw, **options)
        for step in range(5):
            for seed in seeds:
                train(world, models[seed], optimizers[seed], range(step, step + 1))
        bits = {seed: read_bits(optimizers[seed], models[seed]) for seed in seeds}
        for optimizer in optimizers.values():
            optimizer.unwrap()
        return bits

    together = train_together((0, 1, 2))
    assert all(train_together((seed,))[seed] == together[seed] for seed in together)


def case_consensus_does_not_change_a_delayed_training(world: World) -> None:
    results = []
    for looks in (True, False):
        model = build_network()
        optimizer = build_onebit(model, build_adamw, delay=1)
        for step in range(5):
            train(world, model, optimizer, range(step, step + 1))
            if looks:
                read_agreed_weights(optimizer, model)
                optimizer.state_dict()
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert results[0] == results[1]


def case_changes_of_weights_during_a_delayed_exchange_are_kept(world: World) -> None:
    """A script changes weights between two steps, in a way that torch notices and in a way that it does not."""
    for change in (lambda weight: weight.detach().add_(0.5), lambda weight: weight.data.add_(0.5)):
        model = build_network()
        optimizer = build_onebit(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), delay=1)
        train(world, model, optimizer, range(2))
        before = sum_weights_and_rest(world, optimizer, model)
        change(model[0].weight)
        (0 * compute_loss(model, *draw_batch(world.rank, 2))).backward()
        optimizer.step()
        after = sum_weights_and_rest(world, optimizer, model)
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            np.testing.assert_allclose(new - old, 0.5 * (number == 0), rtol=0, atol=2e-6)
        optimizer.unwrap()


def sum_weights_and_rest(world: World, optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[np.ndarray]:
    """Return, for each parameter, the agreed weights plus the mean of what nodes have not sent."""
    agreed = [weights.double().numpy() for weights in read_agreed_weights(optimizer, model)]
    unsent = sum_unsent_changes(world, optimizer, model)
    return [x + left if world.nodes > 1 else x for x, left in zip(agreed, unsent, strict=True)]


def case_accumulated_gradients_make_one_step(world: World) -> None:
    for delay in (0, 1):
        accumulate_gradients(world, delay)


def accumulate_gradients(world: World, delay: int) -> None:
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
        end_together(world, delay)


def end_together(world: World, delay: int) -> None:
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
    wanted = (sum(norms) / world.size) ** 0.5
    norm = optimizer.clip_grad_norm_(wanted / 2)
    assert len(set(world.comm.allgather(norm))) == 1
    assert abs(norm - wanted) < 1e-5 * wanted
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
        for period, wanted in ((4, 1), (8, 8)):  # a job that asks for another period gets it
            again = build_onebit(model, period=period)
            again.load_state_dict(state)
            assert again.guard.period == wanted
            again.unwrap()
        return
    optimizer.unwrap()


# ---- equal weights, and what does not work


def case_consensus_has_equal_weights_and_restores_own_weights(world: World) -> None:
    for delay in (0, 1):
        enter_consensus(world, delay)


def enter_consensus(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, delay=delay)
    with optimizer.consensus():
        pass
    train(world, model, optimizer, range(3))
    own = copy_weights(model)
    with optimizer.consensus():
        assert are_equal_on_all_ranks(copy_weights(model))
        with pytest.raises(TrainingError, match=r"inside optimizer\.consensus"):
            optimizer.step()
        with pytest.raises(TrainingError, match=r"inside optimizer\.consensus"):
            optimizer.unwrap()
    saved = optimizer.state_dict()["topkube"]["residuals"]
    assert saved.get("delayed", False) == (delay > 0 and world.nodes > 1)
    for a, b in zip(copy_weights(model), own, strict=True):
        assert torch.equal(a, b)
    if world.nodes > 1:
        assert not are_equal_on_all_ranks(own)
        with pytest.raises(TrainingError, match="was changed inside"), optimizer.consensus(), torch.no_grad():
            model[0].weight.add_(1)
        for a, b in zip(copy_weights(model), own, strict=True):
            assert torch.equal(a, b)
        with pytest.raises(TrainingError, match="every node trains weights of its own"):
            topkube.broadcast_parameters(model)
        with pytest.raises(TrainingError, match="every node has its own"):
            optimizer.load_shared_state(optimizer.shared_state())
    optimizer.unwrap()
    topkube.broadcast_parameters(model)


def case_weights_that_a_script_changes_are_reported(world: World) -> None:
    """The agreed weights follow only later, which a script that loads weights would not notice."""
    reported: list[str] = []

    def warn(text: str) -> None:
        if "was changed between two steps" in text:
            reported.append(text)

    original, node_weights.warn = node_weights.warn, warn
    try:
        model = build_network()
        first = copy.deepcopy(model.state_dict())
        optimizer = build_onebit(model, period=2)
        model.load_state_dict(first)  # nodes have no weights of their own yet
        train(world, model, optimizer, range(3))
        with optimizer.consensus():
            pass
        train(world, model, optimizer, range(3, 5))
        assert not reported
        for _ in range(2):
            model.load_state_dict(first)
            train(world, model, optimizer, range(5, 7))
        assert len(reported) == (world.rank == 0 and world.nodes > 1), reported
        optimizer.unwrap()
    finally:
        node_weights.warn = original


def case_the_check_of_weights_compares_the_agreed_weights(world: World) -> None:
    model = build_network()
    optimizer = build_onebit(model, settings=Settings(check_weights_every=2))
    train(world, model, optimizer, range(5))
    assert optimizer.differing_ranks == 0
    if world.size > 1:
        if optimizer._node_weights.exchange.agreed and world.rank == 0:
            optimizer._node_weights.exchange.agreed[0][0] += 1
        elif world.nodes == 1 and world.rank == 0:
            with torch.no_grad():
                model[0].weight[0, 0] += 1
        with pytest.raises(TrainingError, match="agree on other weights"):
            train(world, model, optimizer, range(5, 8))
    optimizer._backward.end()


def case_optimizers_that_do_not_work_with_onebit_are_refused(world: World) -> None:
    model = build_network()
    with pytest.raises(ArgumentError, match="momentum correction does not work with onebit"):
        build_onebit(model, momentum_correction=True)
    with pytest.raises(ArgumentError, match="the period of diloco is 1, but it must be at least 2"):
        build_onebit(model, aggregation="diloco")
    with pytest.raises(ArgumentError, match="delay is 1, but dense does not read it"):
        build_onebit(model, aggregation="dense", delay=1)
    with pytest.raises(ArgumentError, match="delay is 2"):
        build_onebit(model, delay=2)
    with pytest.raises(ArgumentError, match="period is 0"):
        build_onebit(model, period=0)
    with pytest.raises(ArgumentError, match=r"has dtype torch\.bfloat16"):
        build_onebit(build_network().bfloat16())
    with pytest.raises(ArgumentError, match=r"has dtype torch\.float64"):
        build_onebit(build_network().double(), build_masters(build_lamb))
    optimizer = build_onebit(model)
    with pytest.raises(TrainingError, match="cannot be added"):
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).named_parameters("more"))})
    optimizer.unwrap()
