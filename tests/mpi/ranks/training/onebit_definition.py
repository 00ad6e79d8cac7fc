"""onebit, topk1bit, localsgd and diloco on real ranks: every step follows the algorithm's definition in float64."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import topkube
from ranks.training.onebit_scene import (
    build_adamw,
    build_lamb,
    build_lars,
    build_masters,
    build_onebit,
    build_sgd,
    draw_batch_of,
    read_agreed_weights,
    read_bits,
    read_trained_weights,
    sum_owed_by_owners,
    train,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss
from topkube.algorithms import find_algorithm
from topkube.collectives import two_stage
from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.world import World

BLOCK = 256
"""Elements that share a scale."""
ALIGNMENT = 256
"""Tensors begin at multiples of this number of elements in the shards of ranks."""
COMPARED_ENTRIES, COMPARED_EVERY = 256, 16
"""Entries of each gradient that nodes compare to measure its noise, and the steps from one comparison to the next."""


class Definition:
    """The algorithm in float64, for all nodes of `world` on one process. Only sent values are rounded, as on real
    ranks."""

    def __init__(
        self, world: World, model: nn.Module, make: Any, period: int = 1, algorithm: str = "onebit", delay: int = 0
    ) -> None:
        self.world, self.period, self.algorithm = world, period, find_algorithm(algorithm)
        self.is_delayed = delay > 0
        self.arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The weights of nodes, and their values after an exchange that is applied after the next gradients."""
        self.shares = [len(ranks) / world.size for ranks in world.node_ranks]
        self.x = [p.detach().double() for p in model.parameters()]
        """The agreed weights."""
        self.owed = [torch.zeros_like(p) for p in self.x]
        """What the owners of segments have not sent."""
        self.outer = [torch.zeros_like(p) for p in self.x]
        """The outer momentum (diloco)."""
        self.own = [[p.clone().requires_grad_() for p in self.x] for _ in world.node_ranks]
        """The weights of each node."""
        self.optimizers = [make(parameters) for parameters in self.own]
        generator = torch.Generator().manual_seed(0)
        self.entries = [torch.randperm(p.numel(), generator=generator)[:COMPARED_ENTRIES] for p in self.x]
        self.squares = [[[0.0, 0.0] for _ in self.x] for _ in world.node_ranks]
        """For each node and tensor: running sums of squares of the compared entries, of the node's gradient and of the
        mean of all nodes."""

    def compute_gradients(self, model: nn.Module, node: int, step: int) -> list[torch.Tensor]:
        """Return the mean gradient of the node's ranks at the node's weights, computed in the dtype of the model, as on
        ranks. The ranks of a node add up 16-bit gradients in float32, and round the mean."""
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), self.own[node], strict=True):
                parameter.copy_(values)
        totals = [torch.zeros_like(p) for p in self.x]
        for rank in self.world.node_ranks[node]:
            loss = compute_loss(model, *draw_batch_of(model, rank, step))
            for total, gradient in zip(totals, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total += gradient.double()
        dtypes = [parameter.dtype for parameter in model.parameters()]
        means = [total / len(self.world.node_ranks[node]) for total in totals]
        return [m.to(dtype).double() if dtype.itemsize == 2 else m for m, dtype in zip(means, dtypes, strict=True)]

    def step(self, model: nn.Module, step: int) -> None:
        rows = [self.compute_gradients(model, node, step) for node in range(self.world.nodes)]
        self.apply_arriving()
        for node, gradients in enumerate(rows):
            for parameter, gradient in zip(self.own[node], gradients, strict=True):
                parameter.grad = gradient
        ratios = self.compute_ratios(rows, step)
        for node, optimizer in enumerate(self.optimizers):
            self.update(optimizer, self.own[node], ratios[node])
        if (step + 1) % self.period == 0:
            self.exchange()

    def compute_ratios(self, rows: list[list[torch.Tensor]], step: int) -> list[list[float]]:
        if self.algorithm.name in ("localsgd", "diloco"):  # plain local steps
            return [[1.0] * len(self.x) for _ in rows]
        result: list[list[float]] = [[] for _ in rows]
        for index, entries in enumerate(self.entries):
            parts = [row[index].reshape(-1)[entries].float().bfloat16().double() for row in rows]
            mean = sum(part * share for part, share in zip(parts, self.shares, strict=True))
            for node, part in enumerate(parts):
                squares = self.squares[node][index]
                if step % COMPARED_EVERY == 0:
                    squares[0] = 0.9 * squares[0] + 0.1 * float((part**2).sum())
                    squares[1] = 0.9 * squares[1] + 0.1 * float((mean**2).sum())
                result[node].append(min(max(squares[0] / max(squares[1], 1e-30), 1.0), float(self.world.nodes)))
        return result

    def update(self, optimizer: Any, own: list[torch.Tensor], ratios: list[float]) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            optimizer.step()
            return
        if isinstance(optimizer, LARS):
            self.update_with_lars(optimizer, own, ratios)
            return
        if isinstance(optimizer, LAMB):
            self.update_with_lamb(optimizer, own, ratios)
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

    @torch.no_grad()
    def update_with_lars(self, optimizer: Any, own: list[torch.Tensor], ratios: list[float]) -> None:
        group = optimizer.param_groups[0]
        for w, ratio in zip(own, ratios, strict=True):
            velocity = optimizer.state[w].setdefault("v", torch.zeros_like(w))
            change = group["lr"] * w.grad
            if w.ndim > 1:
                norm, decay = w.norm(), group["weight_decay"]
                rate = group["trust"] * norm / (w.grad.norm() / ratio**0.5 + decay * norm)
                change = group["lr"] * rate * (w.grad + decay * w)
            velocity.mul_(group["momentum"]).add_(change)
            w.sub_(velocity)

    @torch.no_grad()
    def update_with_lamb(self, optimizer: Any, own: list[torch.Tensor], ratios: list[float]) -> None:
        group, nodes = optimizer.param_groups[0], self.world.nodes
        first, second = group["betas"]
        for w, ratio in zip(own, ratios, strict=True):
            state = optimizer.state[w]
            if not state:
                state.update(t=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
            state["t"] += 1
            state["m"].mul_(first).add_(w.grad, alpha=1 - first)
            state["v"].mul_(second).addcmul_(w.grad, w.grad, value=1 - second)
            root = (state["v"] / ratio / (1 - second ** state["t"])).sqrt()
            direction = update = state["m"] / (1 - first ** state["t"]) / (root + group["eps"])
            rate = group["lr"]
            if w.ndim > 1:
                kept = sum(((1 - first) * first**age / (1 - first ** state["t"])) ** 2 for age in range(state["t"]))
                ratio_of_mean = (nodes - ratio + nodes * kept * (ratio - 1)) / (nodes - ratio + kept * (ratio - 1))
                update = direction + group["weight_decay"] * w
                squares = update.norm() ** 2 - direction.norm() ** 2 * (1 - 1 / ratio_of_mean)
                rate = rate * w.norm() / squares.clamp_min(update.norm() ** 2 / nodes) ** 0.5
            w.sub_(rate * update)

    @property
    def has_two_stages(self) -> bool:
        return self.world.nodes >= {"onebit": 8, "topk1bit": 8, "localsgd": 3, "diloco": 3}[self.algorithm.name]

    def cut_parts(self, index: int) -> list[slice]:
        """Return the parts of a flattened large tensor in the shards of ranks."""
        starts, end = [], 0
        for x in self.x:
            starts.append(end)
            end += 0 if is_small(x) else -(-x.numel() // ALIGNMENT) * ALIGNMENT
        shards = self.world.shards
        unit = -(-end // (ALIGNMENT * shards)) * ALIGNMENT
        cuts = [unit * shard - starts[index] for shard in range(shards + 1)]
        length = self.x[index].numel()
        bounds = [min(max(cut, 0), length) for cut in cuts]
        return [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]

    def compress(self, index: int, change: torch.Tensor) -> torch.Tensor:
        """Return what a node sends of its change of tensor `index`."""
        if is_small(change) or self.algorithm.name in ("localsgd", "diloco"):
            return change.float().bfloat16().double()
        if self.algorithm.name == "onebit":
            return compute_signs(change)
        return compute_top_signs(change, self.cut_parts(index))

    def find_owners(self, index: int) -> torch.Tensor:
        """Return the number of the owner of each element of tensor `index`. The shard of each rank of a node is cut
        into one segment per node, between blocks."""
        start = end = 0
        for number, x in enumerate(self.x):
            if is_small(x) == is_small(self.x[index]):
                start = end if number == index else start
                end += -(-x.numel() // ALIGNMENT) * ALIGNMENT
        nodes, blocks = self.world.nodes, -(-end // (ALIGNMENT * self.world.shards))  # blocks of a shard
        owner_of = [node for node in range(nodes) for _ in range(blocks * node // nodes, blocks * (node + 1) // nodes)]
        places = start + torch.arange(self.x[index].numel())
        return torch.tensor(owner_of)[places // ALIGNMENT % blocks].view_as(self.x[index])

    @torch.no_grad()
    def exchange(self) -> None:
        for index, x in enumerate(self.x):
            changes = [own[index] - x for own in self.own]
            sent = [self.compress(index, change) for change in changes]
            rests = [change - part for change, part in zip(changes, sent, strict=True)]
            if self.has_two_stages:  # an owner does not compress its own change, and keeps what it does not send
                owns = [self.find_owners(index) == node for node in range(self.world.nodes)]
                sent = [torch.where(own, change, part) for own, change, part in zip(owns, changes, sent, strict=True)]
            mean = sum(part * share for part, share in zip(sent, self.shares, strict=True))
            if self.has_two_stages:
                total = self.owed[index] + mean
                mean = self.compress(index, total)
                times = [min(1 / share, two_stage.MOST_TIMES) for share in self.shares]
                rests = [
                    torch.where(own, (total - mean) * factor, rest)
                    for own, factor, rest in zip(owns, times, rests, strict=True)
                ]
                for own, factor, share in zip(owns, times, self.shares, strict=True):
                    self.owed[index][own] = ((total - mean) * (1 - factor * share))[own]
            if self.algorithm.name == "diloco":
                self.outer[index].mul_(0.9).add_(mean)
                mean = 0.7 * (mean + 0.9 * self.outer[index])
            x += mean
            for own, rest in zip(self.own, rests, strict=True):
                self.arriving.append((own[index], x + rest))
        if not self.is_delayed:
            self.apply_arriving()

    @torch.no_grad()
    def apply_arriving(self) -> None:
        for own, values in self.arriving:
            own.copy_(values)
        self.arriving.clear()

    @torch.no_grad()
    def adopt(self, own: list[list[torch.Tensor]], x: list[torch.Tensor], owed: list[torch.Tensor]) -> None:
        """Continue from these weights of all nodes: rounding then does not add up over steps."""
        for targets, sources in [(self.x, x), (self.owed, owed), *zip(self.own, own, strict=True)]:
            for parameter, values in zip(targets, sources, strict=True):
                parameter.copy_(values)


def compute_signs(change: torch.Tensor) -> torch.Tensor:
    flat = change.reshape(-1)
    blocks = [
        torch.where(torch.signbit(block), -1.0, 1.0).double() * block.abs().mean().float().bfloat16().double()
        for block in flat.split(BLOCK)
    ]
    return torch.cat(blocks).view_as(change)


def compute_top_signs(change: torch.Tensor, parts: list[slice]) -> torch.Tensor:
    """Keep the largest tenth of each part, as signs times mean magnitudes; set the other entries to 0."""
    flat, sent = change.reshape(-1), torch.zeros_like(change).reshape(-1)
    for part in parts:
        values = flat[part]
        count = -(-len(values) // 10)
        largest = torch.sort(torch.sort(values.abs(), descending=True, stable=True).indices[:count]).values
        sent[part.start + largest] = compute_signs(values[largest])
    return sent.view_as(change)


def is_small(x: torch.Tensor) -> bool:
    return x.ndim <= 1 or x.numel() < 1024


def assert_follows(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Check that all elements but a few are equal to rounding. A change near zero may have either sign, and a block's
    scale may round to either neighbour in bfloat16. With a wrong definition, most elements would differ."""
    error = torch.cat([(a.double() - b.detach()).abs().reshape(-1) for a, b in zip(weights, expected, strict=True)])
    differing = int((error > 2e-6).sum())
    assert differing <= 20 + 2 * BLOCK, (differing, float(error.max()))  # single changes, and two blocks


def follow_definition(
    world: World,
    make: Any,
    period: int,
    steps: int,
    algorithm: str = "onebit",
    delay: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train, and compare every step with the definition, which rank 0 computes for all nodes. With a 16-bit `dtype`,
    the definition has the masters."""
    if world.nodes == 1:
        return  # nothing is sent between nodes, and nothing is compressed
    model = build_network().to(dtype)
    wrap = make if dtype.itemsize == 4 else build_masters(make)
    optimizer = build_onebit(model, wrap, period=period, aggregation=algorithm, delay=delay)
    start = build_network().to(dtype)
    definition = Definition(world, start, make, period, algorithm, delay) if world.rank == 0 else None
    for step in range(steps):
        train(world, model, optimizer, range(step, step + 1))
        trained = read_trained_weights(optimizer, model)
        for parameter, weights in zip(model.parameters(), trained, strict=True):
            assert torch.equal(parameter, weights.to(dtype))
        everyone = world.comm.gather([tensor.numpy() for tensor in trained])
        x = read_agreed_weights(optimizer, model)
        owners = [torch.from_numpy(unsent) for unsent in sum_owed_by_owners(world, optimizer, model)]
        problem = ""
        if definition is not None:
            own = [[torch.from_numpy(array) for array in everyone[ranks[0]]] for ranks in world.node_ranks]
            try:
                compare_step(definition, start, step, own, x, owners)
            except AssertionError as error:
                problem = f"{algorithm}, period {period}, step {step}: {error}"
        topkube.barrier()  # sleeps; in a broadcast, MPI would use the processor that rank 0 computes on
        assert not (problem := world.comm.bcast(problem)), problem
    assert are_equal_on_all_ranks(x)
    assert not are_equal_on_all_ranks(read_trained_weights(optimizer, model))
    optimizer.unwrap()
    assert are_equal_on_all_ranks(read_trained_weights(optimizer, model))
    assert are_equal_on_all_ranks([parameter.float() for parameter in model.parameters()])


def compare_step(
    definition: Definition,
    model: nn.Module,
    step: int,
    own: list[list[torch.Tensor]],
    x: list[torch.Tensor],
    owners: list[torch.Tensor],
) -> None:
    definition.step(model, step)
    for node, weights in enumerate(own):
        assert_follows(weights, definition.own[node])
    assert_follows(x, definition.x)
    assert_follows(owners, definition.owed)
    is_owed = any(bool(unsent.any()) for unsent in owners)
    is_far = definition.has_two_stages and 1 / min(definition.shares) > two_stage.MOST_TIMES
    assert is_owed == (is_far and step + 1 >= definition.period)
    definition.adopt(own, x, owners)


def case_the_weights_follow_the_definition(world: World) -> None:
    follow_definition(world, build_sgd, 1, steps=8)


def case_adamw_follows_the_definition(world: World) -> None:
    """The second moments are compared in step 0 and in step 16."""
    follow_definition(world, build_adamw, 1, steps=18)


def case_a_period_of_four_follows_the_definition(world: World) -> None:
    follow_definition(world, build_sgd, 4, steps=9)
    follow_definition(world, build_adamw, 4, steps=9)


def case_a_delayed_exchange_follows_the_definition(world: World) -> None:
    """Nodes apply the result of an exchange after the next gradients."""
    follow_definition(world, build_sgd, 1, steps=8, delay=1)
    follow_definition(world, build_adamw, 2, steps=7, delay=1)
    follow_definition(world, build_sgd, 2, steps=7, algorithm="diloco", delay=1)


def case_lars_and_lamb_follow_the_definition(world: World) -> None:
    """The noise of gradients is compared in step 0 and in step 16."""
    for make in (build_lars, build_lamb):
        follow_definition(world, make, 1, steps=18)
        follow_definition(world, make, 2, steps=5, delay=1)
        follow_definition(world, make, 2, steps=5, algorithm="localsgd")


def case_masters_follow_the_definition(world: World) -> None:
    """The gradients are those of the 16-bit weights; everything else is that of the masters."""
    follow_definition(world, build_sgd, 1, steps=6, dtype=torch.bfloat16)
    follow_definition(world, build_adamw, 2, steps=18, dtype=torch.bfloat16)
    follow_definition(world, build_lamb, 1, steps=5, delay=1, dtype=torch.bfloat16)
    follow_definition(world, build_sgd, 2, steps=5, algorithm="diloco", dtype=torch.bfloat16)


def case_topk1bit_follows_its_definition(world: World) -> None:
    follow_definition(world, build_sgd, 1, steps=6, algorithm="topk1bit")
    follow_definition(world, build_adamw, 2, steps=6, algorithm="topk1bit")


def case_localsgd_follows_its_definition(world: World) -> None:
    """Weights are averaged every few steps, in bf16, and Adam's moments stay those of the node."""
    follow_definition(world, build_sgd, 4, steps=9, algorithm="localsgd")
    follow_definition(world, build_adamw, 2, steps=5, algorithm="localsgd")


def case_diloco_follows_its_definition(world: World) -> None:
    """Nesterov momentum of the mean change; in two stages from three nodes on."""
    follow_definition(world, build_sgd, 2, steps=7, algorithm="diloco")
    follow_definition(world, build_adamw, 3, steps=7, algorithm="diloco")


def case_diloco_without_momentum_is_localsgd(world: World) -> None:
    results = []
    for options in (
        {"aggregation": "localsgd"},
        {"aggregation": "diloco", "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    ):
        model = build_network()
        optimizer = build_onebit(model, build_adamw, period=2, **options)
        train(world, model, optimizer, range(5))
        results.append(read_bits(optimizer, model))
        optimizer.unwrap()
    assert results[0] == results[1]
