"""LARS: layer-wise adaptive rates, as fused multi-tensor operations (You, Gitman and Ginsburg, "Large Batch Training of
Convolutional Networks", 2017, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from topkube.training.optimizers.layerwise import (
    LayerwiseOptimizer,
    check_range,
    compute_trust_ratio,
    is_adapted,
    list_state,
    list_with_gradients,
)
from topkube.training.optimizers.parallel_tensor import compute_norms


class LARS(LayerwiseOptimizer):
    """SGD with momentum whose rate is scaled per layer by trust * |w| / (|g| + weight_decay * |w|).

    lr: the global rate; trust: the paper's coefficient eta. Tensors of at most one dimension take plain momentum steps
    at `lr`, without decay. `parallel`: each rank computes the norms of its share of the layers (parallel_tensor.py);
    all ranks, or those of the world of a DistributedOptimizer, then call `step` together, with equal gradients.
    Momentum is float32.

    |g| is the norm of the mean gradient of all ranks. With error feedback in the weights, a node has only its own
    gradient, of which the norm is larger: onebit and topk1bit use |g| / sqrt(rho) (node_weights/gradient_noise.py), and
    `parallel` shares the norms among the ranks of the node. Without rho, all rates would be too small.

    A step is five fused operations over all layers and one wait for the norms.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        parallel: bool = False,
    ) -> None:
        check_range("lr", lr)
        check_range("momentum", momentum, below=1.0)
        check_range("weight_decay", weight_decay)
        check_range("trust", trust)
        self.parallel = parallel
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _update(self, group: dict[str, Any]) -> None:
        weights, gradients = list_with_gradients(group)
        if not weights:
            return
        layers = sum(is_adapted(weight) for weight in weights)
        decay, rate = group["weight_decay"], group["lr"]
        weight_norms, gradient_norms = compute_norms(
            weights[:layers], gradients[:layers], parallel=self.parallel, ranks=self.noise.ranks
        )
        ratios = self.noise.list_ratios(weights[:layers])
        gradient_norms = [norm / math.sqrt(ratio) for norm, ratio in zip(gradient_norms, ratios, strict=True)]
        rates = [
            rate * (group["trust"] * compute_trust_ratio(w, g + decay * w) if w > 0 and g > 0 else 1.0)
            for w, g in zip(weight_norms, gradient_norms, strict=True)
        ]
        rates += [rate] * (len(weights) - layers)
        update = [gradient.float() for gradient in gradients]
        if decay and layers:
            update[:layers] = torch._foreach_add(
                update[:layers], [weight.float() for weight in weights[:layers]], alpha=decay
            )
        velocities = list_state(self, weights, "momentum")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, torch._foreach_mul(update, rates))
        torch._foreach_sub_(weights, velocities)
