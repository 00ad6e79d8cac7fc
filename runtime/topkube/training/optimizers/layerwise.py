"""The common part of LARS and LAMB: the step over groups, the choice of adapted tensors, the trust ratio, and the
correction of norms for the noise of a node's gradient."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from topkube.errors import ArgumentError
from topkube.training.node_weights.gradient_noise import NoiseCorrection
from topkube.world import World


@dataclass(frozen=True)
class NoisyGradients:
    """The noise of the gradients of a step. With the mean gradients of all nodes, all ratios are 1. With the
    gradients of one of `nodes` nodes, `ratios` holds rho by tensor (node_weights/gradient_noise.py), and `ranks` are
    the ranks that have the same gradients; None stands for all ranks."""

    ratios: Mapping[torch.Tensor, float] = field(default_factory=dict)
    nodes: int = 1
    ranks: World | None = None

    def list_ratios(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Return rho of each tensor."""
        return [self.ratios.get(tensor, 1.0) for tensor in tensors]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates all tensors of a group at once."""

    noise = NoisyGradients()
    """The noise of the gradients of the current step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ArgumentError for complex parameters."""
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            raise ArgumentError(
                f"{type(self).__name__} does not train complex parameters",
                cause="its moments are float32, so a step would drop the imaginary part of the gradients",
                next_step="use torch.optim.Adam or SGD for them, or view them as real numbers (torch.view_as_real)",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all groups. `closure` is called first, with gradients on; the step returns its result."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Its float32 moments stay as they are: torch would cast them to the
        dtype of their parameters, which may have 16 bits."""
        super().load_state_dict(state_dict)
        saved_ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                device = torch.device("cpu") if name == "step" else parameter.device  # a count is read in every step
                self.state[parameter][name] = value.to(device, torch.float32, copy=True)

    @abstractmethod
    def _update(self, group: dict[str, Any]) -> None: ...


class LayerwiseNoise(NoiseCorrection):
    """The correction for `optimizer` on a node: LARS and LAMB then use the norms that they would have with the mean
    gradient of all `nodes` nodes. With `parallel`, the ranks of the node (`ranks`) share the norms; None stands for all
    ranks."""

    def __init__(self, optimizer: LayerwiseOptimizer, nodes: int, ranks: World | None) -> None:
        self._optimizer, self._nodes, self._ranks = optimizer, nodes, ranks

    @contextmanager
    def corrected(self, ratios: Mapping[torch.Tensor, float]) -> Iterator[None]:
        """Return a context in which the optimizer's step uses `ratios`."""
        earlier_noise = self._optimizer.noise
        self._optimizer.noise = NoisyGradients(ratios, self._nodes, self._ranks)
        try:
            yield
        finally:
            self._optimizer.noise = earlier_noise


def compute_ratio_of_mean(ratio: float, share: float, nodes: int) -> float:
    """Return rho of a running mean of gradients from `ratio`, the rho of the gradients themselves.

    Let the squares of a node's gradient be 1 + n: those of its mean over time, and those of its noise. The gradient of
    all nodes then has 1 + n / nodes, because the noise of nodes is independent, and rho is (1 + n) / (1 + n / nodes). A
    running mean keeps the 1 and a `share` of the noise, which is independent between steps."""
    noise, signal = ratio - 1, 1 - ratio / nodes  # both times the same factor: n = noise / signal
    return (signal + share * noise) / (signal + share * noise / nodes) if noise > 0 else 1.0


def compute_noise_share(beta: float, steps: int) -> float:
    """Return the share of independent noise that is left, in squares, in a running mean with decay `beta` after `steps`
    steps, with correction for its start."""
    return (1 - beta) / (1 + beta) * (1 + beta**steps) / (1 - beta**steps)


def evaluate_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of the closure of an optimizer's `step`; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_adapted(parameter: torch.Tensor) -> bool:
    """Return True if a parameter has more than one dimension. Biases and the weights of norms are neither adapted nor
    decayed, as in the code of both papers' authors."""
    return parameter.ndim > 1


def compute_trust_ratio(weight: float, update: float) -> float:
    """Return weight / update; 1 if one of the norms is 0 or not finite."""
    return weight / update if weight > 0 and 0 < update < math.inf and weight < math.inf else 1.0


def check_range(name: str, value: float, *, least: float = 0.0, below: float = math.inf) -> None:
    """Raise ArgumentError unless least <= value < below."""
    if not least <= value < below:
        limit = f"at least {least:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentError(f"{name} = {value} must be {limit}", next_step=f"choose another {name}")


def list_with_gradients(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the group's parameters that have a gradient, with the adapted parameters first, and their gradients."""
    tensors: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
    tensors.sort(key=lambda p: not is_adapted(p))
    return tensors, [p.grad for p in tensors if p.grad is not None]


def list_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return a state tensor for each parameter; new tensors are float32 zeros."""
    for parameter in parameters:
        if name not in optimizer.state[parameter]:
            optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)
    return [optimizer.state[parameter][name] for parameter in parameters]
