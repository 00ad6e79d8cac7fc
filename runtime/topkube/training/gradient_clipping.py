"""Clipping of gradients by their norm, the same on all ranks."""

from __future__ import annotations

import math

import torch

from topkube.training.optimizer_parts import OptimizerParts, find_masters


def clip_gradients(parts: OptimizerParts, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm before. All ranks call this
    together (see `DistributedOptimizer.clip_grad_norm_`)."""
    backward, late = parts.backward, parts.late
    gradients = [p.tensor.grad for p in backward.parameters if p.tensor.grad is not None]
    if late is not None:
        norm = late.clip(max_norm, backward.world.rank == 0, gradients, backward.batches.agreement.sum)
        if norm is not None:
            return norm
        late.finish()

    if parts.node_weights is None:
        masters = find_masters(parts.inner)
        tensors = [p.tensor for p in backward.parameters] if masters is None else masters.master_parameters()
        return float(torch.nn.utils.clip_grad_norm_(tensors, max_norm))

    gradients = parts.node_weights.trained.list_gradients()
    squares = sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients)
    ranks = backward.world.size
    norm = math.sqrt(backward.batches.agreement.sum([squares / ranks])[0])
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # also if the norm is NaN: all gradients become NaN then, as with torch
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
