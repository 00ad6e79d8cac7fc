"""Copies of a state's tensors in host memory, so that training may change the tensors while the copies are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from topkube.training.checkpoint.format.encoding import CopyTensor, encode
from topkube.training.checkpoint.host_memory import find_available_bytes
from topkube.training.reporting.warning import warn

_SHARE = 0.8
"""The share of the available memory that new buffers may take: other ranks need memory too."""


class NoRoom(Exception):
    """The host has no memory for the copies."""


class HostCopies:
    """Buffers for the tensors of a state, which are kept, so that the next copy causes no page faults. Buffers of CUDA
    tensors are pinned, so that all tensors are copied at the full rate of the bus and waited for once."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._budget = 0.0
        self._has_warned = False

    def encode(self, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the encoded state of model and optimizer, and True if its tensors are copies, which are valid until
        the next call. If there is no room for copies, its tensors are those of `state`, with one warning per run."""
        copied = self._encode_copies(state)
        if copied is not None:
            return copied, True
        _free_pinned_memory()
        if not self._has_warned:
            self._has_warned = True
            warn(
                "host memory has no room for a copy of model and optimizer: training waits while checkpoints are"
                " written. Next: give the pod of rank 0 more memory"
            )
        return encode(state), False

    def _encode_copies(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the encoded state with copies of its tensors, None if there is no room. The buffers are free then."""
        try:
            with self.take() as copy:
                encoded: dict[str, Any] = encode(state, copy)
                return encoded
        except NoRoom:
            return None

    @contextmanager
    def take(self) -> Iterator[CopyTensor]:
        """Return a context in which a state is copied. The yielded function copies a tensor (any shape, dtype and
        device) into the buffer of its key's path. All copies are complete when the context ends, and valid until the
        next `take`. Raises NoRoom and frees all buffers before the kernel would kill a process for memory."""
        self._budget = _SHARE * find_available_bytes()
        copies: dict[tuple[object, ...], torch.Tensor] = {}
        used: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()

        def copy(tensor: torch.Tensor, path: str) -> torch.Tensor:
            tensor = tensor.detach()
            if tensor.layout is not torch.strided:
                return tensor.to("cpu", copy=True)
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            # Such a tensor may have the identity of a tensor with other values.
            unusual = tensor.is_conj() or tensor.is_neg() or not tensor.numel()
            if identity in copies and not unusual:
                return copies[identity]  # tied weights stay tied and are written once
            buffer = used[path] = self._take_buffer(path, tensor)
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            if not unusual:
                copies[identity] = buffer
            return buffer

        try:
            yield copy
        except NoRoom:
            self._buffers = {}
            _wait_for(devices)
            raise
        _wait_for(devices)
        self._buffers = used

    def _take_buffer(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.pop(path, None)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        self._budget -= _count_bytes(tensor)
        if self._budget < 0:
            raise NoRoom
        # A script may have set another default device.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a buffer for `tensor`. torch rounds pinned memory up to a power of two."""
    nbytes = tensor.numel() * tensor.element_size()
    return 1 << (nbytes - 1).bit_length() if tensor.is_cuda and nbytes else nbytes


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for the copies from these devices. torch frees no memory that a copy still writes."""
    for device in devices:
        torch.cuda.synchronize(device)


def _free_pinned_memory() -> None:
    """Return the pinned memory that no tensor uses to the system. torch would keep it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        names = ("_accelerator_emptyHostCache", "_host_emptyCache")  # the second one in older versions
        empty = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        if empty is not None:
            empty()
