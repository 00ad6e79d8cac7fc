"""The weights that nodes have with onebit on real ranks: the agreed weights, checks of them, and refused optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import topkube
from ranks.training.onebit_scene import (
    build_lamb,
    build_masters,
    build_onebit,
    train,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, copy_weights
from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.training.node_weights import node_weights
from topkube.world import World


def case_consensus_has_equal_weights_and_restores_own_weights(world: World) -> None:
    for delay in (0, 1):
        check_consensus(world, delay)


def check_consensus(world: World, delay: int) -> None:
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


def case_another_learning_rate_on_a_node_is_named(world: World) -> None:
    """The nodes agree on weights all the same, so their comparison does not show it."""
    if world.nodes == 1:
        return
    for mode in ("error", "warn"):
        model = build_network()
        optimizer = build_onebit(model, settings=Settings(check_weights=mode, check_weights_every=2))
        if world.rank == world.size - 1:
            optimizer.param_groups[0]["lr"] *= 1 + 1e-15  # as a scheduler on another processor may compute it
        train(world, model, optimizer, range(5))
        assert optimizer.differing_ranks == 0
        if world.rank == world.size - 1:
            optimizer.param_groups[0]["lr"] *= 0.1
        if mode == "warn":
            train(world, model, optimizer, range(5, 8))
            assert optimizer.differing_ranks == 1
        else:
            with pytest.raises(TrainingError, match=rf"rank {world.size - 1} train with another learning rate"):
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
    tied = nn.ParameterDict({"a": nn.Parameter(torch.zeros(40, 40))})
    tied["b"] = nn.Parameter(tied["a"].data[:20])
    with pytest.raises(ArgumentError, match="share memory"):
        build_onebit(tied)
    with pytest.raises(ArgumentError, match=r"has dtype torch\.float64"):
        build_onebit(build_network().double(), build_masters(build_lamb))
    optimizer = build_onebit(model)
    with pytest.raises(TrainingError, match="cannot be added"):
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).named_parameters("more"))})
    optimizer.unwrap()
