"""Cases of the all-reduce algorithms. Inputs are computed from (seed, rank), so every rank can compute the inputs of
all ranks."""

from __future__ import annotations

import functools
import threading
import time

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import topkube
from ranks.counted_messages import count_messages
from topkube import collectives
from topkube.algorithms import OWN, Family, Workload, find_algorithm
from topkube.algorithms.cost import count_wider_bytes
from topkube.collectives import Request, load, residual_length
from topkube.collectives.error_feedback import Residual
from topkube.collectives.overlapped import MOST_PIECE_BYTES, OverlappedAllReduce
from topkube.errors import ArgumentError, CollectiveError
from topkube.mpi_start import allow_long_messages
from topkube.telemetry import phases
from topkube.world import World

Array = npt.NDArray[np.generic]
TYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
UNIT = {np.dtype(np.float32): 2.0**-23, np.dtype(np.float16): 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2.0**-7}
"""The distance from 1 to the next number of each type."""
LENGTHS = [1, 2, 3, 5, 1000, 65537, 120_001]
WIRES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
IN_HOST_MEMORY = [algorithm for algorithm in OWN if not algorithm.needs_gpu]
ALGORITHMS = [algorithm.name for algorithm in IN_HOST_MEMORY]
EXACT = [algorithm.name for algorithm in IN_HOST_MEMORY if algorithm.family in (Family.DENSE, Family.SPARSE)]
"""The algorithms that leave nothing out at density 1."""
WITH_RESIDUAL = [algorithm.name for algorithm in IN_HOST_MEMORY if algorithm.residual is not None]
DENSE = [algorithm.name for algorithm in IN_HOST_MEMORY if not algorithm.compresses]


def draw_inputs(world: World, length: int, dtype: npt.DTypeLike = np.float32, seed: int = 0) -> list[Array]:
    """Return the arrays of all ranks. A few values are far larger than the others, as in gradients."""
    drawn = draw_values(length + 31 * (world.size - 1), seed)
    return [drawn[31 * rank : 31 * rank + length].astype(dtype) for rank in range(world.size)]


@functools.cache
def draw_values(length: int, seed: int) -> npt.NDArray[np.float32]:
    """Return independent values, of which each rank takes a part that begins elsewhere. Values of its own for each
    rank would take as long to draw as the all-reduces take."""
    x = np.random.default_rng([seed, length]).standard_normal(length, np.float32)
    return x * (1 + np.abs(x * x * x))


def assert_near(result: Array, expected: Array, dtype: np.dtype, ranks: int, what: str) -> None:
    """Check that `result` differs from `expected` by a few roundings of `dtype` at most."""
    bound = 2 * UNIT[dtype] * (ranks + 2) * max(1e-6, float(np.abs(expected).max()))
    worst = float(np.abs(result.astype(np.float64) - expected).max())
    assert worst <= bound, f"{what}: {worst} off, {bound} allowed"


def case_every_algorithm_matches_float64(world: World) -> None:
    for dtype in TYPES:
        for length in LENGTHS:
            arrays = draw_inputs(world, length, dtype)
            total = np.sum([array.astype(np.float64) for array in arrays], axis=0)
            for name in EXACT:
                for op, expected in [("sum", total), ("mean", total / world.size)]:
                    if np.abs(expected).max() > 6e4:
                        continue  # fp16 ends at 65504
                    x = arrays[world.rank].copy()
                    # At density 1 nothing is left out, so the sparse algorithms must agree as well.
                    returned = topkube.allreduce_(x, op=op, algorithm=name, density=1.0)
                    assert returned is x
                    assert_near(x, expected, dtype, world.size, f"{name} {op} {dtype} {length}")


def case_an_array_of_several_pieces_has_exact_sums(world: World) -> None:
    """The array is longer than a piece, so that pieces end inside a shard. Its sums are exact: the values are whole
    numbers."""
    count = np.arange(MOST_PIECE_BYTES // 4 + 12_345, dtype=np.int32)
    arrays = [(count % (97 + rank)).astype(np.float32) for rank in range(world.size)]
    for name in DENSE:
        x = arrays[world.rank].copy()
        topkube.allreduce_(x, op="sum", algorithm=name)
        assert (x == np.sum(arrays, axis=0)).all(), name


def case_arrays_overlap_and_arrive_in_order(world: World) -> None:
    """Arrays of several types and lengths, begun one after another, have the bits that they have one by one."""
    if world.nodes == 1:
        return
    hierarchical = load(find_algorithm("hierarchical"))
    lengths = [1, 700_001, 3, 0, 1_200_000, 64, 300_000]
    together = [
        draw_inputs(world, length, TYPES[i % len(TYPES)], seed=i)[world.rank].copy() for i, length in enumerate(lengths)
    ]
    alone = [x.copy() for x in together]
    for x in alone:
        topkube.allreduce_(x, algorithm="hierarchical")
    pieces, finished = OverlappedAllReduce(world), []
    for i, x in enumerate(together):
        call = hierarchical.enter(world, Request(x))
        pieces.begin(call, x, 1 / world.size, lambda i=i: finished.append(i))
        assert (pieces.advance() or 0.0) >= 0.0
    pieces.finish()
    assert pieces.take_finite()
    assert finished == list(range(len(lengths)))
    assert [x.tobytes() for x in together] == [x.tobytes() for x in alone]
    assert pieces.advance() is None


def case_an_array_that_overlaps_is_checked(world: World) -> None:
    """NaN in one array shows once; the next is clean."""
    if world.nodes == 1:
        return
    hierarchical, pieces = load(find_algorithm("hierarchical")), OverlappedAllReduce(world)
    for value in (np.nan, 1.0):
        x = np.ones(1000, np.float32)
        x[::7] = value if world.rank == world.size - 1 else 1.0
        pieces.begin(hierarchical.enter(world, Request(x)), x, 1 / world.size)
        pieces.finish()
        finite = pieces.take_finite()
        assert world.agree(finite) == (value == 1.0)


def case_same_inputs_same_bits_on_all_ranks(world: World) -> None:
    for dtype in TYPES:
        arrays = draw_inputs(world, 70_001, dtype, seed=1)
        for name in ALGORITHMS:
            bits = []
            for _ in range(2):
                x = arrays[world.rank].copy()
                topkube.allreduce_(x, algorithm=name, density=0.05)
                bits.append(x.tobytes())
            assert bits[0] == bits[1], f"{name} {dtype}: two runs differ"
            assert len(set(world.comm.allgather(hash_bits(bits[0])))) == 1, f"{name} {dtype}: ranks differ"


def case_dense_values_of_16_bits_are_sums_in_float32(world: World) -> None:
    """Each element is rounded twice, half the bytes travel between nodes, and all ranks receive the same bits."""
    for dense_wire, unit in (("bf16", 2**-8), ("fp16", 2**-11)):
        for length in (1, 70_001, 600_000):
            arrays = [np.clip(array, -100, 100) for array in draw_inputs(world, length, seed=7)]
            x = arrays[world.rank].copy()
            phases.current.take()
            topkube.allreduce_(x, algorithm="hierarchical", dense_wire=dense_wire)
            sent = float(world.sum_small(np.array([phases.current.take().inter_bytes], np.float64))[0])
            total, magnitudes = np.zeros(length), np.zeros(length)
            for array in arrays:
                total += array
                magnitudes += np.abs(array)
            smallest = 2.0**-24  # of fp16
            bound = (2 * unit * magnitudes / world.size + 2 * smallest) if world.nodes > 1 else 1e-5 * magnitudes + 1e-5
            assert (np.abs(x - total / world.size) <= bound).all(), f"{dense_wire} {length}"
            assert len(set(world.comm.allgather(hash_bits(x.tobytes())))) == 1, f"{dense_wire} {length}: ranks differ"
            wider = world.nodes * count_wider_bytes(2, length, world.nodes)  # partial sums among many nodes
            assert abs(sent - (world.nodes - 1) * x.nbytes - wider) <= 64 * world.size


def case_a_dense_value_beyond_16_bits_shows_as_not_finite(world: World) -> None:
    """The largest value of fp16 is 65504. The algorithm reports that the result is wrong."""
    x = np.full(5000, 1e6 if world.rank == 0 else 0.0, np.float32)
    finite = load(find_algorithm("hierarchical")).run(world, Request(x, "sum", dense_wire="fp16"))
    assert world.agree(finite) == (world.nodes == 1)


def case_a_sum_beyond_16_bits_shows_as_not_finite(world: World) -> None:
    """What the nodes send is finite, but its sum is not. A step with it would make weights infinite."""
    for name in ALGORITHMS:
        algorithm = find_algorithm(name)
        for value in (40_000.0, 0.0):
            x = np.full(3_000, value if world.rank < 2 else 0.0, np.float16)
            residual = Residual(residual_length(algorithm, world, x.size)) if algorithm.compresses else None
            finite = load(algorithm).run(world, Request(x, "sum", density=1.0, residual=residual))
            assert world.agree(finite) == world.agree(bool(np.isfinite(x).all())), f"{name} {value}"


def hash_bits(data: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(data)


def case_nothing_is_lost(world: World) -> None:
    """The sent entries plus all residuals are the sum of all inputs."""
    for name in WITH_RESIDUAL:
        for wire in WIRES:
            length = 9_999
            residual = collectives.new_residual(name, length)
            received, summed = np.zeros(length), np.zeros(length)
            for step in range(5):
                arrays = draw_inputs(world, length, seed=20 + step)
                summed += np.sum([array.astype(np.float64) for array in arrays], axis=0)
                x = arrays[world.rank].copy()
                topkube.allreduce_(x, op="sum", algorithm=name, density=0.02, wire=wire, residual=residual)
                received += x
            kept = np.zeros(length)
            for local_rank, current in world.comm.allgather((world.local_rank, residual.current)):
                if name == "naive":
                    kept += current
                elif local_rank < world.shards:
                    kept[length * local_rank // world.shards : length * (local_rank + 1) // world.shards] += current
            worst = float(np.abs(received + kept - summed).max())
            assert worst <= 1e-4 * np.abs(summed).max(), f"{name} {wire}: {worst} lost"
            is_exact = name in ("localsgd", "diloco") and wire == "fp32"
            assert bool(np.abs(kept).max()) != is_exact, f"{name}: no residual was kept, or something of exact values"


def case_a_plain_array_is_a_residual(world: World) -> None:
    length = 5_000
    plain = np.zeros(residual_length(find_algorithm("hitopk"), world, length), np.float32)
    proper = collectives.new_residual("hitopk", length)
    for step in range(3):
        x = draw_inputs(world, length, seed=30 + step)[world.rank]
        y = x.copy()
        topkube.allreduce_(x, density=0.01, residual=plain)
        topkube.allreduce_(y, density=0.01, residual=proper)
        assert x.tobytes() == y.tobytes()
        assert plain.tobytes() == proper.current.tobytes()


def case_algorithms_with_factors_refuse_a_plain_array_as_residual(world: World) -> None:
    """It has no room for the factors that the next call needs."""
    for name in ("powersgd", "acpsgd"):
        plain = np.zeros(residual_length(find_algorithm(name), world, 64), np.float32)
        with pytest.raises(ArgumentError, match="new_residual"):
            topkube.allreduce_(np.ones((8, 8), np.float32), algorithm=name, residual=plain)


def case_a_nan_anywhere_leaves_residuals_as_they_were(world: World) -> None:
    length = 4_001
    for name in WITH_RESIDUAL:
        for value in (np.nan, np.inf):
            for culprit in {0, world.size - 1}:
                residual = collectives.new_residual(name, length)
                topkube.allreduce_(draw_inputs(world, length, seed=40)[world.rank], algorithm=name, residual=residual)
                before = residual.current.tobytes()
                x = draw_inputs(world, length, seed=41)[world.rank]
                if world.rank == culprit:
                    x[length // 3] = value
                topkube.allreduce_(x, algorithm=name, residual=residual)
                assert residual.current.tobytes() == before, f"{name}: residual changed"
                assert not np.isfinite(x).all(), f"{name}: the value was lost"


def case_every_algorithm_reports_values_that_are_not_finite(world: World) -> None:
    for name in ALGORITHMS:
        for position in (0, 1_500, 2_999):
            x = draw_inputs(world, 3_000, seed=50)[world.rank]
            if world.rank == world.size - 1:
                x[position] = np.nan
            algorithm = find_algorithm(name)
            residual = Residual(residual_length(algorithm, world, x.size)) if algorithm.compresses else None
            assert not world.agree(load(algorithm).run(world, Request(x, density=0.1, residual=residual))), name


def case_mstopk_and_naive_choose_k(world: World) -> None:
    x = draw_inputs(world, 20_000, seed=60)[world.rank]
    topkube.allreduce_(x, algorithm="hitopk", density=0.01, selection="mstopk")
    assert 0 < np.count_nonzero(x) <= 200 * world.nodes
    y = draw_inputs(world, 20_000, seed=61)[world.rank]
    topkube.allreduce_(y, algorithm="naive", density=0.01)
    assert 200 <= np.count_nonzero(y) <= 200 * world.size


def case_bytes_are_counted(world: World) -> None:
    """A node of m sends 2(m-1)/m of the array to other nodes with the hierarchical algorithms, and far less with a
    sparse algorithm."""
    length = 1 << 18
    for name in ("hierarchical", "torus2d", "hitopk"):
        x = draw_inputs(world, length, seed=70)[world.rank]
        phases.current.take()
        topkube.allreduce_(x, algorithm=name, density=0.01)
        counts = phases.current.take()
        sent = float(world.sum_small(np.array([counts.inter_bytes], np.float64))[0]) / world.nodes
        bound = 2 * (world.nodes - 1) / world.nodes * x.nbytes
        if name == "hitopk":
            assert sent <= 0.02 * x.nbytes * (world.nodes - 1)
            assert (sent > 0) == (world.nodes > 1)
        else:
            assert abs(sent - bound) <= 64, f"{name}: {sent} bytes, the bound is {bound}"
        assert counts.dense_bytes == 2 * (world.size - 1) * x.nbytes // world.size


HEADER_SHARE = {"hitopk": 0.01, "gtopk": 0.01, "naive": 0.01, "topk1bit": 0.02, "sparseloco": 0.02}
"""The largest difference between declared bytes and messages, relative to the messages: headers, alignment and
estimated lengths of indices. For other algorithms it is 64 bytes per rank."""


def case_the_declared_bytes_are_those_of_the_messages(world: World) -> None:
    """The bytes of the messages, the bytes that the ranks count, and the declared bytes, by which `topkube plan`
    predicts steps, are the same. Only the bytes of `oktopk` depend on the values: at most 1.1 times those declared."""
    if world.nodes == 1 or len(set(map(len, world.node_ranks))) > 1:
        return
    side = 512
    workload = Workload(world.nodes, world.local_size, side * side, density=0.05, wire="bf16")
    for algorithm in IN_HOST_MEMORY:
        name, x = algorithm.name, draw_inputs(world, side * side, seed=71)[world.rank].reshape(side, side)
        phases.current.take()
        with count_messages(world) as counted:
            topkube.allreduce_(x, algorithm=name, density=0.05, wire="bf16")
        own = np.zeros((2, world.nodes))
        own[:, world.node] = phases.current.take().inter_bytes, counted.sent_bytes
        of_nodes, in_messages_of_nodes = world.sum_small(own.ravel()).reshape(own.shape)
        busiest = of_nodes.argmax()  # nodes that are left over in the tree of gtopk send less
        sent, in_messages = of_nodes[busiest], in_messages_of_nodes[busiest]
        declared = algorithm.traffic(workload).sent
        if name not in ("flat", "naive"):  # their messages go through the communicator of all ranks
            hash_bytes = 64 * world.size  # ranks also send hashes of their calls, which they do not count
            assert 0 <= in_messages - sent <= hash_bytes, (name, sent, in_messages)
        if name == "oktopk":
            assert 0.5 * declared <= sent <= 1.1 * declared, (name, sent, declared)
        else:
            allowed = HEADER_SHARE.get(name, 0.0) * sent + 64 * world.local_size * world.nodes
            assert abs(sent - declared) <= allowed, (name, sent, declared)


def case_ranks_agree_and_add_few_numbers(world: World) -> None:
    assert world.agree(True)
    assert not world.agree(world.rank != world.size - 1)
    values = np.array([world.rank + 0.5, 1.0])
    assert world.sum_small(values).tolist() == [sum(rank + 0.5 for rank in range(world.size)), world.size]


def case_a_message_may_have_more_bytes_than_mpi_counts(world: World) -> None:
    from mpi4py import MPI

    comm = allow_long_messages(MPI, world.comm, most_bytes=1000)
    for size in (1000, 1001, 1 << 20, (3 << 20) + 5):
        sent = np.random.default_rng(world.rank).integers(0, 256, size, np.uint8)
        arrived = np.zeros(size, np.uint8)
        before = (world.rank - 1) % world.size
        world.wait([comm.Irecv(arrived, before), comm.Isend(sent, (world.rank + 1) % world.size)], "a long message")
        assert (arrived == np.random.default_rng(before).integers(0, 256, size, np.uint8)).all()
    counts_all = MPI.Get_version()[0] >= 4  # Open MPI 5 has version 3.1
    used = [one for one in (world.comm, world.node_comm, world.cross_comm) if one is not None]
    assert all((type(one) is MPI.Intracomm) == counts_all for one in used)


def case_wrong_parameters_are_named(world: World) -> None:
    x = np.ones(10, np.float32)
    for wrong, word in [
        ({"algorithm": "hitopc"}, "hitopk"),
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"density": float("nan")}, "density"),
        ({"density": "0.5"}, "density is '0.5', which is not a number"),
        ({"density": None}, "density is None"),
        ({"algorithm": "powersgd", "matrix_rank": 1.5}, "matrix_rank is 1.5, which is not a whole number"),
        ({"algorithm": "powersgd", "matrix_rank": 4.0}, "matrix_rank is 4.0"),
        ({"op": "max"}, "mean, sum"),
        ({"wire": "int8"}, "bf16"),
        ({"dense_wire": "int8"}, "bf16"),
        ({"selection": "random"}, "mstopk"),
        ({"residual": np.zeros(999, np.float32)}, "residual"),
        ({"residual": x}, "array and residual overlap"),
    ]:
        with pytest.raises(ArgumentError, match=word):
            topkube.allreduce_(x, **wrong)
    for array in (np.ones(4, np.int32), np.ones((4, 4), np.float32).T[:, :2], [1.0, 2.0], np.ones(3, np.float64)):
        with pytest.raises(ArgumentError):
            topkube.allreduce_(array)
    assert (x == 1).all()


def case_a_second_thread_is_refused_while_the_first_is_in_a_call(world: World) -> None:
    if world.size == 1:
        return
    entered = world.calls
    if world.rank == 0:
        x = np.ones(1000, np.float32)
        first = threading.Thread(target=topkube.allreduce_, args=(x, "sum", "hierarchical"))
        first.start()
        while world.calls == entered:
            time.sleep(0.001)
        with pytest.raises(CollectiveError, match=r"rank 0: two threads.*new_world"):
            topkube.allreduce_(np.ones(1000, np.float32))
    world.agreement.Barrier()
    if world.rank == 0:
        first.join()
    else:
        x = topkube.allreduce_(np.ones(1000, np.float32), "sum", "hierarchical")
    assert (x == world.size).all()
    with pytest.raises(ArgumentError):
        topkube.allreduce_([1.0])
    # After an error, the world is free again.
    assert (topkube.allreduce_(np.ones(10, np.float32), algorithm="dense") == 1).all()


def case_tensors_are_reduced_in_place(world: World) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((3, 5), float(world.rank + 1), dtype=dtype)
        assert topkube.allreduce_(x, op="sum", algorithm="dense") is x
        assert x.tolist() == [[sum(range(1, world.size + 1))] * 5] * 3


def case_a_backward_that_needs_the_old_values_of_a_tensor_is_an_error(world: World) -> None:
    import torch

    x = torch.ones(4, requires_grad=True) * (world.rank + 1)
    loss = (x * x).sum()
    topkube.allreduce_(x, algorithm="dense")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():  # such a tensor has no version
        topkube.allreduce_(torch.ones(4), algorithm="dense")
