"""Rules that send changes of weights. Nodes train alone for a period; the rest of a change stays in their weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from simulated_rules.rule import BLOCK, LossFunction, Nodes, Rule, RuleOptions, apply_codec, apply_signs
from topkube.collectives.sparse import count_selected
from topkube.collectives.top_levels import TopLevels
from topkube.collectives.top_signs import TopSigns
from topkube.collectives.two_stage import MOST_TIMES
from topkube.training.node_weights.guard import MEASURE_EVERY
from topkube.training.optimizers.layerwise import LayerwiseNoise, LayerwiseOptimizer


class LocalAveraging(Rule):
    """Every node trains alone; every `period` steps the weights are averaged in bf16."""

    has_period = True
    is_delayed: ClassVar[bool] = False
    """True if what other nodes send is applied one step later, after the gradients of that step were computed."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        nodes.separate()
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters, and their weights after the exchange that is under way."""
        self.weights = [parameter.detach().clone() for parameter in nodes.list_parameters(0)]
        """The weights that all nodes agree on: those after the last exchange."""
        self._exchanges = 0

    def step(self, step: int, compute_loss: LossFunction) -> None:
        for node in range(self.options.nodes):
            gradients = self.compute_gradients(node, compute_loss)
            for parameter, gradient in zip(self.nodes.list_parameters(node), gradients, strict=True):
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
        tensors = zip(
            self.weights, *(self.nodes.list_parameters(node) for node in range(self.options.nodes)), strict=True
        )
        for index, (weight, *own) in enumerate(tensors):
            drift = [parameter - weight for parameter in own]
            change, sent, unsent = self.exchange_tensor(index, drift)
            weight += change
            for parameter, delivered, rest in zip(own, sent, unsent, strict=True):
                self._arriving.append((parameter, weight + rest))
                if is_measured:
                    of_sent, of_rest, of_weight = ((part * part).sum().double() for part in (delivered, rest, weight))
                    squares += torch.stack([of_sent + of_rest, of_rest, of_weight])
        if is_measured:
            self.guard_values.add(*(squares / self.options.nodes).tolist())
        if not self.is_delayed:
            self.apply_arriving()

    @torch.no_grad()
    def apply_arriving(self) -> None:
        """Write the weights after the last exchange into the parameters."""
        for parameter, weights in self._arriving:
            parameter.copy_(weights)
        self._arriving.clear()

    def exchange_tensor(
        self, index: int, drift: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return the change of the agreed weights of tensor `index`, and what each node sends and keeps."""
        sent = self.compress(index, drift)
        unsent = [before - delivered for before, delivered in zip(drift, sent, strict=True)]
        return self.average(index, sent), sent, unsent

    def average(self, index: int, sent: list[torch.Tensor]) -> torch.Tensor:
        """Return the change of the agreed weights of tensor `index`. Each node sent one entry of `sent`."""
        return torch.stack(sent).sum(0) / self.options.nodes

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what each node sends of its drift in tensor `index`; the rest stays in the node's weights."""
        self.sent_bytes += self.count_ring_bytes(drift[0].numel(), 2)
        return [part.bfloat16().float() for part in drift]

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, weight in zip(self.nodes.list_parameters(0), self.weights, strict=True):
            parameter.copy_(weight)


class WeightFeedback(LocalAveraging):
    """Base of rules with error feedback in the weights. x are the agreed weights, and x_i are the weights of node i.
    Node i sends C(x_i - x). What C leaves out, e_i, stays: the node continues from x + e_i.

    This is close to CSER (Xie et al., 2020). With AdamW, a node's second moment has the noise of a smaller batch, so it
    is divided by rho = sum v_i / sum v(mean gradient), clamped to [1, nodes]. rho is estimated for each tensor from
    `PROBES` fixed entries. LARS and LAMB correct their norms with rho, as in real runs.
    """

    PROBES: ClassVar[int] = 256
    PROBE_EVERY: ClassVar[int] = 16
    """Steps between two exchanges of probes: their bytes are counted."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        named = nodes.list_named_parameters(0)
        self._small = [parameter.is_always_dense for parameter in named]
        self._reads_ratios = isinstance(nodes.optimizers[0], torch.optim.AdamW | LayerwiseOptimizer)
        generator = torch.Generator().manual_seed(0)
        self._entries = [torch.randperm(parameter.length, generator=generator)[: self.PROBES] for parameter in named]
        # Running means of the squares of these entries: of each node's gradient, and of the mean gradient.
        self._own = [[torch.zeros(len(entries)) for entries in self._entries] for _ in range(options.nodes)]
        self._mean = [torch.zeros(len(entries)) for entries in self._entries]
        # rho of each node and tensor.
        self._ratio = [[1.0] * len(named) for _ in range(options.nodes)]
        self._step = 0

    def step(self, step: int, compute_loss: LossFunction) -> None:
        self._step = step
        rows = [self.compute_gradients(node, compute_loss) for node in range(self.options.nodes)]
        self.apply_arriving()
        if self._reads_ratios:
            self._probe(rows)
        for node, gradients in enumerate(rows):
            for parameter, gradient in zip(self.nodes.list_parameters(node), gradients, strict=True):
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
        optimizer, ratios = self.nodes.optimizers[node], self._ratio[node]
        if isinstance(optimizer, LayerwiseOptimizer):
            by_tensor = dict(zip(self.nodes.list_parameters(node), ratios, strict=True))
            with LayerwiseNoise(optimizer, self.options.nodes, None).corrected(by_tensor):
                optimizer.step()
        elif isinstance(optimizer, torch.optim.AdamW):
            self._step_adamw(optimizer, self.nodes.list_parameters(node), gradients, ratios)
        else:
            optimizer.step()

    @staticmethod
    def _step_adamw(
        optimizer: torch.optim.AdamW,
        parameters: list[torch.nn.Parameter],
        gradients: list[torch.Tensor],
        ratios: list[float],
    ) -> None:
        """Make a step of AdamW that divides second moments by `ratios`."""
        group = optimizer.param_groups[0]
        first, second = group["betas"]
        for parameter, gradient, ratio in zip(parameters, gradients, ratios, strict=True):
            state = optimizer.state[parameter]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            scale = ratio * (1 - second ** state["step"])
            denominator = (state["exp_avg_sq"] / scale).sqrt_().add_(group["eps"])
            parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - first ** state["step"]))

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._small[index]:
            self.sent_bytes += self.count_ring_bytes(drift[0].numel(), 2)
            return [part.bfloat16().float() for part in drift]
        sent = [self.compress_drift(part.reshape(-1)).view_as(part) for part in drift]
        self.sent_bytes += (self.options.nodes - 1) * self.count_payload_bytes(drift[0].numel())
        return sent

    def compress_drift(self, drift: torch.Tensor) -> torch.Tensor:
        """Return what a node sends of a large tensor's drift (1-D)."""
        raise NotImplementedError

    def count_payload_bytes(self, elements: int) -> float:
        """Return the bytes of one node's message for a large tensor."""
        raise NotImplementedError


class SignWeights(WeightFeedback):
    """One bit per element and a bf16 scale per block of 256, error feedback in the weights."""

    has_period = True

    def compress_drift(self, drift: torch.Tensor) -> torch.Tensor:
        return apply_signs(drift)

    def count_payload_bytes(self, elements: int) -> float:
        return elements / 8 + 2 * -(-elements // BLOCK)


class DelayedSignWeights(SignWeights):
    """A rule like sign-weights, whose exchange is applied one step later: it overlaps with forward and backward."""

    is_delayed = True


class SignWeightsTwoStage(SignWeights):
    """A rule like sign-weights, in which owners of segments compress the mean again and keep the rest in their weights
    (topkube/collectives/two_stage.py)."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._owed = [torch.zeros_like(weight) for weight in self.weights]
        self._owners = self._find_owners()
        self._times = min(float(options.nodes), MOST_TIMES)

    def _find_owners(self) -> list[torch.Tensor]:
        """Return the number of the owner of each element. Large and small tensors are one vector each, in which every
        tensor begins with a block. This is so in real runs with one rank per node, if either vector has at most 25
        MiB."""
        starts, ends = [], {False: 0, True: 0}
        for weight, is_small in zip(self.weights, self._small, strict=True):
            starts.append(ends[is_small])
            ends[is_small] += -(-weight.numel() // BLOCK)
        owners = []
        for weight, is_small, start in zip(self.weights, self._small, starts, strict=True):
            bounds = torch.tensor([ends[is_small] * node // self.options.nodes for node in range(self.options.nodes)])
            blocks = start + torch.arange(weight.numel()) // BLOCK
            owners.append((torch.searchsorted(bounds, blocks, right=True) - 1).view_as(weight))
        return owners

    def exchange_tensor(
        self, index: int, drift: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        is_own = [self._owners[index] == node for node in range(self.options.nodes)]
        sent = self.compress(index, drift)
        sent = [torch.where(own, whole, part) for own, whole, part in zip(is_own, drift, sent, strict=True)]
        mean = self._owed[index] + self.average(index, sent)
        change = mean.bfloat16().float() if self._small[index] else apply_signs(mean.reshape(-1)).view_as(mean)
        rest = mean - change
        self._owed[index] = rest * (1 - self._times / self.options.nodes)
        unsent = [
            torch.where(own, self._times * rest, before - delivered)
            for own, before, delivered in zip(is_own, drift, sent, strict=True)
        ]
        return change, sent, unsent

    def count_payload_bytes(self, elements: int) -> float:
        return 2 / self.options.nodes * super().count_payload_bytes(elements)


class TopKWeights(WeightFeedback):
    """Top-k of each tensor in bf16, error feedback in the weights."""

    has_period = True
    has_density = True

    def compress_drift(self, drift: torch.Tensor) -> torch.Tensor:
        k = min(count_selected(drift.numel(), self.options.density), drift.numel())
        indices = torch.topk(drift.abs(), k, sorted=False).indices
        return torch.zeros_like(drift).index_copy_(0, indices, drift[indices].bfloat16().float())

    def count_payload_bytes(self, elements: int) -> float:
        return 4.0 * min(count_selected(elements, self.options.density), elements)


class TopSignWeights(WeightFeedback):
    """The signs of the largest tenth, a bf16 scale per 256 of them, error feedback in the weights (topk1bit)."""

    has_period = True

    def compress_drift(self, drift: torch.Tensor) -> torch.Tensor:
        return apply_codec(TopSigns([slice(0, drift.numel())]), drift)

    def count_payload_bytes(self, elements: int) -> float:
        return float(TopSigns([slice(0, elements)]).row_bytes)


class SimulatedSparseLoCo(LocalAveraging):
    """The largest 1/32 of the changes with two bits each, error feedback in the weights (sparseloco)."""

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._small = [parameter.is_always_dense for parameter in nodes.list_named_parameters(0)]

    def compress(self, index: int, drift: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._small[index]:
            return super().compress(index, drift)
        codec = TopLevels([slice(0, drift[0].numel())])
        self.sent_bytes += (self.options.nodes - 1) * codec.row_bytes
        return [apply_codec(codec, part.reshape(-1)).view_as(part) for part in drift]


class DiLoCo(LocalAveraging):
    """Local averaging in bf16 with Nesterov momentum of the mean change (Douillard et al., 2023)."""

    LEARNING_RATE: ClassVar[float] = 0.7
    MOMENTUM: ClassVar[float] = 0.9

    def __init__(self, nodes: Nodes, options: RuleOptions) -> None:
        super().__init__(nodes, options)
        self._momentum = [torch.zeros_like(weight) for weight in self.weights]

    def average(self, index: int, sent: list[torch.Tensor]) -> torch.Tensor:
        change, momentum = super().average(index, sent), self._momentum[index]
        momentum.mul_(self.MOMENTUM).add_(change)
        return self.LEARNING_RATE * (change + self.MOMENTUM * momentum)
