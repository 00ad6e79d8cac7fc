"""Arrays at the border: NumPy arrays and torch CPU tensors come in, 1-D NumPy views of the same memory go on.

bfloat16 travels as `ml_dtypes.bfloat16`. Everything inside the package works on these views; nothing is copied here.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from topkube.errors import ArgumentError

Array = npt.NDArray[Any]
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOATS: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))


def is_tensor(x: object) -> bool:
    """Whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def flat_view(x: object, name: str, *, writable: bool = False, dtypes: tuple[np.dtype[Any], ...] = FLOATS) -> Array:
    """A one-dimensional NumPy view of a contiguous NumPy array or torch CPU tensor; no copy.

    Raises ArgumentError when `x` is neither, lies on another device, is not contiguous or not aligned, is read-only
    although it must be written, or has a dtype outside `dtypes`. `name` is the parameter's name in the message.
    """
    if is_tensor(x):
        array = _tensor_view(x, name)
    elif isinstance(x, np.ndarray):
        array = x
    else:
        raise ArgumentError(
            f"{name} is a {type(x).__name__}, not a NumPy array or torch tensor",
            next_step=f"convert it: numpy.asarray({name}, dtype=numpy.float32)",
        )
    if array.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ArgumentError(
            f"{name} has dtype {array.dtype}; allowed: {allowed}",
            next_step=f"convert it: {name}.astype({dtypes[0]}), or .to() for a tensor",
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} is not contiguous (shape {array.shape}, strides {array.strides})",
            cause="a transposed or sliced view",
            next_step="pass a contiguous copy: numpy.ascontiguousarray(x), or x.contiguous() for a tensor",
        )
    if not array.flags.aligned:
        raise ArgumentError(
            f"{name} is not aligned to its {array.dtype.itemsize}-byte elements",
            cause="a view into a byte buffer at an odd offset",
            next_step=f"pass {name}.copy()",
        )
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only and would be written in place", next_step=f"pass {name}.copy()")
    return array.reshape(-1)


def _tensor_view(x: Any, name: str) -> Array:
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise ArgumentError(
            f"{name} lies on {x.device}; this build works on CPU tensors", next_step=f"pass {name}.cpu()"
        )
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name} has layout {x.layout}, not strided", next_step=f"pass {name}.to_dense()")
    detached = x.detach()
    if detached.dtype == torch.bfloat16:
        return detached.view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
    return detached.numpy()  # type: ignore[no-any-return]


def like(values: Array, original: object) -> Any:
    """`values` as the kind of array that `original` is: a torch tensor sharing memory, or unchanged."""
    if not is_tensor(original):
        return values
    torch = sys.modules["torch"]
    if values.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
