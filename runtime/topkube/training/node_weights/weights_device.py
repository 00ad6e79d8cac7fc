"""The device of the weights that nodes exchange. If a codec works in host memory, weights on a GPU are copied.

The exchange works on a stream of its own. It begins after the work that the script has put into its current stream,
and the script's later work in that stream begins after the exchange. So neither reads weights while the other writes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from topkube.arrays import Array
from topkube.collectives.device.memory import DeviceMemory
from topkube.training.ranks import communication_thread

T = TypeVar("T")


class WeightsDevice:
    """The device of the weights, a GPU, or None for host memory. `memory` has its stream; None for host memory."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.memory = DeviceMemory(device) if device is not None else None

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads or writes weights, in the communication thread, and return its result. Raises the
        errors of `work`."""
        memory = self.memory
        if memory is None:
            return communication_thread.run(work)
        mark = memory.mark_caller()  # None if the device has no streams: tests emulate a GPU on the CPU

        def run_in_order() -> T:
            memory.enter_thread()
            if mark is not None:
                memory.wait_for(mark)
            with memory.on_stream():
                return work()

        result = communication_thread.run(run_in_order)
        memory.make_caller_wait()
        return result

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Return the values of 1-D tensors of one dtype: views if they are in host memory, otherwise copies, which are
        complete. Tensors on a device cross to the host together."""
        if self.device is None or not tensors:
            return [tensor.numpy() for tensor in tensors]
        joined = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        # device="cpu", because a script may have set another default device. Pinned memory, because the GPU copies to
        # it at the full rate of the bus. The host waits for the copy: the caller reads the values at once.
        in_host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=joined.is_cuda)
        in_host.copy_(joined)
        return [part.numpy() for part in torch.split(in_host, [tensor.numel() for tensor in tensors])]

    def copy_to_device(self, values: Array) -> torch.Tensor:
        """Return `values` as a tensor on the device: a view if the weights are in host memory. Otherwise return a copy;
        `values` may then change after this call, because the host waits until they are read."""
        in_host = torch.from_numpy(values)
        return in_host if self.device is None else in_host.to(self.device, copy=True)
