"""Error feedback in the weights (onebit) on real ranks: against its definition in float64, conservation, guards."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import loss_of, network, same_on_all_ranks, weights
from topkube.algorithms import find_algorithm
from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.node_weights import guard, node_weights
from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.world import World

BLOCK = 256
RATE = 0.02


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.02)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)


def onebit(model: nn.Module, make: Any = sgd, **options: Any) -> topkube.DistributedOptimizer:
    return topkube.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **{"aggregation": "onebit", "bucket_bytes": 8192, **options}
    )


def batch(world: World, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :1] * 2 - x[:, 1:2]


def train(world: World, model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, *batch(world, world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def read_agreed_weights(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[torch.Tensor]:
    with optimizer.consensus():
        return weights(model)


def sum_unsent_changes(world: World, optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[np.ndarray]:
    """Return the unsent changes of all nodes, as a mean weighted by ranks, plus the unsent means of the owners."""
    saved = optimizer.state_dict()["topkube"]["residuals"]
    own = sum_over_ranks(world, saved["pieces"], model, saved["weight"])
    return [a + b for a, b in zip(own, owed_by_owners(world, optimizer, model), strict=True)]


def owed_by_owners(world: World, optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[np.ndarray]:
    return sum_over_ranks(world, optimizer.state_dict()["topkube"]["residuals"]["owners"], model, 1.0)


def sum_over_ranks(world: World, pieces: Any, model: nn.Module, weight: float) -> list[np.ndarray]:
    """Return the sum of the pieces of all ranks, times each rank's weight."""
    totals = []
    for name, parameter in model.named_parameters():
        full = np.zeros(parameter.numel())
        for start, values in pieces.get(name, []):
            full[start : start + len(values)] += values.double().numpy() * weight
        totals.append(world.comm.allreduce(full).reshape(parameter.shape))
    return totals


# ---- the definition, in float64, on one process


class Definition:
    """The rule for all nodes of `world` in float64 torch, on one process. Only sent values are rounded, as on real
    ranks."""

    def __init__(self, world: World, model: nn.Module, make: Any, period: int = 1, algorithm: str = "onebit") -> None:
        self.world, self.period, self.algorithm = world, period, find_algorithm(algorithm)
        self.shares = [len(ranks) / world.size for ranks in world.node_ranks]
        self.x = [p.detach().double() for p in model.parameters()]
        self.owed = [torch.zeros_like(p) for p in self.x]
        """What the owners of segments have not sent."""
        self.outer = [torch.zeros_like(p) for p in self.x]
        """The outer momentum (diloco)."""
        self.own = [[p.clone().requires_grad_() for p in self.x] for _ in world.node_ranks]
        self.optimizers = [make(parameters) for parameters in self.own]
        generator = torch.Generator().manual_seed(0)
        self.entries = [torch.randperm(p.numel(), generator=generator)[:256] for p in self.x]
        self.squares = [[[0.0, 0.0] for _ in self.x] for _ in world.node_ranks]

    def gradients(self, model: nn.Module, node: int, step: int) -> list[torch.Tensor]:
        """The mean gradient of the node's ranks at the node's weights, computed in float32 as the ranks do."""
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), self.own[node], strict=True):
                parameter.copy_(values)
        total = [torch.zeros_like(p) for p in self.x]
        for rank in self.world.node_ranks[node]:
            loss = loss_of(model, *batch(self.world, rank, step))
            for sum_, gradient in zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                sum_ += gradient.double()
        return [sum_ / len(self.world.node_ranks[node]) for sum_ in total]

    def step(self, model: nn.Module, step: int) -> None:
        rows = [self.gradients(model, node, step) for node in range(self.world.nodes)]
        for node, gradients in enumerate(rows):
            for parameter, gradient in zip(self.own[node], gradients, strict=True):
                parameter.grad = gradient
        ratios = self.ratios(rows, step)
        for node, optimizer in enumerate(self.optimizers):
            self.update(optimizer, self.own[node], ratios[node])
        if (step + 1) % self.period == 0:
            self.exchange()

    def ratios(self, rows: list[list[torch.Tensor]], step: int) -> list[list[float]]:
        if self.algorithm.name in ("localsgd", "diloco"):  # plain local steps
            return [[1.0] * len(self.x) for _ in rows]
        result: list[list[float]] = [[] for _ in rows]
        for index, entries in enumerate(self.entries):
            parts = [row[index].reshape(-1)[entries].float().bfloat16().double() for row in rows]
            mean = sum(part * share for part, share in zip(parts, self.shares, strict=True))
            for node, part in enumerate(parts):
                squares = self.squares[node][index]
                if step % 16 == 0:
                    squares[0] = 0.9 * squares[0] + 0.1 * float((part**2).sum())
                    squares[1] = 0.9 * squares[1] + 0.1 * float((mean**2).sum())
                result[node].append(min(max(squares[0] / max(squares[1], 1e-30), 1.0), float(self.world.nodes)))
        return result

    def update(self, optimizer: Any, own: list[torch.Tensor], ratios: list[float]) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            optimizer.step()
            return
        group = optimizer.param_groups[0]
        first, second = group["betas"]
        with torch.no_grad():
            for parameter, ratio in zip(own, ratios, strict=True):
                state, gradient = optimizer.state[parameter], parameter.grad
                if not state:
                    state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["t"] += 1
                state["m"].mul_(first).add_(gradient, alpha=1 - first)
                state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scaled = (state["v"] / ratio / (1 - second ** state["t"])).sqrt() + group["eps"]
                parameter.sub_(group["lr"] * state["m"] / (1 - first ** state["t"]) / scaled)

    @property
    def has_two_stages(self) -> bool:
        return self.world.nodes >= {"onebit": 8, "topk1bit": 8, "localsgd": 3, "diloco": 3}[self.algorithm.name]

    def parts(self, index: int) -> list[slice]:
        """The parts of a flattened large tensor in the shards of ranks. Tensors begin at multiples of 256."""
        starts, end = [], 0
        for x in self.x:
            starts.append(end)
            end += 0 if is_small(x) else -(-x.numel() // 256) * 256
        shards = self.world.shards
        unit = -(-end // (256 * shards)) * 256
        cuts = [unit * shard - starts[index] for shard in range(shards + 1)]
        length = self.x[index].numel()
        bounds = [min(max(cut, 0), length) for cut in cuts]
        return [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]

    def compress(self, index: int, change: torch.Tensor) -> torch.Tensor:
        """What is sent of a change of tensor `index`."""
        if is_small(change) or self.algorithm.name in ("localsgd", "diloco"):
            return change.float().bfloat16().double()
        return (
            compute_signs(change) if self.algorithm.name == "onebit" else compute_top_signs(change, self.parts(index))
        )

    @torch.no_grad()
    def exchange(self) -> None:
        for index, x in enumerate(self.x):
            changes = [own[index] - x for own in self.own]
            sent = [self.compress(index, change) for change in changes]
            mean = sum(part * share for part, share in zip(sent, self.shares, strict=True))
            if self.has_two_stages:
                total = self.owed[index] + mean
                mean = self.compress(index, total)
                self.owed[index].copy_(total - mean)
            if self.algorithm.name == "diloco":
                self.outer[index].mul_(0.9).add_(mean)
                mean = 0.7 * (mean + 0.9 * self.outer[index])
            x += mean
            for own, change, part in zip(self.own, changes, sent, strict=True):
                own[index].copy_(x + (change - part))

    @torch.no_grad()
    def adopt(self, own: list[list[torch.Tensor]], x: list[torch.Tensor], owed: list[torch.Tensor]) -> None:
        """Continue from these weights of all nodes: rounding then does not add up over steps."""
        for mine, theirs in [(self.x, x), (self.owed, owed), *zip(self.own, own, strict=True)]:
            for parameter, values in zip(mine, theirs, strict=True):
                parameter.copy_(values)


def compute_signs(change: torch.Tensor) -> torch.Tensor:
    flat = change.reshape(-1)
    blocks = [
        torch.where(torch.signbit(block), -1.0, 1.0).double() * block.abs().mean().float().bfloat16().double()
        for block in flat.split(BLOCK)
    ]
    return torch.cat(blocks).view_as(change)


def compute_top_signs(change: torch.Tensor, parts: list[slice]) -> torch.Tensor:
    """The signs of the largest tenth of each part, and their mean magnitude."""
    flat, sent = change.reshape(-1), torch.zeros_like(change).reshape(-1)
    for part in parts:
        values = flat[part]
        count = -(-len(values) // 10)
        largest = torch.sort(torch.sort(values.abs(), descending=True, stable=True).indices[:count]).values
        sent[part.start + largest] = compute_signs(values[largest])
    return sent.view_as(change)


def is_small(x: torch.Tensor) -> bool:
    return x.ndim <= 1 or x.numel() < 1024


def assert_follows(weights: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """All elements are equal to rounding, but a few: the sign of a change that is zero to rounding is open, and so is
    the rounding of a block's scale to bfloat16. By a wrong rule, most elements would differ."""
    error = torch.cat([(a.double() - b.detach()).abs().reshape(-1) for a, b in zip(weights, wanted, strict=True)])
    assert int((error > 2e-6).sum()) <= 20 + 2 * 256, (int((error > 2e-6).sum()), float(error.max()))


def follow(world: World, make: Any, period: int, steps: int, algorithm: str = "onebit") -> None:
    """Train, and compare every step with the definition, which rank 0 computes for all nodes."""
    if world.nodes == 1:
        return  # nothing is sent between nodes, and nothing is compressed
    model = network()
    optimizer = onebit(model, make, period=period, aggregation=algorithm)
    definition = Definition(world, network(), make, period, algorithm) if world.rank == 0 else None
    for step in range(steps):
        train(world, model, optimizer, range(step, step + 1))
        everyone = world.comm.gather([tensor.numpy() for tensor in weights(model)])
        x = read_agreed_weights(optimizer, model)
        owners = [torch.from_numpy(rest) for rest in owed_by_owners(world, optimizer, model)]
        problem = ""
        if definition is not None:
            own = [[torch.from_numpy(array) for array in everyone[ranks[0]]] for ranks in world.node_ranks]
            try:
                compare_step(definition, step, own, x, owners)
            except AssertionError as error:
                problem = f"{algorithm}, period {period}, step {step}: {error}"
        topkube.barrier()  # sleeps; in a broadcast, MPI would use the processor that rank 0 computes on
        assert not (problem := world.comm.bcast(problem)), problem
    assert same_on_all_ranks(x)
    assert not same_on_all_ranks(weights(model))
    optimizer.unwrap()
    assert same_on_all_ranks(weights(model))


def compare_step(
    definition: Definition, step: int, own: list[list[torch.Tensor]], x: list[torch.Tensor], owners: list[torch.Tensor]
) -> None:
    definition.step(network(), step)
    for node, mine in enumerate(own):
        assert_follows(mine, definition.own[node])
    assert_follows(x, definition.x)
    assert_follows(owners, definition.owed)
    is_owed = any(bool(rest.any()) for rest in owners)
    assert is_owed == (definition.has_two_stages and step + 1 >= definition.period)
    definition.adopt(own, x, owners)


def case_the_weights_follow_the_definition(world: World) -> None:
    follow(world, sgd, 1, steps=8)


def case_adamw_follows_the_definition(world: World) -> None:
    """The second moments are compared in step 0 and in step 16."""
    follow(world, adamw, 1, steps=18)


def case_a_period_of_four_follows_the_definition(world: World) -> None:
    follow(world, sgd, 4, steps=9)
    follow(world, adamw, 4, steps=9)


def case_topk1bit_follows_its_definition(world: World) -> None:
    follow(world, sgd, 1, steps=6, algorithm="topk1bit")
    follow(world, adamw, 2, steps=6, algorithm="topk1bit")


def case_localsgd_follows_its_definition(world: World) -> None:
    """Weights are averaged every few steps, in bf16, and Adam's moments stay those of the node."""
    follow(world, sgd, 4, steps=9, algorithm="localsgd")
    follow(world, adamw, 2, steps=5, algorithm="localsgd")


def case_diloco_follows_its_definition(world: World) -> None:
    """Nesterov momentum of the mean change; in two stages from three nodes on."""
    follow(world, sgd, 2, steps=7, algorithm="diloco")
    follow(world, adamw, 3, steps=7, algorithm="diloco")


def case_diloco_without_momentum_is_localsgd(world: World) -> None:
    results = []
    for options in (
        {"aggregation": "localsgd"},
        {"aggregation": "diloco", "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    ):
        model = network()
        optimizer = onebit(model, adamw, period=2, **options)
        train(world, model, optimizer, range(5))
        results.append(
            [tensor.numpy().tobytes() for tensor in [*weights(model), *read_agreed_weights(optimizer, model)]]
        )
        optimizer.unwrap()
    assert results[0] == results[1]


# ---- what must hold around the step


def case_nothing_is_lost(world: World) -> None:
    """Rate 1 without momentum: what the agreed weights moved, and what is owed, is the sum of all mean gradients."""
    model = network()
    optimizer = onebit(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    start, total = weights(model), [np.zeros(tuple(p.shape)) for p in model.parameters()]
    for step in range(6):
        (0.01 * loss_of(model, *batch(world, world.rank, step))).backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            sum_ += world.comm.allreduce(parameter.grad.double().numpy()) / world.size
        optimizer.step()
        optimizer.zero_grad()
    left = sum_unsent_changes(world, optimizer, model)
    for first, x, rest, sum_ in zip(start, read_agreed_weights(optimizer, model), left, total, strict=True):
        moved = (first.double() - x.double()).numpy()
        np.testing.assert_allclose(moved - (rest if world.nodes > 1 else 0), sum_, rtol=0, atol=2e-6)
    assert world.nodes == 1 or max(float(np.abs(rest).max()) for rest in left) > 1e-4
    optimizer.unwrap()


def case_a_nan_on_one_rank_changes_nothing_anywhere(world: World) -> None:
    model = network()
    optimizer = onebit(model, adamw)
    train(world, model, optimizer, range(2))
    before, x = weights(model), read_agreed_weights(optimizer, model)
    moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    loss = loss_of(model, *batch(world, world.rank, 2))
    (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.steps, optimizer.skipped_steps) == (2, 1)
    for a, b in zip([*weights(model), *read_agreed_weights(optimizer, model)], [*before, *x], strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    for state, second in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg_sq"], second)
    train(world, model, optimizer, range(3, 5))
    assert same_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_a_grad_scaler_skips_on_all_nodes(world: World) -> None:
    model = network()
    optimizer = onebit(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        loss = loss_of(model, *batch(world, world.rank, step))
        scaler.scale(loss * torch.inf if step == 1 and world.rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**9
    assert optimizer.steps == 3
    assert same_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_the_same_run_gives_the_same_bits(world: World) -> None:
    results = []
    for _ in range(2):
        model = network()
        optimizer = onebit(model, adamw, period=2)
        train(world, model, optimizer, range(5))
        results.append(
            [tensor.numpy().tobytes() for tensor in [*weights(model), *read_agreed_weights(optimizer, model)]]
        )
        optimizer.unwrap()
    assert results[0] == results[1]


def case_accumulated_gradients_make_one_step(world: World) -> None:
    results = []
    for accumulates in (True, False):
        model = network()
        optimizer = onebit(model)
        for step in range(0, 6, 2):
            with optimizer.no_sync() if accumulates else contextlib.nullcontext():
                loss_of(model, *batch(world, world.rank, step)).backward()
            loss_of(model, *batch(world, world.rank, step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        optimizer.unwrap()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def case_uneven_batches_end_together(world: World) -> None:
    """Rank 0 has one batch more than the others: its node alone has a gradient in the last step."""
    model = network()
    optimizer = onebit(model)
    count = 4 if world.rank == 0 else 3
    for x, y in optimizer.join([batch(world, world.rank, step) for step in range(count)]):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 4
    assert same_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_clipping_uses_one_norm(world: World) -> None:
    model = network()
    optimizer = onebit(model)
    loss_of(model, *batch(world, world.rank, 0)).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norms = world.comm.allgather(float(sum((gradient.double() ** 2).sum() for gradient in before)))
    wanted = (sum(norms) / world.size) ** 0.5
    norm = optimizer.clip_grad_norm_(wanted / 2)
    assert len(set(world.comm.allgather(norm))) == 1
    assert abs(norm - wanted) < 1e-5 * wanted
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2, rtol=1e-5, atol=1e-8)
    optimizer.unwrap()


def case_few_bytes_travel(world: World) -> None:
    """Per node and step at most 1/24 of the bytes of a dense float32 exchange among two nodes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Linear(256, 1))
    count = sum(parameter.numel() for parameter in model.parameters())
    for period in (1, 4):
        optimizer = onebit(model, adamw, period=period)
        phases.current.take()
        for step in range(16):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(world.rank + 100 * step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.consensus():
            pass
        sent = float(world.sum_small(np.array([phases.current.take().inter_bytes], np.float64))[0])
        of_node = sent / world.nodes / 16
        if world.nodes < 8:
            dense = 4 * count * (world.nodes - 1)  # of two nodes; an all-gather sends as much to every further node
        else:
            dense = 4 * count * 2 * (world.nodes - 1) / world.nodes
        assert of_node <= dense / {1: 24, 4: 75}[period], (period, dense / max(of_node, 1))
        assert (of_node > 0) == (world.nodes > 1)
        optimizer.unwrap()


def case_the_guard_shortens_the_period_on_all_ranks(world: World) -> None:
    """With a limit that everything passes: 4, 2, 1 steps, kept through a state dict; then a warning, once."""
    model = network()
    optimizer = onebit(model, period=4)
    limit, guard.MOST_SPREAD = guard.MOST_SPREAD, 1e-9
    try:
        periods = []
        for step in range(36):
            train(world, model, optimizer, range(step, step + 1))
            periods.append(optimizer.guard.period)
    finally:
        guard.MOST_SPREAD = limit
    if world.nodes == 1:
        assert optimizer.guard.unsent_ratio is None
        assert set(periods) == {4}
    else:
        assert periods == [4] * 3 + [2] * 30 + [1] * 3
        assert len(set(world.comm.allgather((optimizer.guard.unsent_ratio, optimizer.guard.weight_spread)))) == 1
        assert optimizer.guard.unsent_ratio > 0
        assert 0 < optimizer.guard.weight_spread < 1
        state = optimizer.state_dict()
        optimizer.unwrap()
        for period, wanted in ((4, 1), (8, 8)):  # a job that asks for another period gets it
            again = onebit(model, period=period)
            again.load_state_dict(state)
            assert again.guard.period == wanted
            again.unwrap()
        return
    optimizer.unwrap()


# ---- equal weights, and what does not work


def case_consensus_gives_equal_weights_and_takes_them_back(world: World) -> None:
    model = network()
    optimizer = onebit(model)
    with optimizer.consensus():
        pass
    train(world, model, optimizer, range(3))
    own = weights(model)
    with optimizer.consensus():
        assert same_on_all_ranks(weights(model))
        with pytest.raises(TrainingError, match=r"inside optimizer\.consensus"):
            optimizer.step()
    for a, b in zip(weights(model), own, strict=True):
        assert torch.equal(a, b)
    if world.nodes > 1:
        assert not same_on_all_ranks(own)
        with pytest.raises(TrainingError, match="was changed inside"), optimizer.consensus(), torch.no_grad():
            model[0].weight.add_(1)
        for a, b in zip(weights(model), own, strict=True):
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
        model = network()
        first = copy.deepcopy(model.state_dict())
        optimizer = onebit(model, period=2)
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
    model = network()
    optimizer = onebit(model, settings=Settings(check_weights_every=2))
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


def case_optimizers_that_do_not_work_with_onebit_are_refused(world: World) -> None:
    model = network()
    for wrap, message in [
        (lambda p: LARS(p, lr=0.1), "LARS does not work with onebit"),
        (lambda p: LAMB(p, lr=0.1), "LAMB does not work with onebit"),
        (lambda p: MasterWeights(torch.optim.SGD(p, lr=0.1)), "MasterWeights does not work with onebit"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            onebit(model, wrap)
    with pytest.raises(ArgumentError, match="momentum correction does not work with onebit"):
        onebit(model, momentum_correction=True)
    with pytest.raises(ArgumentError, match="the period of diloco is 1, but it must be at least 2"):
        onebit(model, aggregation="diloco")
    with pytest.raises(ArgumentError, match="period is 0"):
        onebit(model, period=0)
    with pytest.raises(ArgumentError, match=r"has dtype torch\.bfloat16"):
        onebit(network().bfloat16())
    optimizer = onebit(model)
    with pytest.raises(TrainingError, match="cannot be added"):
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).named_parameters("more"))})
    optimizer.unwrap()
