"""Cases of the calls for scripts other than training, in the world of all ranks and in sub-worlds. Every rank can
compute the arguments of all ranks, and compares results with those of one process."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
import torch

import topkube
from ranks.allreduce import EXACT, assert_near, draw_inputs
from topkube import collectives, mpi_start
from topkube.collectives.coordination import calls, ordered
from topkube.errors import ArgumentError, WorldError
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import Agreement, open_agreement
from topkube.world import World

LARGEST = np.iinfo(np.int64).max


def case_a_barrier_waits_for_all_ranks(world: World) -> None:
    topkube.barrier()
    reached = world.comm.allgather(True)
    topkube.barrier()
    assert all(reached)


def case_reduced_integers_are_exact(world: World) -> None:
    total = sum(10**15 + rank for rank in range(world.size))
    assert topkube.reduce(10**15 + world.rank) == total
    assert topkube.reduce(10**15 + world.rank, "mean") == total / world.size
    assert topkube.reduce(world.rank, "max") == world.size - 1
    assert topkube.reduce(-world.rank, "min") == 1 - world.size
    assert topkube.reduce(world.rank == 0) == 1
    assert topkube.reduce(world.rank == 0, "min") is (world.size == 1)
    big = np.array([LARGEST if world.rank == 0 else -LARGEST, -3, 2**40 + world.rank])
    expected = [LARGEST - (world.size - 1) * LARGEST, -3 * world.size, sum(2**40 + r for r in range(world.size))]
    if world.size <= 2:
        result = topkube.reduce(big)
        assert result.dtype == np.int64
        assert result.tolist() == expected
    if world.size > 1:
        with pytest.raises(ArgumentError, match="the sum exceeds int64"):
            topkube.reduce(np.array([1, LARGEST]))
    with pytest.raises(ArgumentError, match=str(2**63)):
        topkube.reduce(2**63)


def case_reduced_numbers_have_the_same_bits_on_all_ranks(world: World) -> None:
    """Long arrays are sent from rank to rank, in pieces. They have the same bits too."""
    for length in (0, 1, 5, 70_001):
        arrays = [array.astype(np.float64) for array in draw_inputs(world, length)]
        total = np.zeros(length)
        for array in arrays:
            total += array
        for limit, piece in ((1 << 18, 1 << 20), (0, 999)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ordered, "GATHERED", limit)
                patch.setattr(ordered, "_PIECE", piece)
                assert np.array_equal(topkube.reduce(arrays[world.rank]), total)
                assert np.array_equal(topkube.reduce(arrays[world.rank], "mean"), total / world.size)
                assert np.array_equal(topkube.reduce(arrays[world.rank], "max"), np.max(arrays, axis=0))
                assert np.array_equal(topkube.reduce(arrays[world.rank], "min"), np.min(arrays, axis=0))
    assert topkube.reduce(0.1, "mean") == pytest.approx(0.1)
    assert np.isnan(topkube.reduce(np.nan if world.rank == 0 else 1.0, "max"))


def case_reduced_values_keep_their_kind(world: World) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3) + world.rank
    mean = topkube.reduce(tensor, "mean")
    assert (mean.dtype, mean.shape) == (torch.float32, (2, 3))
    torch.testing.assert_close(mean, torch.arange(6.0).reshape(2, 3) + (world.size - 1) / 2)
    assert tensor[0, 0] == world.rank  # not changed
    for value, op, kind in [
        (torch.tensor(True), "sum", torch.int64),
        (torch.tensor(3, dtype=torch.int32), "mean", torch.float64),
        (torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), "sum", torch.bfloat16),
        (torch.tensor([1], dtype=torch.uint8), "max", torch.uint8),
    ]:
        assert topkube.reduce(value, op).dtype == kind
    assert topkube.reduce(np.float32(2), "sum").dtype == np.float32
    assert topkube.reduce(np.arange(4, dtype=np.int16).reshape(2, 2)[:, ::-1], "sum").dtype == np.int64
    assert isinstance(topkube.reduce(1), int)
    assert isinstance(topkube.reduce(1, "mean"), float)
    for value in ("text", [1, 2], np.array(["x"]), np.array([1j]), torch.tensor([1j]), None):
        with pytest.raises(ArgumentError, match="reduce takes numbers"):
            topkube.reduce(value)
    with pytest.raises(ArgumentError, match="choose one of sum, mean, min, max"):
        topkube.reduce(1, "product")


def case_arrays_of_different_lengths_are_joined(world: World) -> None:
    def build_part(rank: int) -> np.ndarray:
        return np.full(((rank * 7) % 5, 3), rank, np.int32)

    expected = np.concatenate([build_part(rank) for rank in range(world.size)])
    for chunk in (1 << 26, 16 * world.size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "CHUNK", chunk)
            joined = topkube.allgather(build_part(world.rank))
            assert joined.dtype == np.int32
            assert np.array_equal(joined, expected)
            tensor = topkube.allgather(torch.from_numpy(build_part(world.rank)).bfloat16())
            assert torch.equal(tensor, torch.from_numpy(expected).bfloat16())
    assert topkube.allgather(world.rank).tolist() == list(range(world.size))
    assert topkube.allgather(torch.tensor(2.5)).tolist() == [2.5] * world.size
    assert topkube.allgather(np.zeros((0, 2))).shape == (0, 2)
    with pytest.raises(ArgumentError, match="gather_object"):
        topkube.allgather(["a", None])


def case_views_that_negate_or_conjugate_are_read_as_torch_reads_them(world: World) -> None:
    complex_numbers = torch.complex(torch.ones(3), torch.arange(3.0) + world.rank).conj()
    parts = [torch.complex(torch.ones(3), -torch.arange(3.0) - rank) for rank in range(world.size)]
    assert torch.equal(topkube.allgather(complex_numbers), torch.cat(parts))
    assert torch.equal(topkube.allgather(complex_numbers.imag), torch.cat([part.imag for part in parts]))
    for dtype in (torch.float64, torch.float32, torch.int64):
        negative = torch._neg_view(torch.arange(3).to(dtype))
        assert topkube.reduce(negative, "max").tolist() == [0, -1, -2]
        assert topkube.allgather(negative).tolist() == [0, -1, -2] * world.size


def case_masked_arrays_are_refused(world: World) -> None:
    masked = np.ma.MaskedArray(np.ones(3, np.float32), mask=[0, 1, 0])
    for call in (topkube.allreduce_, topkube.allgather, topkube.reduce):
        with pytest.raises(ArgumentError, match="masked"):
            call(masked)
    assert topkube.reduce(1) == world.size  # the refused calls do not count


def case_large_objects_are_sent_in_pieces(world: World) -> None:
    def build_payload(rank: int) -> dict[str, object]:
        return {"rank": rank, "text": "x" * 3000 * rank, "array": np.arange(rank)}

    for chunk in (1 << 26, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "CHUNK", chunk)
            for root in range(world.size):
                received = topkube.broadcast_object(build_payload(root) if world.rank == root else None, root)
                assert (received["rank"], len(received["text"])) == (root, 3000 * root)
                gathered = topkube.gather_object(build_payload(world.rank), root)
                assert (gathered is None) == (world.rank != root)
                if gathered is not None:
                    assert [(item["rank"], len(item["text"])) for item in gathered] == [
                        (rank, 3000 * rank) for rank in range(world.size)
                    ]


def case_objects_that_cannot_be_pickled_are_refused_on_all_ranks(world: World) -> None:
    last = world.size - 1
    with pytest.raises(ArgumentError, match=f"the object of rank {last} cannot be pickled"):
        topkube.broadcast_object(lambda: None, root=last)
    with pytest.raises(ArgumentError, match=f"the object of rank {last} cannot be pickled"):
        topkube.gather_object(threading.Lock() if world.rank == last else 1)
    with pytest.raises(ArgumentError, match=f"pass a rank from 0 to {last}"):
        topkube.broadcast_object(1, root=world.size)
    topkube.barrier()  # the world still works


def case_calls_may_be_made_while_gradients_are_exchanged(world: World) -> None:
    work = np.ones(300_000, np.float32)
    futures = [
        communication_thread.submit(lambda: topkube.allreduce_(work.copy(), op="sum", algorithm="hierarchical"))
        for _ in range(5)
    ]
    for number in range(20):
        assert topkube.reduce(number) == number * world.size
        assert topkube.broadcast_object(number if world.rank == 0 else None) == number
    for future in futures:
        assert (future.result() == world.size).all()


def check_all_calls(world: World | None) -> None:
    """Check every call in `world`; return at once if `world` is None."""
    if world is None:
        return
    for name in EXACT:
        for length in (3, 1000, 65537):
            arrays = [draw_input(world.members[rank], length) for rank in range(world.size)]
            x = arrays[world.rank].copy()
            topkube.allreduce_(x, algorithm=name, density=1.0, world=world)
            assert_near(x, np.mean(arrays, axis=0, dtype=np.float64), x.dtype, world.size, f"{name} {length}")
    residual = collectives.new_residual("hitopk", 1000, world=world)
    topkube.allreduce_(draw_input(0, 1000).copy(), residual=residual, density=0.1, world=world)
    for name in ("int8", "onebit"):
        x = draw_input(0, 65537)
        topkube.allreduce_(x, algorithm=name, residual=collectives.new_residual(name, len(x), world=world), world=world)
        assert (np.abs(x - draw_input(0, len(x))) < (0.1 if name == "int8" else 5)).all(), name
    assert topkube.reduce(world.members[world.rank], world=world) == sum(world.members)
    assert topkube.allgather(world.rank, world=world).tolist() == list(range(world.size))
    assert topkube.broadcast_object(world.members[world.rank], world=world) == world.members[0]
    assert open_agreement(world) is open_agreement(world)
    assert open_agreement(world).sum([1.0, world.rank]).tolist() == [world.size, sum(range(world.size))]


def draw_input(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng([9, rank, length]).standard_normal(length).astype(np.float32)


def case_sub_worlds_work_like_worlds(world: World) -> None:
    """Sub-worlds inside nodes and between nodes, of uneven nodes, in another order and of one rank. Disjoint
    sub-worlds work at the same time."""
    nodes = [topkube.new_world(ranks) for ranks in world.node_ranks]
    for number, sub in enumerate(nodes):
        assert (sub is not None) == (number == world.node)
    own = nodes[world.node]
    assert own is not None
    assert (own.size, own.rank, own.nodes, own.node_ranks) == (
        world.local_size,
        world.local_rank,
        1,
        (tuple(range(world.local_size)),),
    )
    check_all_calls(own)
    across = [topkube.new_world([ranks[i] for ranks in world.node_ranks]) for i in range(world.shards)]
    own_world = next((sub for sub in across if sub is not None), None)
    if world.local_rank < world.shards:
        assert own_world is not None
        assert (own_world.size, own_world.nodes, own_world.local_size, own_world.shards) == (
            world.nodes,
            world.nodes,
            1,
            1,
        )
    check_all_calls(own_world)
    backwards = topkube.new_world(range(world.size)[::-1])
    assert backwards is not None
    assert (backwards.rank, backwards.members[0]) == (world.size - 1 - world.rank, world.size - 1)
    check_all_calls(backwards)
    # The first rank of node 0 is before those of node 1, and its other ranks are after them.
    first, rest = world.node_ranks[0][:1], world.node_ranks[0][1:]
    around = topkube.new_world([*first, *itertools.chain(*world.node_ranks[1:]), *rest])
    assert around is not None
    assert around.cross_comm is None or around.cross_comm.rank == around.node
    check_all_calls(around)
    check_all_calls(topkube.new_world([0]))
    check_all_calls(topkube.new_world(range(max(1, world.size - 1))))  # uneven, if the nodes of the world are even
    check_all_calls(world)
    topkube.barrier()


def case_a_sub_world_of_unknown_ranks_is_refused(world: World) -> None:
    for ranks in ([], [0, 0], [world.size], [-1]):
        with pytest.raises(ArgumentError, match="pass each rank once"):
            topkube.new_world(ranks)


def case_an_agreement_of_many_numbers_adds_them_in_rank_order(world: World) -> None:
    """Every rank passes one number per rank: at 4,096 ranks all rows would be 400 MB."""
    own = draw_inputs(world, 40_000, np.float64)
    total = np.zeros(40_000)
    for row in own:
        total += row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "GATHERED", 100)
        assert np.array_equal(Agreement(world).sum(own[world.rank].tolist()), total)


def case_a_world_that_does_not_fit_into_shared_memory_is_refused_on_all_ranks(world: World) -> None:
    """A rank that writes to a full /dev/shm would be killed by SIGBUS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_start, "count_free_bytes", lambda: 20 << 20)
        small = topkube.new_world(range(world.size))
        check_all_calls(small)
        assert small is not None
        if world.local_size > 1:
            assert small.window.size < world.window.size
        patch.setattr(mpi_start, "count_free_bytes", lambda: 4 << 20 if world.rank == 0 else 1 << 30)
        if len(world.node_ranks[0]) > 1:
            with pytest.raises(WorldError, match=r"has 4\.0 MiB free on a node.*shm-size"):
                topkube.new_world(range(world.size))
    check_all_calls(topkube.new_world(range(world.size)))


def case_a_rank_that_can_open_no_more_files_says_so_in_a_long_wait(world: World) -> None:
    """Other ranks would wait until the deadline for their connections to it."""
    limits, said, done = resource.getrlimit(resource.RLIMIT_NOFILE), io.StringIO(), time.monotonic() + 0.5
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr("topkube.world.world.LONG_WAIT_SECONDS", 0.0)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            world.wait_until(lambda: time.monotonic() > done, "a wait")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lines = said.getvalue().splitlines()
    assert len(lines) == 1  # the wait has checked several times
    assert f"warning: rank {world.members[world.rank]} has {free} files and connections open" in lines[0]


def case_a_forked_child_takes_no_part(world: World) -> None:
    """It has the connections of the rank, and would take its messages."""
    calls_of_child = (topkube.barrier, lambda: topkube.reduce(1), lambda: topkube.allreduce_(np.ones(3, np.float32)))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for call in calls_of_child:
            try:
                call()
                os.write(writing, b"returned\n")
            except WorldError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    assert len(lines) == len(calls_of_child)
    assert all(f"a child of rank {world.members[world.rank]}" in line for line in lines), lines
    topkube.barrier()
    assert topkube.reduce(1) == world.size
