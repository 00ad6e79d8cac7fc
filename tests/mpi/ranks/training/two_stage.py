"""onebit on eight nodes. From eight nodes on, its exchange has two stages."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import topkube
from ranks.training import onebit, onebit_weights
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_checkpoints import read_state, run_until
from ranks.training.onebit_definition import Definition, follow_definition
from ranks.training.onebit_scene import (
    build_adamw,
    build_onebit,
    build_sgd,
    draw_batch,
    owners_keeping_a_part,
    read_agreed_weights,
    read_bits,
    read_trained_weights,
    sum_owed_by_owners,
    sum_unsent_changes,
    train,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss
from topkube import collectives
from topkube.algorithms import Workload, find_algorithm
from topkube.telemetry import phases
from topkube.world import World


def case_the_weights_follow_the_definition(world: World) -> None:
    """The definition is in float64. Owners keep in their weights what they do not send of the mean."""
    assert world.nodes >= 8
    follow_definition(world, build_sgd, 1, steps=4)
    follow_definition(world, build_adamw, 2, steps=4)
    follow_definition(world, build_sgd, 1, steps=3, delay=1)


def case_owners_keep_a_part_beside_their_weights(world: World) -> None:
    """With more than 16 nodes, weights with all of it would be far from those of other nodes; here, with more than
    three. Checkpoints have what is beside."""
    with owners_keeping_a_part():
        follow_definition(world, build_sgd, 1, steps=4)
        follow_definition(world, build_sgd, 2, steps=4, delay=1)
        case_nothing_is_lost(world)
        case_a_resumed_run_continues_bit_for_bit(world)


def case_what_owners_kept_beside_their_weights_can_move_into_them(world: World) -> None:
    """A checkpoint in which owners kept a part, as all owners of earlier versions did, is continued by owners that do
    not: nothing is lost."""
    with make_shared_directory(world) as directory:
        with owners_keeping_a_part():
            model, optimizer = run_until(world, directory, 4)
            assert any(unsent.any() for unsent in sum_owed_by_owners(world, optimizer, model))
            before = sum_unsent_changes(world, optimizer, model)
            optimizer.unwrap()
        model, optimizer = run_until(world, directory, 4)
        assert not any(unsent.any() for unsent in sum_owed_by_owners(world, optimizer, model))
        for after, unsent in zip(sum_unsent_changes(world, optimizer, model), before, strict=True):
            np.testing.assert_allclose(after, unsent, rtol=0, atol=1e-6)
        optimizer.unwrap()


def case_the_guard_measures_what_owners_keep(world: World) -> None:
    """The owner of a segment sends its whole change there, and may keep more than that: a part of the mean."""
    for algorithm in ("onebit", "topk1bit", "localsgd"):
        model, alone = build_network(), build_network()
        before = [p.detach().clone() for p in model.parameters()]
        owners = [Definition(world, model, build_sgd).find_owners(i) == world.node for i in range(len(before))]
        optimizer = build_onebit(model, build_sgd, period=2, aggregation=algorithm)
        train_alone(world, alone, 2)
        train(world, model, optimizer, range(2))
        agreed = read_agreed_weights(optimizer, model)
        weights = read_trained_weights(optimizer, model)
        kept, sent = 0.0, 0.0
        for own, x, start, trained, is_own in zip(weights, agreed, before, alone.parameters(), owners, strict=True):
            of_rest, of_change = (own - x).double() ** 2, (trained.detach() - start).double() ** 2
            kept += float(of_rest.sum())
            sent += float(torch.where(is_own, of_change, of_change - of_rest).sum())
        expected = (world.comm.allreduce(kept) / world.comm.allreduce(sent)) ** 0.5
        ratio = optimizer.guard.unsent_ratio
        assert ratio is not None
        assert abs(ratio - expected) < 0.01 * expected + 1e-4, (algorithm, ratio, expected)
        optimizer.unwrap()


def train_alone(world: World, model: nn.Module, steps: int) -> None:
    """Train on the batches of this rank, without an exchange."""
    optimizer = build_sgd(model.parameters())
    for step in range(steps):
        compute_loss(model, *draw_batch(world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def case_a_model_has_fewer_blocks_than_nodes(world: World) -> None:
    """Some nodes then own nothing, and a tensor lies in the segments of the others."""
    for algorithm in ("onebit", "topk1bit"):
        for delay in (0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 1))
            assert model[0].weight.numel() < 256 * world.nodes
            optimizer = build_onebit(model, aggregation=algorithm, delay=delay)
            before = read_agreed_weights(optimizer, model)
            train(world, model, optimizer, range(4))
            after = read_agreed_weights(optimizer, model)
            assert are_equal_on_all_ranks(after)
            assert all((new != old).any() for new, old in zip(after, before, strict=True))
            optimizer.unwrap()


def case_nothing_is_lost(world: World) -> None:
    onebit.case_nothing_is_lost(world)


def case_few_bytes_travel_however_many_nodes_there_are(world: World) -> None:
    onebit.case_few_bytes_travel(world)


def case_a_nan_on_one_rank_changes_nothing_anywhere(world: World) -> None:
    onebit.case_a_nan_on_one_rank_changes_nothing_anywhere(world)


def case_consensus_has_equal_weights_and_restores_own_weights(world: World) -> None:
    onebit_weights.case_consensus_has_equal_weights_and_restores_own_weights(world)


def case_allreduce_has_two_stages_too(world: World) -> None:
    """`topkube.allreduce_`: the same bits on all ranks, nothing is lost, and the bytes do not grow with the nodes."""
    length = 20_011
    for name in ("onebit", "topk1bit", "localsgd"):
        residual = collectives.new_residual(name, length)
        received, summed = np.zeros(length), np.zeros(length)
        phases.current.take()
        for step in range(3):
            arrays = [np.random.default_rng([step, rank]).standard_normal(length) for rank in range(world.size)]
            summed += np.sum(arrays, axis=0)
            x = arrays[world.rank].astype(np.float32)
            topkube.allreduce_(x, op="sum", algorithm=name, wire="bf16", residual=residual)
            assert len(set(world.comm.allgather(x.tobytes()))) == 1, name
            received += x
        sent = float(world.sum_small(np.array([phases.current.take().inter_bytes], np.float64))[0])
        first, last = (length * (world.local_rank + i) // world.shards for i in range(2))
        owed = np.zeros(length)
        owed[first:last] = residual.current
        kept = world.comm.allreduce(owed)
        np.testing.assert_allclose(received + kept, summed, rtol=0, atol=1e-4 * np.abs(summed).max())
        assert kept.any()
        bound = find_algorithm(name).traffic(Workload(world.nodes, 1, length)).sent
        assert abs(sent / world.nodes / 3 / bound - 1) < 0.1, (name, sent / world.nodes / 3, bound)


def case_runs_repeat_bit_for_bit(world: World) -> None:
    results = []
    for _ in range(2):
        model = build_network()
        optimizer = build_onebit(model, build_adamw)
        train(world, model, optimizer, range(4))
        results.append(read_bits(optimizer, model))
        assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
        optimizer.unwrap()
    assert results[0] == results[1]


def case_a_resumed_run_continues_bit_for_bit(world: World) -> None:
    for delay in (0, 1):
        with make_shared_directory(world) as directory:
            whole = read_state(*run_until(world, f"{directory}/whole", 8, delay=delay))
            run_until(world, f"{directory}/parts", 5, delay=delay)
            parts = read_state(*run_until(world, f"{directory}/parts", 8, delay=delay))
            assert whole == parts
