"""LAMB: Adam with layer-wise trust ratios, as fused multi-tensor operations (You et al., "Large Batch Optimization for
Deep Learning: Training BERT in 76 minutes", 2020, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from topkube.training.optimizers.layerwise import (
    LayerwiseOptimizer,
    check_range,
    compute_noise_share,
    compute_ratio_of_mean,
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

    With error feedback in the weights, a node has only its own gradient, and onebit and topk1bit use rho, its squares
    over those of the mean gradient (node_weights/gradient_noise.py). v becomes v / rho, as for Adam. |r| becomes the
    norm of the mean of all nodes' updates. Nodes agree on that mean, and its part of the noise is smaller: with |r| of
    the node, the mean would be shorter than |w|. The noise in r is that in m, of which the running mean has removed the
    most (`layerwise.compute_ratio_of_mean`). Noise that lasts longer than 1 / (1 - beta) steps counts as signal.
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

    def _count_steps(self, group: dict[str, Any], weights: list[torch.Tensor]) -> list[int]:
        """Count a step of each of the weights, which have gradients, and return their counts: a parameter that is
        trained later has the correction of its own start. The counts of older states are those of their groups."""
        counts = []
        for weight in weights:
            state = self.state[weight]
            if "step" not in state:
                state["step"] = torch.tensor(group["steps"] - 1 if "mean" in state else 0, dtype=torch.float32)
            state["step"] += 1
            counts.append(int(state["step"]))
        return counts

    def _update(self, group: dict[str, Any]) -> None:
        weights, gradients = list_with_gradients(group)
        if not weights:
            return
        group["steps"] += 1
        first, second = group["betas"]

        # Both moments, and Adam's directions.
        gradients = [gradient.float() for gradient in gradients]
        steps = self._count_steps(group, weights)
        means, squares = list_state(self, weights, "mean"), list_state(self, weights, "square")
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        ratios = self.noise.list_ratios(weights)
        roots = torch._foreach_div(squares, [(1 - second**n) * ratio for n, ratio in zip(steps, ratios, strict=True)])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        update = list(torch._foreach_div(means, [1 - first**n for n in steps]))
        torch._foreach_div_(update, roots)

        # The noise of the directions, and weight decay. Only the first `layers` tensors are adapted and decayed.
        layers = sum(is_adapted(weight) for weight in weights)
        mean_ratios = [
            compute_ratio_of_mean(ratio, compute_noise_share(first, n), self.noise.nodes)
            for n, ratio in zip(steps[:layers], ratios, strict=False)
        ]
        is_noisy = any(ratio != 1 for ratio in mean_ratios)
        directions = update[:layers]
        if group["weight_decay"] and layers:
            decays = [weight.float() for weight in weights[:layers]]
            if is_noisy:  # in new tensors: the norms of the directions are needed too
                update[:layers] = torch._foreach_add(directions, decays, alpha=group["weight_decay"])
            else:
                torch._foreach_add_(directions, decays, alpha=group["weight_decay"])

        # The rate of each layer.
        compute = partial(compute_norms, parallel=self.parallel, ranks=self.noise.ranks)
        if is_noisy:
            weight_norms, node_norms, direction_norms = compute(weights[:layers], update[:layers], directions)
            update_norms = [
                _compute_mean_norm(update_norm, direction_norm, ratio, self.noise.nodes)
                for update_norm, direction_norm, ratio in zip(node_norms, direction_norms, mean_ratios, strict=True)
            ]
        else:
            weight_norms, update_norms = compute(weights[:layers], update[:layers])
        rates = [group["lr"] * compute_trust_ratio(w, u) for w, u in zip(weight_norms, update_norms, strict=True)]
        rates += [group["lr"]] * (len(weights) - layers)
        torch._foreach_mul_(update, rates)
        torch._foreach_sub_(weights, update)


def _compute_mean_norm(update: float, direction: float, ratio: float, nodes: int) -> float:
    """Return the norm of the mean of all nodes' updates. `update` and `direction` are the norms of the node's update,
    with and without weight decay. Only the direction has noise: its squares are `ratio` times those of the mean. The
    mean of `nodes` updates has at least the squares that it would have if all of the update were noise."""
    squares = update**2 - direction**2 * (1 - 1 / ratio)
    return math.sqrt(max(squares, update**2 / nodes))
