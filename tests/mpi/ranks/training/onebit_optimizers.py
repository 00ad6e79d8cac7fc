"""LARS, LAMB and MasterWeights with onebit on real ranks: equal weights, skipped steps, clipping, checkpoints."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_scene import (
    build_adamw,
    build_lamb,
    build_lars,
    build_masters,
    build_onebit,
    draw_batch_of,
    read_agreed_weights,
    read_bits,
    read_trained_weights,
    sum_owed_by_owners,
    sum_unsent_changes,
    train,
    train_with_checkpoints,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss, write_weights
from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.training.node_weights.worlds import find_node_world
from topkube.training.optimizers.lars import LARS
from topkube.world import World

KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "LARS": (build_lars, torch.float32),
    "LAMB": (build_lamb, torch.float32),
    "masters of LAMB": (build_masters(build_lamb), torch.bfloat16),
    "masters of AdamW": (build_masters(build_adamw), torch.float16),
}
"""Optimizers and the dtypes of the weights of their models."""


def build(kind: str, **options: Any) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    make, dtype = KINDS[kind]
    model = build_network().to(dtype)
    return model, build_onebit(model, make, **options)


def read_state(model: nn.Module, optimizer: topkube.DistributedOptimizer) -> list[bytes]:
    """Return the bits of the weights, the agreed weights and the optimizer's state."""
    trained = [tensor for group in optimizer.param_groups for tensor in group["params"]]  # the order of states differs
    tensors = [value for tensor in trained for _, value in sorted(optimizer.state[tensor].items())]
    halves = [parameter.detach().float() for parameter in model.parameters()]
    return [*read_bits(optimizer, model), *(tensor.numpy().tobytes() for tensor in [*tensors, *halves])]


def are_equal_in_node(world: World, tensors: list[torch.Tensor]) -> bool:
    bits = find_node_world(world).comm.allgather([tensor.numpy().tobytes() for tensor in tensors])
    return all(other == bits[0] for other in bits)


def case_ranks_of_a_node_have_equal_weights_and_all_nodes_agree(world: World) -> None:
    for kind in KINDS:
        for delay in (0, 1):
            model, optimizer = build(kind, delay=delay, settings=Settings(check_weights_every=2))
            train(world, model, optimizer, range(6))
            own, dtype = read_trained_weights(optimizer, model), KINDS[kind][1]
            assert are_equal_in_node(world, own), kind
            assert world.nodes == 1 or not are_equal_on_all_ranks(own)
            assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model)), kind
            with optimizer.consensus():
                for parameter, x in zip(model.parameters(), read_trained_weights(optimizer, model), strict=True):
                    assert torch.equal(parameter, x.to(dtype))
            for parameter, weights, before in zip(
                model.parameters(), read_trained_weights(optimizer, model), own, strict=True
            ):
                assert torch.equal(weights, before)
                assert torch.equal(parameter, weights.to(dtype))
            if world.nodes > 1:
                with pytest.raises(TrainingError, match="every node trains weights of its own"):
                    topkube.broadcast_parameters(model)
            optimizer.unwrap()
            assert are_equal_on_all_ranks([parameter.float() for parameter in model.parameters()])


def case_a_nan_on_one_rank_is_skipped_with_each_optimizer(world: World) -> None:
    for kind in KINDS:
        model, optimizer = build(kind)
        train(world, model, optimizer, range(2))
        before = read_state(model, optimizer)
        loss = compute_loss(model, *draw_batch_of(model, world.rank, 2))
        (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (optimizer.steps, optimizer.skipped_steps) == (2, 1)
        assert read_state(model, optimizer) == before, kind
        train(world, model, optimizer, range(3, 5))
        assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
        optimizer.unwrap()


def case_ranks_of_a_node_share_the_norms(world: World) -> None:
    """With `parallel`, weights have the same bits: ranks of a node have equal gradients, and share the norms of their
    node only."""
    results = []
    for parallel in (False, True):
        model = build_network()
        optimizer = build_onebit(model, functools.partial(LARS, lr=0.02, trust=1.0, parallel=parallel))
        train(world, model, optimizer, range(4))
        results.append(read_state(model, optimizer))
        optimizer.unwrap()
    assert results[0] == results[1]


def case_clipping_scales_the_gradients_of_masters(world: World) -> None:
    """With a loss scale, gradients are unscaled and clipped by one norm; an infinite loss is skipped on all nodes."""
    model, optimizer = build("masters of AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    norms = []
    for step in range(4):
        loss = compute_loss(model, *draw_batch_of(model, world.rank, step))
        scaler.scale(loss * torch.inf if step == 1 and world.rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        norms.append(optimizer.clip_grad_norm_(1e-3))
        if step != 1:
            own = sum(float(t.grad.double().square().sum()) for t in optimizer.master_parameters())
            mean = world.comm.allreduce(own) / world.size
            assert abs(mean**0.5 - 1e-3) < 1e-5
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(set(world.comm.allgather(norms[0]))) == 1
    assert (scaler.get_scale(), optimizer.steps) == (2.0**3, 3)
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_weights_that_a_script_writes_reach_the_masters(world: World) -> None:
    """Before the first step, they are the weights that all nodes start from. Later, they are a change of the node."""
    for delay in (0, 1):
        model, optimizer = build("masters of LAMB", delay=delay)
        write_weights(model, [torch.full_like(parameter, 0.25) for parameter in model.parameters()])
        train(world, model, optimizer, range(1))
        moved = max(float((x - 0.25).abs().max()) for x in read_agreed_weights(optimizer, model))
        assert 0 < moved < 0.2
        with torch.no_grad():
            model[0].weight.fill_(8.0)
        own = read_trained_weights(optimizer, model)
        train(world, model, optimizer, range(1, 2))
        assert abs(float(read_trained_weights(optimizer, model)[0].mean()) - 8) < 1, own[0]
        assert torch.equal(model[0].weight, read_trained_weights(optimizer, model)[0].bfloat16())
        optimizer.unwrap()


# ---- checkpoints


def run_until(
    world: World, directory: str, steps: int, kind: str, **options: Any
) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    """Train up to `steps` with checkpoints; return the model, with the node's own weights, and the optimizer."""
    model, optimizer = build(kind, **options)
    train_with_checkpoints(world, model, optimizer, directory, steps)
    return model, optimizer


def case_a_resumed_run_of_each_optimizer_has_the_same_bits(world: World) -> None:
    for kind in KINDS:
        for period, delay in ((1, 0), (2, 1)):
            options = {"period": period, "delay": delay}
            with make_shared_directory(world) as directory:
                whole = run_until(world, f"{directory}/whole", 10, kind, **options)
                for end in (7, 8):
                    run_until(world, f"{directory}/parts", end, kind, **options)
                parts = run_until(world, f"{directory}/parts", 10, kind, **options)
                assert read_state(*whole) == read_state(*parts), (kind, options)


def case_a_state_loaded_by_hand_continues_bit_for_bit(world: World) -> None:
    for kind in KINDS:
        model, optimizer = build(kind)
        train(world, model, optimizer, range(3))
        if "masters" in kind and world.nodes > 1:
            with pytest.raises(TrainingError, match=r"outside optimizer\.consensus"):
                optimizer.state_dict()
        with optimizer.consensus():
            x = {name: value.clone() for name, value in model.state_dict().items()}
            state = copy.deepcopy(optimizer.state_dict())
        train(world, model, optimizer, range(3, 6))
        expected = read_state(model, optimizer)
        optimizer.unwrap()
        other, again = build(kind)
        again.load_state_dict(state)
        other.load_state_dict(x)
        again.restore_node_weights()
        train(world, other, again, range(3, 6))
        assert read_state(other, again) == expected, kind
        again.unwrap()


def leave_masters(world: World, directory: str) -> None:
    """Write a checkpoint of a training with masters, and beside it the agreed masters and what nodes have not sent."""
    model, optimizer = run_until(world, f"{directory}/masters", 6, "masters of LAMB")
    x = read_agreed_weights(optimizer, model)
    unsent_changes = [torch.from_numpy(unsent) for unsent in sum_unsent_changes(world, optimizer, model)]
    optimizer.unwrap()
    if world.rank == 0:
        torch.save({"x": x, "unsent": unsent_changes}, f"{directory}/masters.pt")


def take_up_masters(world: World, directory: str) -> None:
    """Resume in another world: the agreed masters, and the sum of what was not sent, stay."""
    saved = torch.load(f"{directory}/masters.pt", weights_only=True)
    model, optimizer = run_until(world, f"{directory}/masters", 6, "masters of LAMB")
    owners = sum_owed_by_owners(world, optimizer, model)
    own = read_trained_weights(optimizer, model)
    for weights, owner, x, unsent in zip(own, owners, saved["x"], saved["unsent"], strict=True):
        mean = world.comm.allreduce(weights.double().numpy()) / world.size
        np.testing.assert_allclose(mean + owner, x.double().numpy() + unsent.numpy(), rtol=0, atol=1e-6)
    for a, x in zip(read_agreed_weights(optimizer, model), saved["x"], strict=True):
        assert world.nodes == 1 or torch.equal(a, x)
    optimizer.unwrap()
    model, optimizer = run_until(world, f"{directory}/masters", 9, "masters of LAMB")
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()
