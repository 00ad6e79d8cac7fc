"""Rank 0's weights, buffers and optimizer state everywhere: the common starting point of all ranks."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from topkube.errors import ArgumentError, MismatchError
from topkube.training.agreement import agreement
from topkube.world import World, current

CHUNK = 64 * 2**20
"""Bytes of one broadcast message."""


def broadcast_parameters(parameters: Any, root: int = 0) -> None:
    """Copies `root`'s values into every rank's tensors, in place: weights and buffers, any dtype.

    `parameters` is a module (all of its parameters and buffers), a state dict, or (name, tensor) pairs. Raises
    MismatchError where ranks hold different names, shapes or dtypes; nothing is written then.
    """
    if isinstance(parameters, torch.nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    else:
        named = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, not a tensor", next_step="pass the model itself")
    world = current()
    if world.size == 1:
        return
    _check_equal(world, [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
    with torch.no_grad():
        for _, tensor in named:
            flat = tensor.detach().contiguous().view(-1)
            if flat.numel() == 0:
                continue
            host = flat.cpu()  # the same memory where it lies there already
            _broadcast(world, host.view(torch.uint8).numpy(), root)
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host.view(tensor.shape))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Gives every rank `root`'s optimizer state: also what only some ranks have created yet, learning rates, and step
    counts.

    Residuals stay: every rank's shard is its own.
    """
    optimizer = getattr(optimizer, "inner", optimizer)
    world = current()
    if world.size == 1:
        return
    payload = np.zeros(0, np.uint8)
    if world.rank == root:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        payload = np.frombuffer(file.getvalue(), np.uint8).copy()
    length = int(agreement()([float(payload.size)])[0])
    if world.rank != root:
        payload = np.empty(length, np.uint8)
    _broadcast(world, payload, root)
    if world.rank != root:
        optimizer.load_state_dict(torch.load(io.BytesIO(payload.tobytes()), weights_only=True))


def _broadcast(world: World, raw: Any, root: int) -> None:
    for start in range(0, raw.size, CHUNK):
        world.wait([world.comm.Ibcast(raw[start : start + CHUNK], root=root)], "a broadcast")


def _check_equal(world: World, described: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
    digest = zlib.crc32(repr(list(described)).encode()) & 0xFFFFFF
    total, squares = agreement()([digest, digest**2])
    if squares * world.size != total**2:
        raise MismatchError(
            "ranks hold different parameters or buffers",
            cause="the model depends on the rank",
            next_step="build the same model with the same arguments on every rank",
        )
