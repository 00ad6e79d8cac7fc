"""Exchange rules of simulated nodes (benchmarks/simulated_nodes.py): what nodes send, and where the rest stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from message_network import exchange_top
from topkube import kernels
from topkube.collectives.codecs import Codec, Signs
from topkube.collectives.global_top import GlobalTop, TopTree
from topkube.collectives.sparse import selected_count
from topkube.collectives.split_top import SplitTop
from topkube.collectives.top_levels import TopLevels
from topkube.collectives.top_signs import TopSigns
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets import Bucket, Parameter, plan
from topkube.training.node_weights.guard import MEASURE_EVERY, Guard

LossOf = Callable[[int, torch.nn.Module], torch.Tensor]
"""(node, model) -> the loss of the node's batch."""
BLOCK = 256
"""Elements that share one scale of a one-bit compressor."""


@dataclass(frozen=True)
class RuleOptions:
    """Settings of a rule. `period` is the number of steps between exchanges; `density` the share of entries sent."""

    nodes: int
    period: int = 1
    density: float = 0.01
    warmup_steps: int = 0


@dataclass
class GuardValues:
    """The two numbers that the guard of a run measures (topkube/training/node_weights/guard.py), at the same exchanges:
    what nodes keep over what they send, and the distance of their weights from the agreed weights over the norm of the
    agreed weights."""

    unsent: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)

    def add(self, change: float, left: float, agreed: float) -> None:
        """Add a measurement: the mean squares of nodes of the change before an exchange, of its unsent part after it,
        and the squares of the agreed weights."""
        guard = Guard(1, "")
        guard.check_drift(change, left, agreed)
        assert guard.unsent_ratio is not None
        assert guard.weight_spread is not None
        self.unsent.append(guard.unsent_ratio)
        self.spread.append(guard.weight_spread)


class Nodes:
    """The weights and the optimizer of every node. Node 0 owns the model that was passed in."""

    def __init__(
        self, model: torch.nn.Module, count: int, make: Callable[[torch.nn.Module], torch.optim.Optimizer]
    ) -> None:
        self.count = count
        self.models = [model]
        self._make = make
        self.optimizers = [make(model)]
        self._names = [name for name, _ in model.named_parameters()]

    def separate(self) -> None:
        """Give every node weights and an optimizer of its own."""
        self.models += [copy.deepcopy(self.models[0]) for _ in range(self.count - 1)]
        self.optimizers = [self._make(model) for model in self.models]

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def parameters(self, node: int) -> list[torch.nn.Parameter]:
        return list(self.models[node].parameters())

    def named(self, node: int) -> list[Parameter]:
        """Return the parameters with their lengths, as the training loop sees them."""
        pairs = zip(self._names, self.parameters(node), strict=True)
        return [Parameter(index, name, tensor) for index, (name, tensor) in enumerate(pairs)]

    def global_model(self) -> torch.nn.Module:
        """Return the model with the weights that all nodes agree on; `Rule.finish` has put them into node 0."""
        return self.models[0]


class Rule:
    """Base of the rules. `step` trains all nodes for one step; `sent_bytes` counts what one node sends."""

    has_period: ClassVar[bool] = False
    has_density: ClassVar[bool] = False

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        self.nodes, self.options, self.sent_bytes = nodes, options, 0.0
        self.guard_values = GuardValues()
        """Measured in rules that keep what was not sent in the weights."""

    def step(self, step: int, loss_of: LossOf) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Put the weights that all nodes agree on into node 0."""

    def gradients(self, node: int, loss_of: LossOf) -> list[torch.Tensor]:
        """Return the node's gradients at its own weights."""
        model = self.nodes.models[node if len(self.nodes.models) > 1 else 0]
        return list(torch.autograd.grad(loss_of(node, model), list(model.parameters())))

    def ring_bytes(self, elements: int, width: int) -> float:
        """Return the bytes that one node sends in a dense all-reduce of `elements` of `width` bytes."""
        return 2 * (self.options.nodes - 1) / self.options.nodes * elements * width


class Dense(Rule):
    """All-reduce of the gradients in float32: the reference."""

    def step(self, step: int, loss_of: LossOf) -> None:
        nodes, count = self.nodes, self.options.nodes
        rows = [self.gradients(node, loss_of) for node in range(count)]
        for parameter, gradients in zip(nodes.parameters(0), zip(*rows, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / count
            self.sent_bytes += self.ring_bytes(parameter.numel(), 4)
        nodes.optimizers[0].step()


class SimulatedHiTopK(Rule):
    """Top-k of each bucket, a residual beside the gradient, all-gather in bf16: `hitopk` as it runs today."""

    has_density = True

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._buckets: list[Bucket] = []
        self._residuals: list[list[np.ndarray]] = []
        self._aggregation = AggregationSettings("hitopk", options.density, options.warmup_steps, "bf16", "topk")

    def step(self, step: int, loss_of: LossOf) -> None:
        nodes, count = self.nodes, self.options.nodes
        rows = [self.gradients(node, loss_of) for node in range(count)]
        if not self._buckets:
            self._buckets = plan(reversed(nodes.named(0)))
            self._residuals = [[np.zeros(b.length, np.float32) for _ in range(count)] for b in self._buckets]
        density = self._aggregation.density_at(step)
        parameters = nodes.parameters(0)
        for bucket, residuals in zip(self._buckets, self._residuals, strict=True):
            flat = [
                torch.cat([row[parameter.index].reshape(-1) for parameter in bucket.parameters]).numpy() for row in rows
            ]
            if bucket.small or density == 1:
                mean = np.sum(flat, axis=0) / np.float32(count)
                self.sent_bytes += self.ring_bytes(bucket.length, 4)
            else:
                mean = self._exchange(flat, residuals, density)
            for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
                tensor = parameters[parameter.index]
                tensor.grad = torch.from_numpy(mean[start : start + parameter.length]).view_as(tensor)
        nodes.optimizers[0].step()

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        total = np.zeros(len(flat[0]), np.float32)
        k = min(selected_count(len(total), density), len(total))
        for gradient, residual in zip(flat, residuals, strict=True):
            residual += gradient * np.float32(1 / self.options.nodes)
            indices, values = kernels.topk(residual, k)
            residual[indices] = 0
            payload = kernels.encode(indices, values, len(total), wire="bf16", residual=residual)
            indices, values = kernels.decode(payload, length=len(total))
            total[indices] += values.astype(np.float32)
        self.sent_bytes += (self.options.nodes - 1) * payload.size
        return total


class SimulatedGTopK(SimulatedHiTopK):
    """The largest entries of the sum of all nodes in bf16, a residual beside the gradient (gtopk)."""

    KIND: ClassVar[type[GlobalTop]] = TopTree

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        k = min(selected_count(len(flat[0]), density), len(flat[0]))
        for gradient, residual in zip(flat, residuals, strict=True):
            residual += gradient * np.float32(1 / self.options.nodes)
        parts, _ = exchange_top(self.KIND, residuals, k, "bf16")
        total = np.zeros(len(flat[0]), np.float32)
        total[parts[0].indices] = parts[0].values
        self.sent_bytes += sum(part.sent_bytes for part in parts) / self.options.nodes
        return total


class SimulatedOkTopK(SimulatedGTopK):
    """As gtopk, but each node adds up a region, and sends the largest sums to all (oktopk)."""

    KIND = SplitTop


class LocalAveraging(Rule):
    """Every node trains alone; every `period` steps the weights are averaged in bf16."""

    has_period = True

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        nodes.separate()
        self.weights = [parameter.detach().clone() for parameter in nodes.parameters(0)]
        """The weights that all nodes agree on: those after the last exchange."""
        self._exchanges = 0

    def step(self, step: int, loss_of: LossOf) -> None:
        for node in range(self.options.nodes):
            gradients = self.gradients(node, loss_of)
            for parameter, gradient in zip(self.nodes.parameters(node), gradients, strict=True):
                parameter.grad = gradient
            self.update(node, gradients)
        if (step + 1) % self.options.period == 0:
            self.exchange()

    def update(self, node: int, gradients: list[torch.Tensor]) -> None:
        """Let the node's own optimizer change the node's weights."""
        self.nodes.optimizers[node].step()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the drift of all tensors."""
        self._exchanges += 1
        is_measured = self._exchanges % MEASURE_EVERY == 1
        squares = torch.zeros(3, dtype=torch.float64)
        tensors = zip(self.weights, *(self.nodes.parameters(node) for node in range(self.options.nodes)), strict=True)
        for index, (weight, *own) in enumerate(tensors):
            drift = [parameter - weight for parameter in own]
            sent = self.compress(index, drift)
            weight += self.mean_of(index, sent)
            for parameter, moved, delivered in zip(own, drift, sent, strict=True):
                left = moved - delivered
                parameter.copy_(weight + left)
                if is_measured:
                    squares += torch.stack([(part * part).sum() for part in (moved, left, weight)]).double()
        if is_measured:
            self.guard_values.add(*(squares / self.options.nodes).tolist())

    def mean_of(self, index: int, sent: list[torch.Tensor]) -> torch.Tensor:
        """Return what the weights of tensor `index` move by, if nodes sent `sent`."""
        return torch.stack(sent).sum(0) / self.options.nodes

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what each node sends of its drift in tensor `index`; the rest stays in the node's weights."""
        self.sent_bytes += self.ring_bytes(drift[0].numel(), 2)
        return drift if self._is_whole(index) else [part.bfloat16().float() for part in drift]

    def _is_whole(self, index: int) -> bool:
        return False

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, weight in zip(self.nodes.parameters(0), self.weights, strict=True):
            parameter.copy_(weight)


class WeightFeedback(LocalAveraging):
    """Base: error feedback in the weights. Node i keeps x + e_i; it sends C(x_i - x); e_i is what C leaves.

    Close to CSER (Xie et al., 2020). For AdamW a node's second moment holds the noise of a smaller batch: it is divided
    by rho = sum v_i / sum v(mean gradient), clamped to [1, nodes], estimated per tensor from `PROBES` fixed entries.
    """

    PROBES: ClassVar[int] = 256
    PROBE_EVERY: ClassVar[int] = 16
    """Steps between two exchanges of probes: their bytes are counted."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        named = nodes.named(0)
        self._small = [parameter.small for parameter in named]
        self._adam = isinstance(nodes.optimizers[0], torch.optim.AdamW)
        generator = torch.Generator().manual_seed(0)
        self._entries = [torch.randperm(parameter.length, generator=generator)[: self.PROBES] for parameter in named]
        self._own = [[torch.zeros(len(entries)) for entries in self._entries] for _ in range(options.nodes)]
        self._mean = [torch.zeros(len(entries)) for entries in self._entries]
        self._ratio = [[1.0] * len(named) for _ in range(options.nodes)]
        self._step = 0

    def step(self, step: int, loss_of: LossOf) -> None:
        self._step = step
        self._seen: list[list[torch.Tensor]] = []
        rows = [self.gradients(node, loss_of) for node in range(self.options.nodes)]
        if self._adam:
            self._probe(rows)
        for node, gradients in enumerate(rows):
            for parameter, gradient in zip(self.nodes.parameters(node), gradients, strict=True):
                parameter.grad = gradient
            self.update(node, gradients)
        if (step + 1) % self.options.period == 0:
            self.exchange()

    def _probe(self, rows: list[list[torch.Tensor]]) -> None:
        """Follow the second moments of a few entries: those of each node's gradient and those of the mean gradient."""
        if self._step % self.PROBE_EVERY:
            return
        beta = 0.9
        for index, entries in enumerate(self._entries):
            parts = [row[index].reshape(-1)[entries] for row in rows]
            mean = torch.stack(parts).mean(0)
            self._mean[index].mul_(beta).addcmul_(mean, mean, value=1 - beta)
            for node, part in enumerate(parts):
                own = self._own[node][index]
                own.mul_(beta).addcmul_(part, part, value=1 - beta)
                ratio = float(own.sum() / self._mean[index].sum().clamp_min(1e-30))
                self._ratio[node][index] = min(max(ratio, 1.0), float(self.options.nodes))
            self.sent_bytes += (self.options.nodes - 1) * 2 * len(entries)

    @torch.no_grad()
    def update(self, node: int, gradients: list[torch.Tensor]) -> None:
        optimizer = self.nodes.optimizers[node]
        if not self._adam:
            optimizer.step()
            return
        group = optimizer.param_groups[0]
        first, second = group["betas"]
        for index, (parameter, gradient) in enumerate(zip(self.nodes.parameters(node), gradients, strict=True)):
            state = optimizer.state[parameter]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            scale = self._ratio[node][index] * (1 - second ** state["step"])
            denominator = (state["exp_avg_sq"] / scale).sqrt_().add_(group["eps"])
            parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - first ** state["step"]))

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._small[index]:
            self.sent_bytes += self.ring_bytes(drift[0].numel(), 2)
            return [part.bfloat16().float() for part in drift]
        sent = [self.compress_one(part.reshape(-1)).view_as(part) for part in drift]
        self.sent_bytes += (self.options.nodes - 1) * self.payload_bytes(drift[0].numel())
        return sent

    def compress_one(self, drift: torch.Tensor) -> torch.Tensor:
        """Return what a node sends of a large tensor's drift (1-D)."""
        raise NotImplementedError

    def payload_bytes(self, elements: int) -> float:
        """Return the bytes of one node's message for a large tensor."""
        raise NotImplementedError


class SignWeights(WeightFeedback):
    """One bit per element and a bf16 scale per block of 256, error feedback in the weights."""

    has_period = True

    def compress_one(self, drift: torch.Tensor) -> torch.Tensor:
        return signs(drift)

    def payload_bytes(self, elements: int) -> float:
        return elements / 8 + 2 * -(-elements // BLOCK)


class SignWeightsTwoStage(SignWeights):
    """As sign-weights; owners of segments compress the mean again, and keep what that leaves."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._owed = [torch.zeros_like(weight) for weight in self.weights]

    def mean_of(self, index: int, sent: list[torch.Tensor]) -> torch.Tensor:
        total = self._owed[index] + super().mean_of(index, sent)
        mean = total.bfloat16().float() if self._small[index] else signs(total.reshape(-1)).view_as(total)
        self._owed[index] = total - mean
        return mean

    def payload_bytes(self, elements: int) -> float:
        return 2 / self.options.nodes * super().payload_bytes(elements)


class TopKWeights(WeightFeedback):
    """Top-k of each tensor in bf16, error feedback in the weights."""

    has_period = True
    has_density = True

    def compress_one(self, drift: torch.Tensor) -> torch.Tensor:
        k = min(selected_count(drift.numel(), self.options.density), drift.numel())
        indices = torch.topk(drift.abs(), k, sorted=False).indices
        return torch.zeros_like(drift).index_copy_(0, indices, drift[indices].bfloat16().float())

    def payload_bytes(self, elements: int) -> float:
        return 4.0 * min(selected_count(elements, self.options.density), elements)


class TopSignWeights(WeightFeedback):
    """The signs of the largest tenth, a bf16 scale per 256 of them, error feedback in the weights (topk1bit)."""

    has_period = True

    def compress_one(self, drift: torch.Tensor) -> torch.Tensor:
        return sent_by(TopSigns([slice(0, drift.numel())]), drift)

    def payload_bytes(self, elements: int) -> float:
        return float(TopSigns([slice(0, elements)]).row_bytes)


class SparseLoCo(LocalAveraging):
    """The largest 1/32 of the changes with two bits each, error feedback in the weights (sparseloco)."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._small = [parameter.small for parameter in nodes.named(0)]

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._small[index]:
            return super().compress(index, drift)
        codec = TopLevels([slice(0, drift[0].numel())])
        self.sent_bytes += (self.options.nodes - 1) * codec.row_bytes
        return [self._sent(codec, part) for part in drift]

    @staticmethod
    def _sent(codec: TopLevels, drift: torch.Tensor) -> torch.Tensor:
        row, sent = np.zeros(codec.row_bytes, np.uint8), np.zeros(drift.numel(), np.float32)
        codec.pack(drift.reshape(-1).numpy().copy(), row)
        codec.unpack_add(sent, [row], [1.0])
        return torch.from_numpy(sent).view_as(drift)


class DiLoCo(LocalAveraging):
    """Local averaging in bf16 with Nesterov momentum of the mean change (Douillard et al., 2023)."""

    LEARNING_RATE: ClassVar[float] = 0.7
    MOMENTUM: ClassVar[float] = 0.9

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._momentum = [torch.zeros_like(weight) for weight in self.weights]

    def mean_of(self, index: int, sent: list[torch.Tensor]) -> torch.Tensor:
        change, momentum = super().mean_of(index, sent), self._momentum[index]
        momentum.mul_(self.MOMENTUM).add_(change)
        return self.LEARNING_RATE * (change + self.MOMENTUM * momentum)


class SignResidual(SimulatedHiTopK):
    """One bit per element with the residual beside the gradient: the control of sign-weights."""

    has_density = False

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        total = np.zeros(len(flat[0]), np.float32)
        for gradient, residual in zip(flat, residuals, strict=True):
            residual += gradient * np.float32(1 / self.options.nodes)
            sent = signs(torch.from_numpy(residual)).numpy()
            residual -= sent
            total += sent
        self.sent_bytes += (self.options.nodes - 1) * (len(total) / 8 + 2 * -(-len(total) // BLOCK))
        return total


class PowerSGD(Rule):
    """Low rank with error feedback (Vogels et al., 2019), rank 4, warm start of the factors."""

    RANK: ClassVar[int] = 4

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._small = [parameter.small for parameter in nodes.named(0)]
        self._errors: dict[tuple[int, int], torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}

    def step(self, step: int, loss_of: LossOf) -> None:
        count = self.options.nodes
        rows = [self.gradients(node, loss_of) for node in range(count)]
        for index, parameter in enumerate(self.nodes.parameters(0)):
            parts = [row[index] for row in rows]
            if self._small[index] or step < self.options.warmup_steps:
                parameter.grad = torch.stack(parts).sum(0) / count
                self.sent_bytes += self.ring_bytes(parameter.numel(), 4)
            else:
                parameter.grad = self._low_rank(index, parts).view_as(parameter)
        self.nodes.optimizers[0].step()

    def _low_rank(self, index: int, parts: list[torch.Tensor]) -> torch.Tensor:
        matrices = [part.reshape(part.shape[0], -1) for part in parts]
        matrices = [m + self._errors.get((index, node), 0) for node, m in enumerate(matrices)]
        rows, columns = matrices[0].shape
        rank = min(self.RANK, rows, columns)
        q = self._factors.get(index)
        if q is None:
            start = np.random.default_rng([columns, rank]).random((columns, rank)) - 0.5
            q = torch.from_numpy(start.astype(np.float32))
        mean, sent = self._approximate(index, matrices, q)
        for node, matrix in enumerate(matrices):
            self._errors[index, node] = matrix - mean
        self.sent_bytes += self.ring_bytes(sent, 4)
        return mean

    def _approximate(self, index: int, matrices: list[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the approximation of the mean of all nodes' matrices, and how many values a factor has. `last` is what
        this method left in `_factors`."""
        p = torch.linalg.qr(sum(m @ last for m in matrices) / self.options.nodes).Q
        q = self._factors[index] = sum(m.T @ p for m in matrices) / self.options.nodes
        return p @ q.T, p.numel() + q.numel()


class AcpSGD(PowerSGD):
    """Low rank with error feedback, one factor per step in turn (Zhang et al., 2023), rank 4."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._had_rows: dict[int, bool] = {}

    def _approximate(self, index: int, matrices: list[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, int]:
        whole, given = sum(matrices) / self.options.nodes, torch.linalg.qr(last).Q
        had_rows = self._had_rows[index] = not self._had_rows.get(index, True)
        sent = self._factors[index] = whole.T @ given if had_rows else whole @ given
        return given @ sent.T if had_rows else sent @ given.T, sent.numel()


def signs(values: torch.Tensor) -> torch.Tensor:
    """Return sign(x) * mean |x| of each block of 256 entries of the 1-D tensor, the mean rounded to bf16."""
    return sent_by(Signs([slice(0, values.numel())]), values)


def sent_by(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what the codec of a real run sends of the 1-D tensor."""
    row, sent = np.zeros(codec.row_bytes, np.uint8), np.zeros(values.numel(), np.float32)
    codec.pack(values.numpy().copy(), row)
    codec.unpack_add(sent, [row], [1.0])
    return torch.from_numpy(sent)


RULES: dict[str, type[Rule]] = {
    "dense": Dense,
    "hitopk": SimulatedHiTopK,
    "gtopk": SimulatedGTopK,
    "oktopk": SimulatedOkTopK,
    "powersgd": PowerSGD,
    "acpsgd": AcpSGD,
    "local-averaging": LocalAveraging,
    "sign-weights": SignWeights,
    "sign-weights-two-stage": SignWeightsTwoStage,
    "topk-weights": TopKWeights,
    "topk1bit": TopSignWeights,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
    "sign-residual": SignResidual,
}
"""The rules by name."""
