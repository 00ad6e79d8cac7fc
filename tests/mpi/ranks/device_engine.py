"""All-reduces of CUDA tensors (collectives/device/) on CPU tensors: what each returns, and what it refuses. Inside the
node, gloo replaces NCCL; the other code is the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import topkube
from topkube.algorithms import find_algorithm
from topkube.bench import allreduce as bench
from topkube.bench.bench_arrays import DeviceArrays
from topkube.collectives import Request, load
from topkube.collectives.device import rates
from topkube.collectives.device.node_group import NodeGroup
from topkube.collectives.device.pipeline import MOST_TRAVELLING, DeviceAllReduce
from topkube.collectives.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.world import World

CPU = torch.device("cpu")


def case_tensors_under_way_keep_apart(world: World) -> None:
    """Tensors of all sizes are reduced one after another, dense, sparse and in two stages. Each equals a sum on the
    host."""
    engine = DeviceAllReduce(world, CPU)
    travelling = 1 if world.nodes == 1 else MOST_TRAVELLING
    assert len(engine.slots) == travelling + 1  # a buffer for each of them, and for the tensor that begins
    sizes, dtypes = (1, 2, 3, 7, 1000, 70_001), (torch.float32, torch.bfloat16)
    done: list[int] = []
    tensors, expected_sums = [], []
    for number, (size, dtype) in enumerate(itertools.product(sizes, dtypes)):
        rng = np.random.default_rng(number)
        everyone = torch.from_numpy(rng.integers(-8, 9, (world.size, size)).astype(np.float32))
        name = ("hitopk", "hierarchical", "int8")[number % 3]
        if name == "int8":  # every sum is a multiple of the scale of its block
            everyone = (127 * everyone[0].sign()).repeat(world.size, 1)
        tensors.append(everyone[world.rank].to(dtype))
        expected_sums.append(everyone.sum(0).to(dtype).float())
        engine.begin(
            load(find_algorithm(name)),
            Request(tensors[-1], "sum", density=1.0),
            finished=lambda number=number: done.append(number),
        )
        assert len(done) == max(0, number + 1 - travelling)
    assert engine.flush()
    assert done == list(range(len(tensors)))
    for tensor, expected in zip(tensors, expected_sums, strict=True):
        assert torch.equal(tensor.float(), expected), tensor


def case_the_ranks_of_a_node_leave_no_file_behind(world: World) -> None:
    group = NodeGroup(world, CPU)
    topkube.barrier()
    assert group.size == 1 or not group.meeting_file.parent.exists()
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    group.close()
    assert tensor.tolist() == [world.local_size] * 3


def case_a_sparse_sum_has_the_bits_of_the_path_for_host_memory(world: World) -> None:
    for size, wire, residual in ((5000, "bf16", True), (70_003, "fp32", False)):
        rng = np.random.default_rng(world.rank)
        host_array = rng.standard_normal(size).astype(np.float32)
        tensor = torch.from_numpy(host_array.copy())
        first = topkube.collectives.new_residual("hitopk", size) if residual else None
        length = len(first) if first is not None else 0
        second = Residual(length, device=CPU) if residual else None
        engine = DeviceAllReduce(world, CPU)
        for _ in range(3):
            topkube.allreduce_(host_array, "mean", "hitopk", 0.02, wire, residual=first)
            engine.begin(load(find_algorithm("hitopk")), Request(tensor, "mean", 0.02, wire, residual=second))
            assert engine.flush()
            if second is not None:
                second.accept()
                second.commit()
        if max(len(ranks) for ranks in world.node_ranks) <= 2:
            assert torch.equal(torch.from_numpy(host_array), tensor)
            if first is not None and second is not None:
                assert torch.equal(torch.from_numpy(first.current), second.current)


def case_integers_have_the_bits_of_the_path_for_host_memory(world: World) -> None:
    """With residuals, over several exchanges, also where some nodes own no block. Two tensors are under way at a
    time."""
    for name, sizes in (("int8", (5000, 70_003)), ("int4", (70_003, 130)), ("int3", (70_003, 515))):
        all_reduce, engine = load(find_algorithm(name)), DeviceAllReduce(world, CPU)
        rng = np.random.default_rng(world.rank)
        host_arrays = [rng.standard_normal(size).astype(np.float32) for size in sizes]
        tensors = [torch.from_numpy(array.copy()) for array in host_arrays]
        first = [topkube.collectives.new_residual(name, size) for size in sizes]
        second = [Residual(len(residual), device=CPU) for residual in first]
        for _ in range(3):
            for array, residual in zip(host_arrays, first, strict=True):
                topkube.allreduce_(array, "mean", name, residual=residual)
            for tensor, residual in zip(tensors, second, strict=True):
                engine.begin(all_reduce, Request(tensor, "mean", residual=residual))
            assert engine.flush()
            for residual in second:
                residual.accept()
                residual.commit()
        for array, tensor, host_residual, residual in zip(host_arrays, tensors, first, second, strict=True):
            assert torch.equal(torch.from_numpy(array), tensor), name
            assert torch.equal(torch.from_numpy(host_residual.current), residual.current), name


def case_dense_values_of_16_bits_have_the_bits_of_the_path_for_host_memory(world: World) -> None:
    for dense_wire in ("bf16", "fp16"):
        host_array = np.random.default_rng(world.rank).standard_normal(70_003).astype(np.float32)
        tensor = torch.from_numpy(host_array.copy())
        topkube.allreduce_(host_array, algorithm="hierarchical", dense_wire=dense_wire)
        engine = DeviceAllReduce(world, CPU)
        engine.begin(load(find_algorithm("hierarchical")), Request(tensor, "mean", dense_wire=dense_wire))
        assert engine.flush()
        if max(len(ranks) for ranks in world.node_ranks) <= 2:
            assert torch.equal(torch.from_numpy(host_array), tensor)
        else:
            torch.testing.assert_close(torch.from_numpy(host_array), tensor, rtol=2**-6, atol=1e-3)


def case_nccl_between_nodes_equals_the_sum_on_the_host(world: World) -> None:
    """gloo takes the place of NCCL here: the same calls of torch.distributed, on CPU tensors."""
    engine, reduced = DeviceAllReduce(world, CPU), []
    names = ("nccl", "hierarchical-nccl", "hitopk", "hierarchical")
    for number, (size, dtype) in enumerate(itertools.product((1, 3, 1000, 70_001), (torch.float32, torch.bfloat16))):
        rng = np.random.default_rng(number)
        everyone = torch.from_numpy(rng.integers(-8, 9, (world.size, size)).astype(np.float32))
        for name in names:
            tensor = everyone[world.rank].to(dtype, copy=True)
            engine.begin(load(find_algorithm(name)), Request(tensor, "sum", density=1.0))
            reduced.append((name, tensor, everyone.sum(0)))
    assert engine.flush()
    for name, tensor, expected in reduced:
        assert torch.equal(tensor.float(), expected), name
    groups = [name for name in world.cache if "group of" in name]
    assert len(groups) == (0 if world.nodes == 1 else 2 if world.cross_comm is not None else 1), groups


def case_the_link_of_nccl_is_measured_once_for_auto(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "_ELEMENTS", 4096)
        engine = DeviceAllReduce(world, CPU)
        assert rates.measure_nccl_link(engine) is None  # no GPU
        rate = rates.measure_link(engine, find_algorithm("nccl"))
    assert rate > 0 if world.nodes > 1 else rate == 0


def case_ranks_agree_through_the_groups_of_the_last_algorithm_only(world: World) -> None:
    """A rank without a shard takes part in the first algorithm between nodes, and not in the second."""
    engine = DeviceAllReduce(world, CPU)
    for name, poison in itertools.product(("nccl", "hierarchical-nccl", "nccl"), (1.0, torch.nan)):
        x = torch.ones(50)
        if world.rank == world.size - 1:
            x[:] = poison
        engine.begin(load(find_algorithm(name)), Request(x))
        assert engine.flush_undecided().read() == (poison != 1.0), name


def case_the_benchmark_compares_with_the_peer_of_the_device(world: World) -> None:
    arrays = DeviceArrays(world, CPU)
    names = bench.list_names("", arrays)
    assert {"nccl", "hierarchical-nccl", "hitopk", "peer: gloo"} <= set(names)
    assert "naive" not in names
    for dtype in ("fp32", "bf16"):
        report = bench.measure(world, 20_000, names, 0.01, "fp32", dtype, 1, arrays)
        if world.rank == 0:
            rows = {row["algorithm"]: row for row in report.rows}
            assert set(rows) == set(names)
            wrong = [(name, dtype, row["error"]) for name, row in rows.items() if not row["right"]]
            assert not wrong, wrong
            assert rows["peer: gloo"]["inter_mb"] is None


def case_values_that_are_not_finite_are_reported(world: World) -> None:
    engine = DeviceAllReduce(world, CPU)
    for name in ("hierarchical", "hitopk", "int8", "int4", "int3", "nccl", "hierarchical-nccl"):
        for poison in (torch.nan, torch.inf):
            x = torch.ones(3000)
            if world.rank == 0:
                x[::7] = poison
            engine.begin(load(find_algorithm("hierarchical")), Request(torch.ones(50)))
            engine.begin(load(find_algorithm(name)), Request(x, density=0.5))
            finite = engine.flush()
            assert not topkube.world.current().agree(finite)
            engine.begin(load(find_algorithm(name)), Request(torch.ones(50)))
            assert engine.flush()


def case_algorithms_of_host_memory_are_refused(world: World) -> None:
    with pytest.raises(ArgumentError, match=r"naive works on CPU tensors.*hitopk, int8, int4, int3 on a GPU"):
        DeviceAllReduce(world, CPU).begin(load(find_algorithm("naive")), Request(torch.ones(3)))
