"""The path of CUDA tensors (collectives/device/) on CPU tensors. Inside the node, gloo replaces NCCL; the other code
is the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import topkube
from ranks.training import gradients
from ranks.training.scene import (
    are_equal_on_all_ranks,
    build_network,
    build_optimizer,
    build_plain_sgd,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)
from topkube.algorithms import find_algorithm
from topkube.bench import allreduce as bench
from topkube.bench.bench_arrays import DeviceArrays
from topkube.collectives import Request, load
from topkube.collectives.device import rates
from topkube.collectives.device.pipeline import MOST_TRAVELLING, DeviceAllReduce
from topkube.collectives.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.training.optimizers import parallel_tensor
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.parallel_tensor import compute_norms
from topkube.world import World

CPU = torch.device("cpu")


@contextmanager
def exchange_through_torch() -> Iterator[None]:
    """Let torch.distributed exchange data within nodes, as on GPUs, instead of shared memory."""
    variable = Settings.__dataclass_fields__["node_exchange"].metadata["variable"]
    os.environ[variable] = "torch"
    try:
        yield
    finally:
        del os.environ[variable]


def case_training_equals_one_process(world: World) -> None:
    with exchange_through_torch():
        gradients.case_dense_equals_one_process(world)
        gradients.case_hitopk_that_sends_all_equals_one_process(world)


def case_steps_that_are_not_finite_are_skipped(world: World) -> None:
    with exchange_through_torch():
        gradients.case_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(world)


def case_error_feedback_loses_nothing(world: World) -> None:
    with exchange_through_torch():
        gradients.case_error_feedback_loses_nothing(world)


def case_gradients_accumulate(world: World) -> None:
    with exchange_through_torch():
        gradients.case_no_sync_accumulates(world)


def case_training_takes_the_same_steps_as_through_shared_memory(world: World) -> None:
    """If a node has two ranks, the bits are equal, because the order of two numbers does not change their sum."""
    results = []
    for selection in ("topk", "mstopk"):
        for through_torch in (False, True):
            model = build_network()
            with exchange_through_torch() if through_torch else contextlib.nullcontext():
                optimizer = build_optimizer(
                    model, build_sgd, aggregation="hitopk", density=0.03, wire="bf16", selection=selection,
                    bucket_bytes=4096,
                )  # fmt: skip
            assert (optimizer._backward.exchange.on_device is not None) == through_torch
            for step in range(8):
                x, y = draw_samples(8 * topkube.size(), step)
                compute_loss(model, take_own_part(x), take_own_part(y)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert are_equal_on_all_ranks(copy_weights(model))
            results.append(copy_weights(model))
        pairs = zip(results[-2], results[-1], strict=True)
        if max(len(ranks) for ranks in world.node_ranks) <= 2:
            assert all(torch.equal(a, b) for a, b in pairs)
        else:
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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
    for name, sizes in (("int8", (5000, 70_003)), ("int4", (70_003, 130))):
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


def case_training_with_integers_follows_dense_training(world: World) -> None:
    trained = {}
    for name in ("dense", "int8", "int4"):
        model = build_network()
        with exchange_through_torch():
            optimizer = build_optimizer(model, build_sgd, aggregation=name, bucket_bytes=4096)
        assert optimizer._backward.exchange.on_device is not None
        for step in range(6):
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert are_equal_on_all_ranks(copy_weights(model))
        trained[name] = torch.cat([weight.reshape(-1) for weight in copy_weights(model)])
    moved = (trained["dense"] - torch.cat([w.reshape(-1) for w in copy_weights(build_network())])).norm()
    for name, share in (("int8", 0.02), ("int4", 0.2)):
        difference = (trained[name] - trained["dense"]).norm()
        assert difference < share * moved, (name, difference / moved)


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


def case_training_over_nccl_equals_dense_training(world: World) -> None:
    results = []
    for name in ("hierarchical", "nccl", "hierarchical-nccl"):
        model = build_network()
        with exchange_through_torch():
            optimizer = build_optimizer(model, build_sgd, aggregation=name)
        for step in range(3):
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.unwrap()
        assert are_equal_on_all_ranks(copy_weights(model))
        results.append(copy_weights(model))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def case_nccl_without_a_gpu_is_refused(world: World) -> None:
    for name in ("nccl", "hierarchical-nccl"):
        with pytest.raises(ArgumentError, match=f"the algorithm {name} reduces gradients on GPUs only.*algorithm auto"):
            build_optimizer(build_network(), build_sgd, aggregation=name)
        with pytest.raises(ArgumentError, match=r"this array is in host memory.*choose the algorithm dense"):
            topkube.allreduce_(np.ones(5, np.float32), algorithm=name)
    topkube.barrier()


def case_the_link_of_nccl_is_measured_once_for_auto(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "_ELEMENTS", 4096)
        engine = DeviceAllReduce(world, CPU)
        assert rates.measure_nccl_link(engine) is None  # no GPU
        rate = rates.measure_link(engine, find_algorithm("nccl"))
    assert rate > 0 if world.nodes > 1 else rate == 0


def case_the_device_decides_which_steps_all_ranks_skip(world: World) -> None:
    """The steps and the weights are those that the hosts decide, also if some hosts read the decision early."""
    rank_with_nan = {0: world.size - 1, 2: 0, 3: world.size - 1, 6: 0}  # by step
    names = ["nccl", "hierarchical-nccl"] + ["dense"] * (world.nodes == 1)
    adam = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    for name, make in itertools.product(names, (adam, functools.partial(torch.optim.SGD, lr=0.01, fused=True))):
        results = []
        for check in ("host", "device"):
            model = build_network()
            settings = Settings(node_exchange="torch", finite_check=check, check_weights_every=2)
            optimizer = build_optimizer(model, make, aggregation=name, settings=settings)
            left_to_device = 0
            for step in range(8):
                x, y = draw_samples(8 * topkube.size(), step)
                before = copy_weights(model)
                loss = compute_loss(model, take_own_part(x), take_own_part(y))
                if rank_with_nan.get(step) == world.rank:
                    loss = loss * torch.nan
                loss.backward()
                left_to_device += optimizer._backward.gradients.decisions.is_undecided
                if step == 3 and world.rank == 0:
                    assert optimizer.skipped_steps == 3
                optimizer.step()
                if step == 6 and world.rank == world.size - 1:
                    assert optimizer.steps == 3
                assert all(map(torch.equal, before, copy_weights(model))) == (step in rank_with_nan)
                optimizer.zero_grad()
            by_hosts = 2 if world.size > 1 else 0  # until the first step, in which ranks compare their weights
            assert left_to_device == (0 if check == "host" else 8 - by_hosts), left_to_device
            assert (optimizer.steps, optimizer.skipped_steps) == (4, 4)
            assert are_equal_on_all_ranks(copy_weights(model))
            results.append(copy_weights(model))
            optimizer.unwrap()
        assert all(map(torch.equal, *results)), name


def case_ranks_agree_through_the_groups_of_the_last_algorithm_only(world: World) -> None:
    """A rank without a shard takes part in the first algorithm between nodes, and not in the second."""
    engine = DeviceAllReduce(world, CPU)
    for name, poison in itertools.product(("nccl", "hierarchical-nccl", "nccl"), (1.0, torch.nan)):
        x = torch.ones(50)
        if world.rank == world.size - 1:
            x[:] = poison
        engine.begin(load(find_algorithm(name)), Request(x))
        assert engine.flush_undecided().read() == (poison != 1.0), name


def case_hosts_decide_while_messages_pass_through_their_memory(world: World) -> None:
    settings = Settings(node_exchange="torch", finite_check="device")
    for name, is_left in (("hierarchical", world.nodes == 1), ("hitopk", False)):
        model = build_network()
        optimizer = build_optimizer(
            model, lambda p: torch.optim.SGD(p, fused=True), aggregation=name, settings=settings
        )
        for step in range(2):
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
        assert optimizer._backward.gradients.decisions.is_undecided == is_left
        optimizer.unwrap()


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
    for name in ("hierarchical", "hitopk", "int8", "int4", "nccl", "hierarchical-nccl"):
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


class _LateOnRank0(torch.autograd.Function):
    """Delay backward on rank 0, so that the other ranks exchange earlier."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if topkube.rank() == 0:
            time.sleep(0.2)
        return gradients[0]


def case_rows_of_the_host_never_meet_tensors_under_way(world: World) -> None:
    """A table is reduced in host memory while tensors before it are under way. With a late rank, messages of both are
    posted in different orders. The table is too large for the greetings to carry its values."""
    torch.manual_seed(0)
    table, layers = torch.nn.Embedding(6000, 64, sparse=True), [torch.nn.Linear(64, 90), torch.nn.Linear(90, 8)]
    model = torch.nn.Sequential(table, *layers)
    with exchange_through_torch():
        optimizer = build_optimizer(model, build_plain_sgd, aggregation="hierarchical", bucket_bytes=8192)
    for step in range(2):
        targets = torch.randn(world.size, 6000, 8, generator=torch.Generator().manual_seed(step))
        every_row = torch.arange(6000)
        reference = [torch.zeros_like(parameter) for parameter in model.parameters()]
        weights = {f"{n}": p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        for target in targets:
            hidden = torch.nn.functional.linear(weights["0.weight"], weights["1.weight"], weights["1.bias"])
            loss = (torch.nn.functional.linear(hidden, weights["2.weight"], weights["2.bias"]) - target).square().mean()
            for total, gradient in zip(reference, torch.autograd.grad(loss, list(weights.values())), strict=True):
                total += gradient / world.size
        (_LateOnRank0.apply(model(every_row)) - targets[world.rank]).square().mean().backward()
        for parameter, expected in zip(model.parameters(), reference, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()


def case_algorithms_of_host_memory_are_refused(world: World) -> None:
    with pytest.raises(ArgumentError, match=r"naive works on CPU tensors.*hitopk, int8, int4 on a GPU"):
        DeviceAllReduce(world, CPU).begin(load(find_algorithm("naive")), Request(torch.ones(3)))


def case_norms_that_ranks_compute_in_shares_equal_norms_that_one_rank_computes(world: World) -> None:
    weights = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 400, 1, 77, 20)]
    layer_gradients = [weight * 0.1 for weight in weights]
    assert compute_norms(weights, layer_gradients, parallel=True) == compute_norms(weights, layer_gradients)


def case_parallel_lars_takes_the_same_steps(world: World) -> None:
    results = []
    for parallel in (False, True):
        model = build_network()
        optimizer = build_optimizer(model, lambda p, parallel=parallel: LARS(p, lr=0.5, trust=0.02, parallel=parallel))
        for step in range(4):
            x, y = draw_samples(8 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert are_equal_on_all_ranks(copy_weights(model))
        results.append(copy_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_each_rank_maps_its_share_of_the_layers(world: World) -> None:
    """Every rank gets the results of all layers, and each layer is computed by one rank only."""
    sizes = [5, 1, 9, 2, 7, 0, 3]
    computed: list[int] = []

    def compute_numbers(layers: list[int]) -> list[list[float]]:
        computed.extend(layers)
        return [[layer / 3, -layer] for layer in layers]

    alone = parallel_tensor.map(compute_numbers, sizes, 2, parallel=False)
    assert computed == list(range(len(sizes)))
    computed.clear()
    assert parallel_tensor.map(compute_numbers, sizes, 2) == alone
    assert sorted(layer for ranks in world.comm.allgather(computed) for layer in ranks) == list(range(len(sizes)))
    with pytest.raises(ArgumentError, match="numbers of shape"):
        parallel_tensor.map(lambda layers: [[0.0]] * (len(layers) + 1), sizes)


def case_parallel_lars_computes_each_norm_once(world: World) -> None:
    """With `parallel`, the ranks compute as many norms together as one rank computes without it."""
    counts = []
    local = parallel_tensor._compute_local_norms
    for parallel in (False, True):
        computed: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                parallel_tensor,
                "_compute_local_norms",
                lambda tensors, c=computed: c.append(len(tensors)) or local(tensors),
            )
            model = build_network()
            optimizer = build_optimizer(model, lambda p, parallel=parallel: LARS(p, lr=0.5, parallel=parallel))
            x, y = draw_samples(8)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.unwrap()
        counts.append(sum(world.comm.allgather(sum(computed))))
    assert counts[0] == counts[1] * world.size
