"""Sums, scaling, casts and the test for NaN, on NumPy arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, as_bytes, view_flat
from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_apart, check_same_length
from topkube.kernels.device import find_device_kernels


def sum_(out: Any, inputs: Sequence[Any], scale: float = 1.0) -> Any:
    """Compute out = (inputs[0] + inputs[1] + ...) * scale by element, summed in the list's order. Return `out`.

    Arithmetic is float32; a 16-bit `out` is rounded once, to nearest even. `inputs`: one or more arrays of one dtype
    and of `out`'s length; one of them may be `out` itself. Raises ArgumentError on mismatched lengths or dtypes, or
    partial overlap.
    """
    if not isinstance(out, np.ndarray) and (
        gpu := find_device_kernels(out=out, **{f"inputs[{i}]": x for i, x in enumerate(inputs)})
    ):
        gpu.sum_(out, inputs, scale)
        return out
    out_view = view_flat(out, "out", writable=True)
    input_views = [out_view if x is out else view_flat(x, f"inputs[{i}]") for i, x in enumerate(inputs)]
    if not input_views:
        raise ArgumentError("inputs is empty", next_step="pass at least one array")
    for i, view in enumerate(input_views):
        check_same_length(f"inputs[{i}]", view.size, "out", out_view.size)
        if view.dtype != input_views[0].dtype:
            raise ArgumentError(
                f"inputs[{i}] has dtype {view.dtype}, inputs[0] has {input_views[0].dtype}",
                next_step="pass inputs of one dtype",
            )
        if view is not out_view:
            check_apart("out", out_view, f"inputs[{i}]", view, same_allowed=True)
    _kernels.sum(
        as_bytes(out_view),
        DTYPE_CODES[out_view.dtype],
        [as_bytes(view) for view in input_views],
        DTYPE_CODES[input_views[0].dtype],
        scale,
    )
    return out


def add_(out: Any, x: Any) -> Any:
    """Compute out += x in float32, rounded once to `out`'s dtype. Return `out`. Lengths and dtypes must be equal, and
    the arrays must not overlap in part."""
    return sum_(out, [out, x])


def scale_(x: Any, factor: float) -> Any:
    """Compute x *= factor in float32, rounded once to x's dtype. Return `x`."""
    if find_device_kernels(x=x):
        return sum_(x, [x], factor)
    view = view_flat(x, "x", writable=True)
    _kernels.scale(as_bytes(view), DTYPE_CODES[view.dtype], factor)
    return x


def cast_(out: Any, x: Any) -> Any:
    """Compute out = x, rounded to nearest even if `out` is narrower (see dtype.hpp). Return `out`. The arrays must not
    overlap."""
    if gpu := find_device_kernels(out=out, x=x):
        if out.dtype == x.dtype:
            gpu.check_copy(out, x)
            out.view(-1).copy_(x.view(-1))
        else:
            gpu.sum_(out, [x])
        return out
    out_view, x_view = view_flat(out, "out", writable=True), view_flat(x, "x")
    check_same_length("x", x_view.size, "out", out_view.size)
    check_apart("out", out_view, "x", x_view)
    if out_view.dtype == x_view.dtype:
        _kernels.copy(as_bytes(out_view), as_bytes(x_view))
    else:
        _kernels.sum(
            as_bytes(out_view), DTYPE_CODES[out_view.dtype], [as_bytes(x_view)], DTYPE_CODES[x_view.dtype], 1.0
        )
    return out


def is_finite(x: Any) -> bool:
    """Return True if no element of `x` is NaN or infinite. An empty array is finite. Waits for the device
    if x is on a device."""
    if gpu := find_device_kernels(x=x):
        return bool(gpu.read_flag(gpu.flag_finite(x), wait=True))
    view = view_flat(x, "x")
    return bool(_kernels.is_finite(as_bytes(view), DTYPE_CODES[view.dtype]))
