"""Checkpoints of onebit: the agreed weights, and the state of each node."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_optimizers import leave_masters, take_up_masters
from ranks.training.onebit_scene import (
    build_adamw,
    build_onebit,
    draw_batch,
    owners_keeping_a_part,
    read_agreed_weights,
    sum_over_ranks,
    sum_owed_by_owners,
    sum_unsent_changes,
    train,
    train_with_checkpoints,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss, copy_weights
from topkube.algorithms import Stage
from topkube.errors import CheckpointError, TrainingError
from topkube.settings import Settings
from topkube.world import World


def run_until(
    world: World, directory: str, steps: int, **options: Any
) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    """Train up to `steps` with checkpoints; return the model, with the node's own weights, and the optimizer."""
    model = build_network()
    optimizer = build_onebit(model, build_adamw, **options)
    train_with_checkpoints(world, model, optimizer, directory, steps)
    return model, optimizer


def read_state(model: nn.Module, optimizer: topkube.DistributedOptimizer) -> list[bytes]:
    tensors = [*copy_weights(model), *read_agreed_weights(optimizer, model)]
    for parameter in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [tensor.numpy().tobytes() for tensor in tensors]


def case_a_resumed_run_has_the_same_bits_as_an_uninterrupted_run(world: World) -> None:
    """The checkpoints of steps 4 and 7 lie on an exchange and, for a period of 2, between two exchanges. With a delay,
    the result of the exchange is not in the weights yet."""
    for period, delay, ends in ((1, 0, (7, 10)), (2, 0, (7, 18, 20)), (1, 1, (7, 10)), (2, 1, (7, 8, 20))):
        options = {"period": period, "delay": delay}
        with make_shared_directory(world) as directory:
            whole = read_state(*run_until(world, f"{directory}/whole", ends[-1], **options))
            for end in ends[:-1]:
                run_until(world, f"{directory}/parts", end, **options)
            parts = read_state(*run_until(world, f"{directory}/parts", ends[-1], **options))
            assert whole == parts, options


def case_a_resumed_run_of_diloco_continues_bit_for_bit(world: World) -> None:
    """The outer momentum is in the checkpoint; step 5 lies between two exchanges."""
    with make_shared_directory(world) as directory:
        whole = read_state(*run_until(world, f"{directory}/whole", 9, **DILOCO))
        run_until(world, f"{directory}/parts", 5, **DILOCO)
        assert read_state(*run_until(world, f"{directory}/parts", 9, **DILOCO)) == whole


def case_a_checkpoint_holds_the_agreed_weights(world: World) -> None:
    with make_shared_directory(world) as directory:
        model, optimizer = run_until(world, directory, 5)
        x = read_agreed_weights(optimizer, model)
        [path] = Path(directory).glob("step-00000005*")
        saved = torch.load(path / "shared.pt", weights_only=True)["model"]
        plain = build_network()
        plain.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(copy_weights(plain), x, strict=True))


def case_a_state_loaded_by_hand_must_be_restored(world: World) -> None:
    """The script saves the model and the optimizer in one context, with the weights that all nodes agree on."""
    for delay in (0, 1):
        restore_by_hand(world, delay)


def restore_by_hand(world: World, delay: int) -> None:
    model = build_network()
    optimizer = build_onebit(model, build_adamw, delay=delay)
    train(world, model, optimizer, range(3))
    with optimizer.consensus():
        x = {name: value.clone() for name, value in model.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())  # torch's own state is not copied
    train(world, model, optimizer, range(3, 6))
    expected = read_state(model, optimizer)
    optimizer.unwrap()

    other = build_network()
    again = build_onebit(other, build_adamw, delay=delay)
    again.load_state_dict(state)
    other.load_state_dict(x)
    if world.nodes > 1:
        compute_loss(other, *draw_batch(world.rank, 3)).backward()
        with pytest.raises(TrainingError, match="loaded but not restored"):
            again.step()
        again.zero_grad()
    again.restore_node_weights()
    train(world, other, again, range(3, 6))
    assert read_state(other, again) == expected
    again.unwrap()


def case_another_algorithm_does_not_take_the_state(world: World) -> None:
    if world.nodes == 1:
        return
    model = build_network()
    optimizer = build_onebit(model)
    train(world, model, optimizer, range(2))
    state = optimizer.state_dict()
    optimizer.unwrap()
    other = build_onebit(model, aggregation="hitopk", density=0.1)
    with pytest.raises(TrainingError, match="saved with another algorithm"):
        other.load_state_dict(state)
    other.unwrap()
    with make_shared_directory(world) as directory:
        run_until(world, directory, 2)
        with pytest.raises(CheckpointError):
            run_until(world, directory, 4, aggregation="hitopk", density=0.1)


# ---- another world: started by name, with the directory

DILOCO = {"aggregation": "diloco", "period": 2}


def sum_outer_momentum(world: World, model: nn.Module, optimizer: topkube.DistributedOptimizer) -> list[torch.Tensor]:
    """Return the outer momentum that all nodes have."""
    saved = optimizer.state_dict()["topkube"]["residuals"]
    pieces = {name: saved["pieces"].get(f"{name} outer_momentum", []) for name, _ in model.named_parameters()}
    optimizer.unwrap()
    return [torch.from_numpy(total) for total in sum_over_ranks(world, pieces, model, saved["weight"])]


def leave_checkpoint(world: World, directory: str) -> None:
    """Write a checkpoint, and beside it the agreed weights and what the nodes have not sent. Owners of segments keep a
    part beside their weights."""
    with owners_keeping_a_part():
        leave_checkpoint_of_owners(world, directory)


def leave_checkpoint_of_owners(world: World, directory: str) -> None:
    model, optimizer = run_until(world, directory, 6)
    x, unsent_changes = read_agreed_weights(optimizer, model), sum_unsent_changes(world, optimizer, model)
    second = [
        torch.from_numpy(world.comm.allreduce(optimizer.state[p]["exp_avg_sq"].double().numpy()) / world.size)
        for p in model.parameters()
    ]
    owed = [torch.from_numpy(unsent) for unsent in unsent_changes]
    state: dict[str, Any] = {"x": x, "owed": owed, "second": second, "two_stage": world.nodes >= 8}
    leave_residuals_of_a_schedule(world, directory)
    leave_masters(world, directory)
    delayed = run_until(world, f"{directory}/delayed", 6, delay=1)
    state["delayed"] = [
        x.double() + torch.from_numpy(unsent)
        for x, unsent in zip(
            read_agreed_weights(*delayed[::-1]), sum_unsent_changes(world, *delayed[::-1]), strict=True
        )
    ]
    saved_momentum = sum_outer_momentum(world, *run_until(world, f"{directory}/diloco", 6, **DILOCO))
    if world.rank == 0:
        torch.save(saved_momentum, f"{directory}/momentum.pt")
        torch.save(state, f"{directory}/left.pt")


def take_up(world: World, directory: str) -> None:
    """Resume in another world: the agreed weights and the sum of what was not sent stay, and training continues. Owners
    of segments keep all that they do not send in their weights, except in `take_up_delayed`."""
    saved = torch.load(f"{directory}/left.pt", weights_only=True)
    model = build_network()
    optimizer = build_onebit(model, build_adamw)
    with topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=directory)) as run:
        assert run.step == 6
        own = [world.comm.allreduce(p.detach().double().numpy()) / world.size for p in model.parameters()]
        owners = sum_owed_by_owners(world, optimizer, model)
        assert not any(unsent.any() for unsent in owners)
        for mean, owner, x, unsent in zip(own, owners, saved["x"], saved["owed"], strict=True):
            np.testing.assert_allclose(mean + owner, x.double().numpy() + unsent.numpy(), rtol=0, atol=1e-6)
        for parameter, second in zip(model.parameters(), saved["second"], strict=True):
            mean = world.comm.allreduce(optimizer.state[parameter]["exp_avg_sq"].double().numpy()) / world.size
            assert (mean > 0).all() == bool((second > 0).all())
            assert 0.3 < mean.sum() / float(second.sum()) < 3
        for a, x in zip(read_agreed_weights(optimizer, model), saved["x"], strict=True):
            assert world.nodes == 1 or torch.equal(a, x)
        for _ in run.progress([0] * 9, total=9, samples=1):
            compute_loss(model, *draw_batch(world.rank, run.step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    take_up_outer_momentum(world, directory)
    with owners_keeping_a_part():
        take_up_delayed(world, directory, saved)
    take_up_residuals_of_a_schedule(world, directory)
    take_up_masters(world, directory)


def take_up_delayed(world: World, directory: str, saved: dict[str, Any]) -> None:
    """Resume a run whose last exchange was not in the weights: nothing is lost or counted twice."""
    model, optimizer = run_until(world, f"{directory}/delayed", 6, delay=1)
    owners = sum_owed_by_owners(world, optimizer, model)
    assert any(unsent.any() for unsent in owners) == (saved["two_stage"] and world.nodes >= 8)
    for parameter, owner, total in zip(model.parameters(), owners, saved["delayed"], strict=True):
        mean = world.comm.allreduce(parameter.detach().double().numpy()) / world.size
        np.testing.assert_allclose(mean + owner, total.numpy(), rtol=0, atol=1e-6)
    optimizer.unwrap()
    model, optimizer = run_until(world, f"{directory}/delayed", 9, delay=1)
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def take_up_outer_momentum(world: World, directory: str) -> None:
    """Resume a run, and check that the momentum of the mean change stays the same on all nodes."""
    if world.nodes == 1:
        return  # without other nodes there is no outer step
    expected = torch.load(f"{directory}/momentum.pt", weights_only=True)
    model, optimizer = run_until(world, f"{directory}/diloco", 6, **DILOCO)
    for momentum, before in zip(sum_outer_momentum(world, model, optimizer), expected, strict=True):
        torch.testing.assert_close(momentum, before, rtol=1e-5, atol=1e-9)
        assert before.any()
    model, optimizer = run_until(world, f"{directory}/diloco", 10, **DILOCO)
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def build_scheduled(directory: str) -> tuple[nn.Module, topkube.DistributedOptimizer, Settings]:
    """Return a training that is sparse for three steps, then dense. Its weights move by the gradients."""
    model = build_network()
    optimizer = build_onebit(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        aggregation="hitopk",
        density=0.05,
        schedule=(Stage(3, "dense"),),
    )
    return model, optimizer, Settings(checkpoint_directory=f"{directory}/scheduled", checkpoint_every=100)


def leave_residuals_of_a_schedule(world: World, directory: str) -> None:
    """Write a checkpoint after the last sparse step, and beside it what was not sent."""
    model, optimizer, settings = build_scheduled(directory)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for _ in run.progress([0] * 3, total=3, samples=1):
            (0.01 * compute_loss(model, *draw_batch(world.rank, run.step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    pieces = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
    owed = [torch.from_numpy(total) for total in sum_over_ranks(world, pieces, model, 1.0)]
    if world.rank == 0:
        torch.save({"x": copy_weights(model), "owed": owed}, f"{directory}/scheduled.pt")
    optimizer.unwrap()


def take_up_residuals_of_a_schedule(world: World, directory: str) -> None:
    """Resume in another world: a dense step with gradients of zero moves the weights by what was owed."""
    saved = torch.load(f"{directory}/scheduled.pt", weights_only=True)
    model, optimizer, settings = build_scheduled(directory)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for _ in run.progress([0] * 5, total=5, samples=1):
            (0 * compute_loss(model, *draw_batch(world.rank, run.step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for weights, x, unsent in zip(copy_weights(model), saved["x"], saved["owed"], strict=True):
        np.testing.assert_allclose(weights.double(), x.double() - unsent, rtol=0, atol=1e-6)
    assert any(unsent.abs().max() > 1e-4 for unsent in saved["owed"])
    optimizer.unwrap()
