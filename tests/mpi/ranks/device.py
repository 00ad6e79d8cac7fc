"""Training whose gradients take the path of CUDA tensors (collectives/device/), on CPU tensors. Inside the node, gloo
replaces NCCL; the other code is the same."""

from __future__ import annotations

import contextlib
import functools
import io
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
from ranks.training import gradient_memory, gradients
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
    train,
)
from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.world import World


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


def case_gradients_that_share_memory_equal_those_of_one_process(world: World) -> None:
    with exchange_through_torch():
        gradient_memory.case_gradients_that_share_memory_equal_those_of_one_process(world)


def case_gradients_stay_where_autograd_computed_them(world: World) -> None:
    """The means arrive there: a copy of each gradient would take memory, and a launch for each."""
    with exchange_through_torch():
        model, computed = build_network(), dict[int, int]()
        optimizer = build_optimizer(model, aggregation="dense")
        nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
        for index, node in enumerate(nodes):
            node.register_prehook(lambda gradients, index=index: computed.update({index: gradients[0].data_ptr()}))
        for step in range(3):
            x, y = draw_samples(8 * world.size, step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            assert [p.grad.data_ptr() for p in model.parameters()] == [computed[i] for i in range(len(computed))], step
            optimizer.step()
            optimizer.zero_grad()
        optimizer.unwrap()


def case_gradients_that_a_hook_keeps_stay_as_they_are(world: World) -> None:
    """The means do not arrive in memory to which a script still refers."""
    with exchange_through_torch():
        model, kept = build_network(), dict[int, tuple[torch.Tensor, torch.Tensor]]()
        optimizer = build_optimizer(model, aggregation="dense")

        def keep(index: int, gradient: torch.Tensor | None) -> None:
            assert gradient is not None
            kept[index] = gradient, gradient.clone()

        nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
        for index, node in enumerate(nodes):
            node.register_hook(lambda _, gradients, index=index: keep(index, gradients[0]))
        for step in range(3):
            x, y = draw_samples(8 * world.size, step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            assert all(torch.equal(gradient, copy) for gradient, copy in kept.values()), step
            optimizer.step()
            optimizer.zero_grad()
        optimizer.unwrap()


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
            results.append(train(model, optimizer, 8))
        pairs = zip(results[-2], results[-1], strict=True)
        if max(len(ranks) for ranks in world.node_ranks) <= 2:
            assert all(torch.equal(a, b) for a, b in pairs)
        else:
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def case_training_with_integers_follows_dense_training(world: World) -> None:
    trained = {}
    for name in ("dense", "int8", "int4", "int3"):
        model = build_network()
        with exchange_through_torch():
            optimizer = build_optimizer(model, build_sgd, aggregation=name, bucket_bytes=4096)
        assert optimizer._backward.exchange.on_device is not None
        weights = train(model, optimizer, 6)
        trained[name] = torch.cat([weight.reshape(-1) for weight in weights])
    moved = (trained["dense"] - torch.cat([w.reshape(-1) for w in copy_weights(build_network())])).norm()
    for name, share in (("int8", 0.02), ("int4", 0.2), ("int3", 0.3)):
        difference = (trained[name] - trained["dense"]).norm()
        assert difference < share * moved, (name, difference / moved)


def case_training_over_nccl_equals_dense_training(world: World) -> None:
    results = []
    for name in ("hierarchical", "nccl", "hierarchical-nccl"):
        model = build_network()
        with exchange_through_torch():
            optimizer = build_optimizer(model, build_sgd, aggregation=name)
        results.append(train(model, optimizer, 3))
        optimizer.unwrap()
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


def case_skipped_steps_are_reported_together_whoever_decides(world: World) -> None:
    """The host of rank 0 decides, because its optimizer has a hook, and the devices of the other ranks decide. Later
    steps do not use one of the parameters."""
    if world.nodes > 1:
        return
    model, output = build_network(), io.StringIO()
    model.register_parameter("used_once", torch.nn.Parameter(torch.ones(30)))
    settings = Settings(node_exchange="torch", finite_check="device")
    adam = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    optimizer = build_optimizer(model, adam, aggregation="dense", settings=settings)
    if world.rank == 0:
        optimizer.inner.register_step_post_hook(lambda *_: None)
    left_to_device = 0
    with contextlib.redirect_stderr(output):
        for step in range(19):
            x, y = draw_samples(8 * topkube.size(), step)
            loss = compute_loss(model, take_own_part(x), take_own_part(y))
            (loss * torch.nan if step else loss + model.used_once.sum()).backward()
            left_to_device += optimizer._backward.gradients.decisions.is_undecided
            optimizer.step()
            optimizer.zero_grad()
    assert (left_to_device > 0) == (world.rank > 0)
    assert output.getvalue().count("16 steps in a row were skipped") == (world.rank == 0)
    assert (optimizer.steps, optimizer.skipped_steps) == (1, 18)
    optimizer.unwrap()


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


def case_residuals_of_frozen_parameters_wait(world: World) -> None:
    """The second half of an exchange in two stages changes residuals when the messages of the first have come."""
    for name in ("int8", "int3", "hitopk"):
        shapes = {"trained": (64, 64), "frozen": (64, 64)}
        weights = {key: torch.nn.Parameter(torch.zeros(shape)) for key, shape in shapes.items()}
        optimizer = topkube.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=0.1), weights.items(), aggregation=name, density=0.1, warmup_steps=0,
            settings=Settings(node_exchange="torch"),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(5 + world.rank)
        residuals = []
        for step in range(5):
            weights["frozen"].requires_grad_(step < 2)
            terms = [(w * torch.randn(w.shape, generator=generator)).sum() for w in weights.values() if w.requires_grad]
            torch.stack(terms).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            residuals.append(optimizer._backward.exchange.residuals.save().get("frozen", []))
        for values in zip(*residuals[1:], strict=True):
            assert all(first == values[0][0] and torch.equal(v, values[0][1]) for first, v in values), name
        assert world.nodes == 1 or any(v.any() for _, v in residuals[1]) or not residuals[1], name
        optimizer.unwrap()


def case_residuals_are_float32_whatever_the_default_dtype_is(world: World) -> None:
    default = torch.get_default_dtype()
    try:
        for dtype, name in ((torch.bfloat16, "hitopk"), (torch.float64, "int8")):
            torch.set_default_dtype(torch.float32)
            model = build_network()
            torch.set_default_dtype(dtype)
            optimizer = build_optimizer(
                model, build_plain_sgd, aggregation=name, settings=Settings(node_exchange="torch"), warmup_steps=0
            )
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.synchronize()
                optimizer.step()
                optimizer.zero_grad()
            assert all(values.dtype == torch.float32 for values in optimizer._backward.exchange.residuals.list_arrays())
            optimizer.unwrap()
    finally:
        torch.set_default_dtype(default)


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
