"""One-dimensional NumPy views of NumPy arrays and torch CPU tensors, without a copy.

The package works on these views. bfloat16 becomes `ml_dtypes.bfloat16`.
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
DTYPE_CODES = {dtype: code for code, dtype in enumerate(FLOATS)}
"""The codes of element types in the kernels and on the wire (csrc/cpu/dtype.hpp)."""


def as_bytes(view: Array) -> Array:
    """Return the bytes of a contiguous array as a (nbytes,) uint8 view. MPI and the kernels take bytes without a
    type."""
    return view.view(np.uint8)


def view_bytes_as(row: Any, dtype: np.dtype[Any]) -> Any:
    """Return bytes, (nbytes,) uint8, as values of `dtype`: a view of the NumPy array or torch tensor."""
    return row.view(getattr(sys.modules["torch"], dtype.name) if is_tensor(row) else dtype)


def is_tensor(x: object) -> bool:
    """Return True if `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def refuse_masked(x: object, name: str) -> None:
    """Raise ArgumentError if `x` is a masked array: NumPy drops its mask in silence."""
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name} is a masked array, and the mask would be ignored", next_step=f"pass {name}.filled(value)"
        )


def view_flat(x: object, name: str, *, writable: bool = False, dtypes: tuple[np.dtype[Any], ...] = FLOATS) -> Array:
    """Return a one-dimensional NumPy view of a contiguous NumPy array or torch CPU tensor, without a copy.

    Raises ArgumentError if `x` is neither, is masked, is on another device, is a view that negates or conjugates, is
    not contiguous or not aligned, is read-only although it must be writable, or has a dtype outside `dtypes`. `name` is
    the parameter's name in the message.
    """
    if is_tensor(x):
        array = _view_tensor(x, name)
    elif isinstance(x, np.ndarray):
        refuse_masked(x, name)
        array = np.asarray(x)  # numpy.matrix would stay two-dimensional
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


def _view_tensor(x: Any, name: str) -> Array:
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on {x.device}; this function takes CPU tensors only", next_step=f"pass {name}.cpu()"
        )
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name} has layout {x.layout} instead of strided", next_step=f"pass {name}.to_dense()")
    if x.is_neg() or x.is_conj():
        raise ArgumentError(
            f"{name} is a view whose memory holds other values: torch negates or conjugates them when they are read",
            cause="the imaginary part of a conjugate tensor",
            next_step=f"pass {name}.clone()",
        )
    detached = x.detach()
    if detached.dtype == torch.bfloat16:
        return detached.view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
    try:
        return detached.numpy()  # type: ignore[no-any-return]
    except TypeError:  # a type that NumPy does not have
        raise ArgumentError(
            f"{name} has dtype {str(x.dtype).removeprefix('torch.')}, which NumPy does not have",
            next_step=f"convert it: {name}.float()",
        ) from None


def view_like(values: Array, original: object) -> Any:
    """Return a torch tensor that shares the memory of `values` if `original` is a torch tensor, else `values`
    itself."""
    if not is_tensor(original):
        return values
    torch = sys.modules["torch"]
    if values.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
