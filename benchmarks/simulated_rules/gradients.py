"""Rules that send gradients. What a node does not send stays in a residual beside its gradient."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from message_network import exchange_top
from simulated_rules.rule import BLOCK, LossFunction, Nodes, Rule, RuleOptions, apply_signs
from topkube import kernels
from topkube.collectives.codecs import Integers
from topkube.collectives.global_top import GlobalTop, TopTree
from topkube.collectives.sparse import count_selected
from topkube.collectives.split_top import SplitTop
from topkube.collectives.two_stage import TwoStage
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.fusion import fill_buckets


class Dense(Rule):
    """All-reduce of the gradients in float32: the reference."""

    def step(self, step: int, compute_loss: LossFunction) -> None:
        nodes, count = self.nodes, self.options.nodes
        rows = [self.compute_gradients(node, compute_loss) for node in range(count)]
        for parameter, gradients in zip(nodes.list_parameters(0), zip(*rows, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / count
            self.sent_bytes += self.count_ring_bytes(parameter.numel(), 4)
        nodes.optimizers[0].step()


class SimulatedHiTopK(Rule):
    """Top-k of each bucket, a residual beside the gradient, all-gather in bf16: `hitopk` as real ranks run it."""

    has_density = True

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._buckets: list[Bucket] = []
        self._residuals: list[list[np.ndarray]] = []
        self._aggregation = AggregationSettings("hitopk", options.density, options.warmup_steps, "bf16", "topk")

    def step(self, step: int, compute_loss: LossFunction) -> None:
        nodes, count = self.nodes, self.options.nodes
        rows = [self.compute_gradients(node, compute_loss) for node in range(count)]
        if not self._buckets:
            self._buckets = fill_buckets(reversed(nodes.list_named_parameters(0)))
            self._residuals = [[np.zeros(b.length, np.float32) for _ in range(count)] for b in self._buckets]
        density = self._aggregation.density_at(step)
        parameters = nodes.list_parameters(0)
        for bucket, residuals in zip(self._buckets, self._residuals, strict=True):
            flat = [
                torch.cat([row[parameter.index].reshape(-1) for parameter in bucket.parameters]).numpy() for row in rows
            ]
            if bucket.is_always_dense or self._is_whole(step, density):
                mean = np.sum(flat, axis=0) / np.float32(count)
                self.sent_bytes += self.count_ring_bytes(bucket.length, 4)
            else:
                mean = self._exchange(flat, residuals, density)
            for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
                tensor = parameters[parameter.index]
                tensor.grad = torch.from_numpy(mean[start : start + parameter.length]).view_as(tensor)
        nodes.optimizers[0].step()

    def _is_whole(self, step: int, density: float) -> bool:
        """Return True if the warm-up sends the whole gradient in this step."""
        return density == 1

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        total = np.zeros(len(flat[0]), np.float32)
        k = min(count_selected(len(total), density), len(total))
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
        k = min(count_selected(len(flat[0]), density), len(flat[0]))
        for gradient, residual in zip(flat, residuals, strict=True):
            residual += gradient * np.float32(1 / self.options.nodes)
        parts, _ = exchange_top(self.KIND, residuals, k, "bf16")
        total = np.zeros(len(flat[0]), np.float32)
        total[parts[0].indices] = parts[0].values
        self.sent_bytes += sum(part.sent_bytes for part in parts) / self.options.nodes
        return total


class SimulatedOkTopK(SimulatedGTopK):
    """A rule like gtopk, in which each node adds up a region and sends the largest sums to all nodes (oktopk)."""

    KIND = SplitTop


class AllEntries(SimulatedHiTopK):
    """Base of rules that send all entries in fewer bits, with the residual beside the gradient. A warm-up is one dense
    step, as in real runs."""

    has_density = False

    def _is_whole(self, step: int, density: float) -> bool:
        return step < min(1, self.options.warmup_steps)


class Int4(AllEntries):
    """Squares of integers of 4 bits in two stages, a residual beside the gradient (int4)."""

    BITS: ClassVar[int] = 4

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        count, length = self.options.nodes, len(flat[0])

        def get_codec(places: list[slice], length: int) -> Integers:
            return Integers(places, self.BITS)

        stages = [TwoStage(get_codec, [slice(0, length)], length, node, [1.0] * count) for node in range(count)]
        rows = []
        for stage, gradient, residual in zip(stages, flat, residuals, strict=True):
            residual += gradient * np.float32(1 / count)
            rows.append(stage.cut_rows(np.zeros(stage.total_bytes, np.uint8)))
            stage.pack(residual, rows[-1])
        sums = stages[0].cut_rows(np.zeros(stages[0].total_bytes, np.uint8))
        for owner, (stage, residual) in enumerate(zip(stages, residuals, strict=True)):
            stage.reduce(residual[stage.segment], [row[owner] for row in rows], sums[owner])
        total = np.zeros(length, np.float32)
        stages[0].add(total, sums)
        self.sent_bytes += 2 * (count - 1) / count * stages[0].total_bytes
        return total


class Int8(Int4):
    """Integers of 8 bits in two stages, a residual beside the gradient (int8)."""

    BITS = 8


class Int3(Int4):
    """Seven levels, 3 bits, with a unit for each 32 elements, in two stages, a residual beside the gradient (int3)."""

    BITS = 3


class SignResidual(AllEntries):
    """One bit per element with the residual beside the gradient: the control of sign-weights."""

    def _exchange(self, flat: list[np.ndarray], residuals: list[np.ndarray], density: float) -> np.ndarray:
        total = np.zeros(len(flat[0]), np.float32)
        for gradient, residual in zip(flat, residuals, strict=True):
            residual += gradient * np.float32(1 / self.options.nodes)
            sent = apply_signs(torch.from_numpy(residual)).numpy()
            residual -= sent
            total += sent
        self.sent_bytes += (self.options.nodes - 1) * (len(total) / 8 + 2 * -(-len(total) // BLOCK))
        return total


class PowerSGD(Rule):
    """Low rank with error feedback (Vogels et al., 2019), rank 4, a warm start of the factors (powersgd)."""

    RANK: ClassVar[int] = 4

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._small = [parameter.is_always_dense for parameter in nodes.list_named_parameters(0)]
        self._errors: dict[tuple[int, int], torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}

    def step(self, step: int, compute_loss: LossFunction) -> None:
        count = self.options.nodes
        rows = [self.compute_gradients(node, compute_loss) for node in range(count)]
        for index, parameter in enumerate(self.nodes.list_parameters(0)):
            parts = [row[index] for row in rows]
            if self._small[index] or step < self.options.warmup_steps:
                parameter.grad = torch.stack(parts).sum(0) / count
                self.sent_bytes += self.count_ring_bytes(parameter.numel(), 4)
            else:
                parameter.grad = self._exchange_factors(index, parts).view_as(parameter)
        self.nodes.optimizers[0].step()

    def _exchange_factors(self, index: int, parts: list[torch.Tensor]) -> torch.Tensor:
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
        self.sent_bytes += self.count_ring_bytes(sent, 4)
        return mean

    def _approximate(self, index: int, matrices: list[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the approximation of the mean of all nodes' matrices, and the number of values that a node
        sends. `last` is the factor that the last call stored in `_factors`."""
        p = torch.linalg.qr(sum(m @ last for m in matrices) / self.options.nodes).Q
        q = self._factors[index] = sum(m.T @ p for m in matrices) / self.options.nodes
        return p @ q.T, p.numel() + q.numel()


class PowerSGDRank2(PowerSGD):
    """A rule like powersgd, with rank 2."""

    RANK = 2


class PowerSGDRank1(PowerSGD):
    """A rule like powersgd, with rank 1."""

    RANK = 1


class AcpSGD(PowerSGD):
    """Low rank with error feedback, one factor per step in turn (Zhang et al., 2023), rank 4."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._has_row_factor: dict[int, bool] = {}
        """True for each parameter whose last factor has the rows of the matrix, False if it has the columns."""

    def _approximate(self, index: int, matrices: list[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, int]:
        mean, basis = sum(matrices) / self.options.nodes, torch.linalg.qr(last).Q
        has_row_factor = self._has_row_factor[index] = not self._has_row_factor.get(index, True)
        sent = self._factors[index] = mean.T @ basis if has_row_factor else mean @ basis
        return basis @ sent.T if has_row_factor else sent @ basis.T, sent.numel()
