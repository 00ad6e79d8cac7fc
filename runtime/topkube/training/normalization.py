"""torch's SyncBatchNorm over TopKube's world: batch normalization with the statistics of all ranks' batches
(Ioffe and Szegedy, "Batch Normalization", 2015).

torch synchronizes over torch.distributed. Without it, SyncBatchNorm is BatchNorm: every rank normalizes by its own
batch, without a warning. `synchronize_batch_normalization` therefore replaces the forward of `torch.nn.SyncBatchNorm`.
If torch.distributed is initialized, or the world has one rank, the original forward runs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from topkube.errors import ArgumentError, WorldError
from topkube.training.batches.uneven_batches import find_batch_scale, is_replay_batch
from topkube.training.ranks.model_collectives import ModelCollectives, open_model_collectives
from topkube.world import World, current

_torch_forward = torch.nn.SyncBatchNorm.forward
_numbers = itertools.count()
_layers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of each layer: layers are numbered as they are first used, in the same order on all ranks."""


def synchronize_batch_normalization() -> None:
    """Make every `torch.nn.SyncBatchNorm` synchronize over the world of `topkube.init()`; a second call changes
    nothing."""
    torch.nn.SyncBatchNorm.forward = _forward  # type: ignore[method-assign, assignment]


@functools.wraps(_torch_forward)
def _forward(module: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    return _training_forward(module, input) if module.training else _torch_forward(module, input)


# torch.compile breaks the graph at a collective.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _training_forward(module: torch.nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    world = _find_world()
    return _torch_forward(module, x) if world is None else _normalize(module, x, open_model_collectives(world))


def _find_world() -> World | None:
    """Return the world over which layers synchronize; None to run torch's own forward."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return None
    try:
        world = current()
    except WorldError:
        return None
    return world if world.size > 1 else None


def _normalize(module: torch.nn.SyncBatchNorm, x: torch.Tensor, collectives: ModelCollectives) -> torch.Tensor:
    """Return the normalized x. x: (N, C, ...), any floating dtype and device; N may be 0 on some ranks."""
    module._check_input_dim(x)
    module._check_non_zero_input_channels(x)
    if module not in _layers:
        _layers[module] = next(_numbers)
    layer = f"SyncBatchNorm number {_layers[module]} of {x.shape[1]} channels"
    count = 0 if is_replay_batch() else x.numel() // x.shape[1]
    total, mean, variance = _compute_statistics(x.detach(), count, collectives, f"the forward of {layer}")
    if total == 1:
        raise ArgumentError(
            f"{layer} got one value per channel from all ranks together",
            next_step="use a larger batch: the variance of one value is not defined",
        )
    wide = _find_wide_dtype(x)
    mean_of, variance_of = (torch.from_numpy(values).to(x.device, wide) for values in (mean, variance))
    if total:
        _track_statistics(module, mean_of, variance_of * (total / (total - 1)))
    output: torch.Tensor = _Normalization.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, mean_of, variance_of, module.eps, count, total, collectives, layer
    )
    return output


def _compute_statistics(
    x: torch.Tensor, count: int, collectives: ModelCollectives, what: str
) -> tuple[float, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return values per channel of all ranks together, their mean and their biased variance, both of shape (C,).

    Each rank sends count, count * mean and count * (variance + mean**2). The difference of squares is taken in
    float64: its rounding error is about 1e-16 of mean**2."""
    channels = x.shape[1]
    own = np.zeros(1 + 2 * channels)
    if count:
        variance, mean = torch.var_mean(x.to(_find_wide_dtype(x)), _list_reduced_axes(x), correction=0)
        mean_here, variance_here = mean.double().cpu().numpy(), variance.double().cpu().numpy()
        own[0], own[1 : channels + 1] = count, count * mean_here
        own[channels + 1 :] = count * (variance_here + mean_here**2)
    sums = collectives.sum(own, what)
    total = float(sums[0])
    average = sums[1 : channels + 1] / max(total, 1.0)
    return total, average, np.maximum(sums[channels + 1 :] / max(total, 1.0) - average**2, 0.0)


@torch.no_grad()
def _track_statistics(module: torch.nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running statistics, as torch does."""
    if not module.track_running_stats:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(module.num_batches_tracked)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        if running is not None:
            running.mul_(1 - (factor or 0.0)).add_(value.to(running.dtype), alpha=factor or 0.0)


class _Normalization(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with the mean and the variance of all ranks' x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float, *more: Any) -> Any:
        ctx.count, ctx.total, ctx.collectives, ctx.layer = more
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        if not x.numel():
            return torch.empty_like(x)
        weight, bias = (tensor if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of the inputs. The loss of all ranks is the sum of their losses, each multiplied by the
        weight of its rank's batch. The exchange of gradients applies these weights to parameters. Here, the sums over
        ranks contain the weights of the other ranks, relative to that of this rank."""
        x, weight, mean, inverse = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide, axes = mean.dtype, _list_reduced_axes(x)
        gradient, centred = gradient.to(wide), x.to(wide) - _view_per_channel(mean, x)
        sum_gradient = gradient.sum(axes)
        sum_product = (gradient * centred).sum(axes)
        grad_x = None
        if needs_x:
            scale, channels = find_batch_scale() if ctx.count else 0.0, x.shape[1]
            own = np.zeros(2 * channels)
            if scale:
                own[:channels] = scale * sum_gradient.double().cpu().numpy()
                own[channels:] = scale * sum_product.double().cpu().numpy()
            sums = ctx.collectives.sum(own, f"the backward of {ctx.layer}")
            if scale:
                means = torch.from_numpy(sums / (ctx.total * scale)).to(x.device, wide)
                mean_gradient, mean_product = means[:channels], means[channels:]
                centred.mul_(_view_per_channel(mean_product * inverse * inverse, x))
                grad_x = gradient - _view_per_channel(mean_gradient, x) - centred
                grad_x.mul_(_view_per_channel(inverse if weight is None else inverse * weight.to(wide), x))
                grad_x = grad_x.to(x.dtype)
            else:
                grad_x = torch.zeros_like(x)
        grad_weight = (sum_product * inverse).to(weight.dtype) if needs_weight else None
        grad_bias = sum_gradient.to(weight.dtype) if needs_bias else None
        # mean, variance, eps and the four arguments in `more` have no gradients.
        return grad_x, grad_weight, grad_bias, *[None] * 7


def _find_wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the statistics of x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _list_reduced_axes(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _view_per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return values: (C,), reshaped to broadcast over x: (N, C, ...)."""
    return values.view(1, -1, *[1] * (x.ndim - 2))
