"""The stream, the work buffers and the pinned memory of all-reduces on one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Slot:
    """Work buffers for one tensor at a time, kept from call to call."""

    buffers: dict[str, Any] = field(default_factory=dict)
    read: Any = None
    """A mark in the stream: once it has passed, the device has read this slot's host memory."""


@dataclass(frozen=True)
class Mark:
    """A point in a stream of the caller. Work that waits for the mark comes after all work in `stream` so far."""

    event: Any
    stream: Any


@dataclass(frozen=True)
class DeviceFlag:
    """A flag that the device computes: `tensor` is 1.0 or 0.0, float32 of shape (), on the device. `host` is its copy
    in host memory, complete once the device has passed the mark `copied` (None: it is complete)."""

    tensor: Any
    host: Any
    copied: Any

    def read(self) -> bool:
        """Return True if the flag is 1. Waits until the device has computed it."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.host)


class DeviceMemory:
    """A stream of its own on `device`, and buffers there and in pinned host memory. On CPU tensors the same methods
    work without streams, and host memory is the tensors' own.

    torch's allocator returns freed memory to the stream that allocated it, at once, and that stream may write it again.
    So a tensor that another stream still uses must be recorded before its last reference goes: `borrow` a tensor of
    the caller's stream that this stream uses, and `lend` a tensor of this stream that the caller uses.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device, self._torch = device, torch
        self.is_cuda = device.type == "cuda"
        cuda: Any = torch.cuda
        self.stream: Any = cuda.Stream(device, priority=-1) if self.is_cuda else None

    @property
    def float32(self) -> Any:
        """torch's float32."""
        return self._torch.float32

    @property
    def current_stream(self) -> Any:
        """torch's current stream on the device."""
        return self._torch.cuda.current_stream(self.device)

    def on_stream(self) -> Any:
        """Return a context in which torch works on this stream."""
        return self._torch.cuda.stream(self.stream) if self.is_cuda else nullcontext()

    def enter_thread(self) -> None:
        """Make `device` the current device of this thread. A new thread starts with device 0, and torch returns to the
        current device after each context: without this call, each rank of a node creates a CUDA context on GPU 0."""
        if self.is_cuda:
            self._torch.cuda.set_device(self.device)

    def mark_caller(self) -> Mark | None:
        """Return a mark at the end of torch's current stream on the device; None without streams."""
        if not self.is_cuda:
            return None
        stream = self.current_stream
        return Mark(stream.record_event(), stream)

    def wait_for(self, mark: Mark) -> None:
        """Make this stream wait for the mark."""
        self.stream.wait_event(mark.event)

    def make_caller_wait(self) -> None:
        """Make torch's current stream wait for all work in this stream so far. The host does not wait."""
        if self.is_cuda:
            self._torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def borrow(self, tensor: Any) -> None:
        """Keep the memory of a tensor of another stream: after the tensor is freed, the memory is not used again
        before this stream has done the work that it had at that time."""
        if self.is_cuda:
            record_stream(tensor, self.stream)

    def lend(self, tensor: Any, mark: Mark | None) -> None:
        """Keep the memory of a tensor of this stream: after the tensor is freed, the memory is not used again
        before the stream of `mark` has done the work that it had at that time."""
        if mark is not None:
            record_stream(tensor, mark.stream)

    def mark(self) -> Any:
        """Return a mark at the end of this stream; None without streams."""
        return self.stream.record_event() if self.is_cuda else None

    def find_buffer(self, slot: Slot, name: str, length: int, dtype: Any) -> Any:
        """Return a 1-D tensor on the device, of a torch dtype or its name. The same name returns the same memory."""
        if isinstance(dtype, str):
            dtype = getattr(self._torch, dtype)
        needed = length * dtype.itemsize
        buffer = slot.buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            buffer = slot.buffers[name] = self._torch.empty(needed, dtype=self._torch.uint8, device=self.device)
        return buffer[:needed].view(dtype)

    def allocate_zeros(self, length: int) -> Any:
        """Return a new 1-D float32 tensor of zeros on the device, which belongs to torch's current stream."""
        return self._torch.zeros(length, dtype=self.float32, device=self.device)

    def find_host_memory(self, slot: Slot, x: Any, name: str = "host") -> Any:
        """Return pinned memory of the shape and type of `x`, once the device has read what was in the slot's host
        memory before. The same name returns the same memory. Returns `x` itself if it is a CPU tensor."""
        if not self.is_cuda:
            return x
        if slot.read is not None:
            slot.read.synchronize()
            slot.read = None
        needed = x.numel() * x.element_size()
        buffer = slot.buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            # device="cpu", because a script may have set another default device
            buffer = self._torch.empty(needed, dtype=self._torch.uint8, device="cpu", pin_memory=x.is_cuda)
            slot.buffers[name] = buffer
        return buffer[:needed].view(x.dtype).view_as(x)

    def copy_between(self, to: Any, source: Any) -> None:
        """Begin to copy between a tensor and its host memory (`find_host_memory`), which may be the same."""
        if self.is_cuda:
            to.copy_(source, non_blocking=True)

    def allocate_host_number(self) -> Any:
        """Return pinned host memory for a float32 number, shape ()."""
        return self._torch.empty((), dtype=self.float32, device="cpu", pin_memory=self.is_cuda)

    def flag_any_false(self, flags: list[Any]) -> Any:
        """Return 1.0 if a flag is False, else 0.0: a float32 tensor of one element on the device. `flags` are bool or
        tensors on the device. Does not wait for the device."""
        tensors = [flag for flag in flags if not isinstance(flag, bool)]
        if len(tensors) < len(flags) and not all(flag for flag in flags if isinstance(flag, bool)):
            return self._torch.ones(1, dtype=self.float32, device=self.device)
        if not tensors:
            return self._torch.zeros(1, dtype=self.float32, device=self.device)
        return (~self._torch.stack(tensors).all()).float().reshape(1)

    def are_finite(self, tensors: Sequence[Any]) -> Any:
        """Return True if all entries of tensors of one dtype are finite: a bool tensor of shape () on the device. Each
        tensor has at least one entry. A few launches check all of them."""
        largest = self._torch._foreach_norm(list(tensors), self._torch.inf)
        return self._torch.stack(list(largest)).isfinite().all()

    def read_later(self, flag: Any) -> DeviceFlag:
        """Begin to copy a float32 tensor of shape () to the host."""
        host = self.allocate_host_number()
        host.copy_(flag, non_blocking=True)
        return DeviceFlag(flag, host, self.mark())

    def read_all_true(self, flags: list[Any]) -> bool:
        """Return True if all `flags`, bool or tensors on the device, are true. Waits for the device."""
        tensors = [flag for flag in flags if not isinstance(flag, bool)]
        return all(flag for flag in flags if isinstance(flag, bool)) and (
            not tensors or bool(self._torch.stack(tensors).all())
        )


def record_stream(tensor: Any, stream: Any) -> None:
    """Note for torch's allocator that `stream` uses the tensor, which may be sparse."""
    for part in list_parts(tensor):
        part.record_stream(stream)


def list_parts(tensor: Any) -> tuple[Any, ...]:
    """Return the strided tensors of which a sparse tensor consists; another tensor itself."""
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "sparse_coo":
        return tensor._indices(), tensor._values()
    if layout in ("sparse_csr", "sparse_bsr"):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in ("sparse_csc", "sparse_bsc"):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
