"""onebit with delayed exchanges on real ranks: nothing waits for an exchange, and no change of weights is lost."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import topkube
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
from topkube.training.node_weights import exchange
from topkube.world import World


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
    for reads_agreed_weights in (True, False):
        model = build_network()
        optimizer = build_onebit(model, build_adamw, delay=1)
        for step in range(5):
            train(world, model, optimizer, range(step, step + 1))
            if reads_agreed_weights:
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
    return [x + change if world.nodes > 1 else x for x, change in zip(agreed, unsent, strict=True)]
