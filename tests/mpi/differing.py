"""Cases of failing.py in which all ranks call TopKube, and one of them differs: in the call, or in its arguments."""

from __future__ import annotations

import numpy as np
import torch

import topkube
from topkube import collectives
from topkube.collectives import Request
from topkube.collectives.all_reduce import load_by_name
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.world import World


def make_ones(length: int = 50_000, dtype: type = np.float32) -> np.ndarray:
    return np.ones(length, dtype)


def make_different_calls(world: World) -> None:
    if world.rank == 2:
        topkube.barrier()
    else:
        topkube.allgather(np.arange(3))


def reduce_numbers_of_different_types(world: World) -> None:
    topkube.reduce(1.0 if world.rank == 2 else 1)


def create_different_sub_worlds(world: World) -> None:
    topkube.new_world([0, 1] if world.rank == 2 else [0])


def reduce_lengths_that_differ_between_nodes(world: World) -> None:
    topkube.allreduce_(make_ones(1000 + world.node))


def reduce_lengths_that_differ_inside_a_node(world: World) -> None:
    topkube.allreduce_(make_ones(1000 + world.local_rank))


def reduce_a_small_array_against_a_large_one(world: World) -> None:
    """On some ranks, the greeting carries values."""
    topkube.allreduce_(make_ones(1000 if world.node == 0 else 3_000_000), algorithm="hierarchical")


def reduce_lengths_that_differ_between_nodes_on_a_device(world: World) -> None:
    engine = DeviceAllReduce(world, torch.device("cpu"))
    for length in (1000, 1000 + world.node):
        engine.begin(load_by_name("hierarchical"), Request(torch.ones(length)))
        engine.flush()


def reduce_arrays_of_different_types(world: World) -> None:
    topkube.allreduce_(make_ones(dtype=np.float16 if world.rank == 1 else np.float32))


def use_different_algorithms(world: World) -> None:
    topkube.allreduce_(make_ones(), algorithm="flat" if world.rank == 0 else "hitopk")


def use_different_densities(world: World) -> None:
    topkube.allreduce_(make_ones(), density=0.01 if world.rank == world.size - 1 else 0.02)


def use_different_shapes(world: World) -> None:
    shape = (4, 6) if world.rank == 0 else (6, 4)
    topkube.allreduce_(make_ones(24).reshape(shape), algorithm="powersgd", matrix_rank=2)


def use_a_residual_on_one_rank(world: World) -> None:
    residual = collectives.new_residual("hitopk", 1000)
    topkube.allreduce_(make_ones(1000), residual=residual if world.rank == 0 else None)


def use_densities_that_differ_in_the_last_digits(world: World) -> None:
    topkube.allreduce_(make_ones(1000), density=0.01 if world.rank == 0 else 0.01 + 1e-9)


def gather_types_with_long_names(world: World) -> None:
    fields = [f"layer_{number:03}" for number in range(9)] + ["x" if world.rank == 0 else "y"]
    topkube.allgather(np.zeros(1, [(field, np.float32) for field in fields]))
