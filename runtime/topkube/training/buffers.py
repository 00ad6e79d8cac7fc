"""A model's buffers, kept the same on all ranks: rank 0's, before each forward in training, as
DistributedDataParallel's `broadcast_buffers=True` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from topkube.errors import ArgumentError
from topkube.training.batches.replays import STATISTICS
from topkube.training.broadcast import remove_expansion
from topkube.training.ranks.model_collectives import open_model_collectives
from topkube.world import World, current


def broadcast_buffers(model: torch.nn.Module, root: int = 0) -> RemovableHandle:
    """Copy `root`'s buffers to all ranks before each forward of `model` in training mode with gradients on: the running
    statistics of BatchNorm, for example. Buffers may have any dtype and device; they are sent in one message.

    All ranks must call `model(...)` equally often, as with `run.progress` and `optimizer.join`. `handle.remove()` stops
    the copies, and so does the end of `with topkube.broadcast_buffers(model):`. To copy buffers once, use
    `broadcast_parameters(model.named_buffers())`.

    Raises ArgumentError for a buffer that is not dense or a root that is not a rank. A later forward raises
    MismatchError if ranks have different buffers, and CollectiveTimeout if a rank is missing.
    """
    world = current()
    if not 0 <= root < world.size:
        raise ArgumentError(f"root = {root} is not a rank", next_step=f"choose a rank from 0 to {world.size - 1}")
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ArgumentError(f"the buffer {name} has layout {buffer.layout}", next_step="register a dense tensor")

    def broadcast_before_forward(module: torch.nn.Module, _: Any) -> None:
        if world.size > 1 and module.training and torch.is_grad_enabled():
            _broadcast(world, module, root)

    return model.register_forward_pre_hook(broadcast_before_forward)


def _broadcast(world: World, model: torch.nn.Module, root: int) -> None:
    named = [(name, remove_expansion(buffer)) for name, buffer in model.named_buffers()]
    described = [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in named]
    parts = [_copy_bytes(buffer) for _, buffer in named]
    own = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    message = open_model_collectives(world).broadcast(own, root, "the broadcast of buffers", repr(described))
    start = 0
    for (name, buffer), part in zip(named, parts, strict=True):
        received = message[start : start + part.size]
        start += part.size
        if (received != part).any():
            value = torch.from_numpy(received.copy()).view(buffer.dtype).view(buffer.shape)
            # Backward does not read running statistics, so a graph that has saved them stays valid.
            target = buffer.data if name.rpartition(".")[2] in STATISTICS else buffer.detach()
            target.copy_(value)


def _copy_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    raw: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return raw
