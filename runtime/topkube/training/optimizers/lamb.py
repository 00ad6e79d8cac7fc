"""LAMB: Adam with layer-wise trust ratios, as fused multi-tensor operations (You et al., "Large Batch Optimization for
Deep Learning: Training BERT in 76 minutes", 2020, Algorithm 2)."""

from __future__ import annotations

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


class LAMB(LayerwiseOptimizer):
    """Adam's direction r = m / (sqrt(v) + eps) + weight_decay * w, both moments corrected for their start, scaled per
    layer by |w| / |r|.

    Tensors of at most one dimension make Adam's steps with `lr`, without decay. `parallel` has the same meaning as in
    LARS. Moments are float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        parallel: bool = False,
    ) -> None:
        check_range("lr", lr)
        for beta in betas:
            check_range("betas", beta, below=1.0)
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        self.parallel = parallel
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "steps": 0})

    def _update(self, group: dict[str, Any]) -> None:
        weights, gradients = list_with_gradients(group)
        if not weights:
            return
        group["steps"] += 1
        first, second = group["betas"]
        gradients = [gradient.float() for gradient in gradients]
        means, squares = list_state(self, weights, "mean"), list_state(self, weights, "square")
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_div(squares, 1 - second ** group["steps"])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        update = list(torch._foreach_div(means, 1 - first ** group["steps"]))
        torch._foreach_div_(update, roots)
        layers = sum(is_adapted(weight) for weight in weights)
        if group["weight_decay"] and layers:
            torch._foreach_add_(
                update[:layers], [weight.float() for weight in weights[:layers]], alpha=group["weight_decay"]
            )
        weight_norms, update_norms = compute_norms(weights[:layers], update[:layers], parallel=self.parallel)
        rates = [group["lr"] * compute_trust_ratio(w, u) for w, u in zip(weight_norms, update_norms, strict=True)]
        rates += [group["lr"]] * (len(weights) - layers)
        torch._foreach_mul_(update, rates)
        torch._foreach_sub_(weights, update)
