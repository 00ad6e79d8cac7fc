"""The memory of the arrays of `topkube bench allreduce`, and their reduction there: host memory, or the GPU of each
rank."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from topkube import collectives
from topkube.algorithms import Algorithm, find_algorithm
from topkube.arrays import BFLOAT16, Array
from topkube.collectives import Request, load
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.device.spanning_group import find_all_ranks_group
from topkube.errors import DeviceError
from topkube.world import World

PEER = "peer: "
"""The beginning of the name of a row whose array another library reduces."""


class ArrayMemory(Protocol):
    """A kind of memory. `peers` are the names of the other libraries' all-reduces there."""

    name: str
    peers: tuple[str, ...]

    def can_reduce(self, algorithm: Algorithm) -> bool:
        """Return True if the algorithm reduces arrays in this memory."""

    def put(self, array: Array) -> Any:
        """Return a copy of a NumPy array in this memory."""

    def restore(self, x: Any, start: Any) -> None:
        """Copy `start` to `x`; both are in this memory."""

    def reduce(self, x: Any, name: str, density: float, wire: str) -> None:
        """Replace `x` by the mean over all ranks, with the algorithm or the peer called `name`. A collective. Returns
        when the mean is in `x`."""

    def read(self, x: Any) -> Array:
        """Return `x` as a NumPy array."""


class HostArrays:
    """Arrays in host memory."""

    name = "host"
    peers: tuple[str, ...] = ()

    def can_reduce(self, algorithm: Algorithm) -> bool:
        return not algorithm.needs_gpu

    def put(self, array: Array) -> Array:
        return array.copy()

    def restore(self, x: Array, start: Array) -> None:
        np.copyto(x, start)

    def reduce(self, x: Array, name: str, density: float, wire: str) -> None:
        collectives.allreduce_(x, algorithm=name, density=density, wire=wire)

    def read(self, x: Array) -> Array:
        return x


class DeviceArrays:
    """Tensors on a GPU. The peer is a plain all-reduce of torch.distributed over all ranks: NCCL (gloo on CPU tensors,
    for tests)."""

    def __init__(self, world: World, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._world, self._device = world, device
        self._engine = DeviceAllReduce(world, device)
        self.is_cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.is_cuda else str(device)
        self.peers: tuple[str, ...] = (f"{PEER}{'NCCL' if self.is_cuda else 'gloo'}",)

    def can_reduce(self, algorithm: Algorithm) -> bool:
        return algorithm.on_device

    def put(self, array: Array) -> Any:
        torch = self._torch
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(array.copy()).to(self._device)

    def restore(self, x: Any, start: Any) -> None:
        x.copy_(start)
        self._wait()

    def reduce(self, x: Any, name: str, density: float, wire: str) -> None:
        if name in self.peers:
            if x.dtype != self._torch.float32:
                x.mul_(1 / self._world.size)  # before the sum, which may exceed fp16
            find_all_ranks_group(self._world, self._device).all_reduce(x)
            if x.dtype == self._torch.float32:
                x.mul_(1 / self._world.size)
        else:
            engine = self._engine
            engine.wait_for(engine.mark_caller())
            engine.begin(load(find_algorithm(name)), Request(x, density=density, wire=wire))
            engine.flush()
            engine.make_caller_wait()
        self._wait()

    def read(self, x: Any) -> Array:
        host = x.cpu()
        if host.dtype == self._torch.bfloat16:
            bits: Array = host.view(self._torch.int16).numpy()
            return bits.view(BFLOAT16)
        array: Array = host.numpy()
        return array

    def _wait(self) -> None:
        if self.is_cuda:
            self._torch.cuda.synchronize(self._device)


def choose_memory(world: World, has_gpus: bool) -> ArrayMemory:
    """Return the memory of the arrays: the GPUs of all ranks, or host memory. Raises DeviceError without a GPU."""
    if not has_gpus:
        return HostArrays()
    from topkube.training.exchange.reduction.devices import device

    own_device = device()
    if own_device.type != "cuda":
        raise DeviceError(
            f"rank {world.rank} has no GPU",
            cause="this machine has none, or this build of torch is for the CPU alone",
            next_step="run `topkube doctor`, or leave out --gpu",
        )
    return DeviceArrays(world, own_device)
