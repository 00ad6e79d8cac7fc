"""The base of all exchange rules: the simulated nodes, the settings of a rule, and what a codec sends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from topkube.collectives.codecs import Codec, Signs
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.guard import DriftGuard

LossFunction = Callable[[int, torch.nn.Module], torch.Tensor]
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

    def add(self, change: float, unsent: float, agreed: float) -> None:
        """Add a measurement: the mean squares of nodes of the change before an exchange, of its unsent part after it,
        and the squares of the agreed weights."""
        guard = DriftGuard(1, "")
        guard.check_drift(change, unsent, agreed)
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

    def list_parameters(self, node: int) -> list[torch.nn.Parameter]:
        return list(self.models[node].parameters())

    def list_named_parameters(self, node: int) -> list[Parameter]:
        """Return the parameters with their lengths, as the training loop sees them."""
        pairs = zip(self._names, self.list_parameters(node), strict=True)
        return [Parameter(index, name, tensor) for index, (name, tensor) in enumerate(pairs)]

    def get_agreed_model(self) -> torch.nn.Module:
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

    def step(self, step: int, compute_loss: LossFunction) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Put the weights that all nodes agree on into node 0."""

    def compute_gradients(self, node: int, compute_loss: LossFunction) -> list[torch.Tensor]:
        """Return the node's gradients at its own weights."""
        model = self.nodes.models[node if len(self.nodes.models) > 1 else 0]
        return list(torch.autograd.grad(compute_loss(node, model), list(model.parameters())))

    def count_ring_bytes(self, elements: int, width: int) -> float:
        """Return the bytes that one node sends in a dense all-reduce of `elements` of `width` bytes."""
        return 2 * (self.options.nodes - 1) / self.options.nodes * elements * width


def apply_signs(values: torch.Tensor) -> torch.Tensor:
    """Return sign(x) * mean |x| of each block of 256 entries of the 1-D tensor, the mean rounded to bf16."""
    return apply_codec(Signs([slice(0, values.numel())]), values)


def apply_codec(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what the codec of a real run sends of the 1-D tensor."""
    row, sent = np.zeros(codec.row_bytes, np.uint8), np.zeros(values.numel(), np.float32)
    codec.pack(values.numpy().copy(), row)
    codec.unpack_add(sent, [row], [1.0])
    return torch.from_numpy(sent)
