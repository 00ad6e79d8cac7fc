"""Cases of the end of worlds: what MPI holds for them is freed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import topkube
from topkube.errors import ArgumentError, WorldError
from topkube.training.ranks.agreement import open_agreement
from topkube.world import World

MANY = 330
"""More worlds than MPICH has room for at the same time."""


def check_world(world: World | None) -> None:
    x = topkube.allreduce_(np.ones(1000, np.float32), "sum", "dense", world=world)
    assert (x == topkube.size()).all()


def case_a_closed_sub_world_makes_room_for_another(world: World) -> None:
    for _ in range(MANY):
        sub = topkube.new_world(range(world.size))
        assert sub is not None
        check_world(sub)
        sub.close()
    for use in (sub.close, lambda: check_world(sub), lambda: topkube.barrier(world=sub)):
        with pytest.raises(WorldError, match="this world was closed"):
            use()
    with pytest.raises(ArgumentError, match=r"topkube\.shutdown"):
        world.close()
    check_world(world)


def case_too_many_worlds_are_a_typed_error(world: World) -> None:
    from mpi4py import MPI

    if (
        world.largest_node > 1 or "MPICH" not in MPI.Get_library_version()
    ):  # no shared memory for so many; no such limit
        return
    worlds = list[World | None]()
    with pytest.raises(WorldError, match="too many worlds"):
        worlds.extend(topkube.new_world(range(world.size)) for _ in range(MANY))
    assert len(worlds) > 100
    for sub in worlds:
        assert sub is not None
        sub.close()
    check_world(topkube.new_world(range(world.size)))


def case_a_world_can_be_created_again_many_times(world: World) -> None:
    for _ in range(MANY):
        topkube.new_world(range(topkube.size()))
        topkube.shutdown()
        check_world(topkube.init())
    with pytest.raises(WorldError, match="this world was closed"):
        check_world(world)


def case_a_world_can_be_created_again_between_trainings(world: World) -> None:
    for _ in range(3):
        model = torch.nn.Linear(64, 64)
        topkube.broadcast_parameters(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = topkube.DistributedOptimizer(sgd, model.named_parameters(), aggregation="dense", overlap="dear")
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert open_agreement(topkube.world.current()).sum([1.0]) == topkube.size()
        optimizer.unwrap()
        topkube.shutdown()
        topkube.init()
