"""The kernels of all kinds for tensors on a device, and the choice between them and the kernels of the CPU."""

from __future__ import annotations

import functools
from typing import Any

from topkube.arrays import is_tensor
from topkube.errors import ArgumentError
from topkube.kernels import cuda_library
from topkube.kernels.device.packing import PackingKernels
from topkube.kernels.device.sums import SumKernels
from topkube.kernels.device.top_signs import TopSignKernels
from topkube.kernels.device.wire import WireKernels


class DeviceKernels(SumKernels, TopSignKernels, WireKernels, PackingKernels):
    """The functions of topkube.kernels for tensors on devices of `library`."""


def find_device_kernels(**arrays: Any) -> DeviceKernels | None:
    """Return the GPU's kernels if an argument is a CUDA tensor, None if all are arrays on the CPU. `arrays` are the
    arguments by name; None is ignored. Raises ArgumentError if they are on different devices, and DeviceError if
    this build has no CUDA kernels."""
    devices = {name: x.device for name, x in arrays.items() if is_tensor(x) and x.device.type != "cpu"}
    if not devices:
        return None
    name, device = next(iter(devices.items()))
    for other_name, x in arrays.items():
        if x is None or (is_tensor(x) and x.device == device):
            continue
        place = x.device if is_tensor(x) else f"the CPU (it is a {type(x).__name__})"
        raise ArgumentError(
            f"{name} lies on {device}, {other_name} on {place}",
            next_step=f"move one of them: {other_name}.to({name}.device)",
        )
    if device.type != "cuda":
        raise ArgumentError(
            f"{name} lies on {device}; kernels run on CPU and CUDA tensors", next_step=f"pass {name}.cpu()"
        )
    return _load_device_kernels()


@functools.cache
def _load_device_kernels() -> DeviceKernels:
    return DeviceKernels(cuda_library.load())
