"""The kernels on torch tensors of a GPU: arguments checked, outputs and workspace taken from torch's allocator, work
put on torch's current stream.

No function waits for the device, unless its docstring states it. Everything is allocated before the first
launch, so that running out of memory writes nothing.
"""

from topkube.kernels.device.device_kernels import DeviceKernels, find_device_kernels
from topkube.kernels.device.wire import NO_FAULT

__all__ = ["NO_FAULT", "DeviceKernels", "find_device_kernels"]
