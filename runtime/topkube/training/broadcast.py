"""Rank 0's weights, buffers and optimizer state everywhere: the common starting point of all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from topkube.errors import ArgumentError, MismatchError
from topkube.training.checkpoint.format.decoding import decode
from topkube.training.checkpoint.format.encoding import encode
from topkube.training.distributed import DistributedOptimizer
from topkube.training.node_weights.node_weights import refuse_if_nodes_differ
from topkube.training.ranks.agreement import digest, find_differing_ranks, name_ranks
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World, current

CHUNK = 64 * 2**20
"""The size of a broadcast message in bytes."""


def broadcast_parameters(parameters: Any, root: int = 0) -> None:
    """Copy `root`'s values into every rank's tensors, in place: weights and buffers, any dtype.

    `parameters` is a module (all of its parameters and buffers), a state dict, or (name, tensor) pairs. Expanded
    tensors (stride 0) are written once. Raises MismatchError if ranks hold different names, shapes or dtypes, and
    TrainingError for weights that differ between nodes on purpose (error feedback in the weights, after the first
    step); nothing is written then.
    """
    if isinstance(parameters, torch.nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    else:
        named = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, not a tensor", next_step="pass the model itself")
        if is_lazy(tensor):
            raise ArgumentError(
                f"{name} has no shape yet",
                cause="a lazy module (LazyLinear, LazyConv2d) that has not seen a batch",
                next_step="run one batch through the model under torch.no_grad() before",
            )
    world = current()
    if world.size == 1:
        return
    refuse_if_nodes_differ([tensor for _, tensor in named])
    _check_equal(world, [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
    with torch.no_grad():
        for _, tensor in named:
            _broadcast_tensor(world, remove_expansion(tensor.detach()), root)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Copy `root`'s optimizer state to all ranks, including learning rates, step counts, and state that only some ranks
    have created yet. A rank can load a state and send it to the others this way.

    Residuals stay as they are, because every rank has its own shard.
    """
    world = current()
    if world.size == 1:
        return
    distributed = isinstance(optimizer, DistributedOptimizer)
    payload = np.zeros(0, np.uint8)
    if world.rank == root:
        file = io.BytesIO()
        state = optimizer.shared_state() if isinstance(optimizer, DistributedOptimizer) else optimizer.state_dict()
        torch.save(encode(state), file)
        payload = np.frombuffer(file.getbuffer(), np.uint8)
    length = int(QueuedAgreement(world).maximum([float(payload.size)])[0])
    if world.rank != root:
        payload = np.empty(length, np.uint8)
    _broadcast(world, payload, root)
    if world.rank == root and not distributed:
        return
    # Into host memory: the GPU of the root is not this rank's, and its memory has no room for the states of a node.
    state = decode(torch.load(io.BytesIO(payload.data), map_location="cpu", weights_only=True))
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.load_shared_state(state)  # the root too: all ranks compare their layouts at the next backward
    else:
        optimizer.load_state_dict(state)


def _broadcast_tensor(world: World, tensor: torch.Tensor, root: int) -> None:
    if tensor.numel() == 0:
        return
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    host = flat.cpu()  # the same memory if it is in host memory already
    _broadcast(world, host.view(torch.uint8).numpy(), root)
    if host.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)  # torch has not noticed the write
    else:
        values = torch.view_as_complex(host.view(-1, 2)) if tensor.is_complex() else host
        tensor.copy_(values.view(tensor.shape))


def remove_expansion(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that holds every element of an expanded tensor once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _broadcast(world: World, raw: Any, root: int) -> None:
    for start in range(0, raw.size, CHUNK):
        world.wait([world.comm.Ibcast(raw[start : start + CHUNK], root=root)], "a broadcast")


def _check_equal(world: World, described: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
    different = find_differing_ranks(QueuedAgreement(world).gather([digest(list(described))])[:, 0])
    if different:
        raise MismatchError(
            f"ranks hold different parameters or buffers: {name_ranks(different)} differ from the other ranks",
            cause="the model depends on the rank",
            next_step="build the same model with the same arguments on every rank",
        )
