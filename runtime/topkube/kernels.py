"""Selection, error feedback and wire kernels, on NumPy arrays and torch CPU tensors.

Thin first version in NumPy; the compiled kernels take its place behind the same functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube.arrays import Array, flat_view, like
from topkube.errors import ArgumentError


def _check_k(k: int, d: int) -> None:
    if not 1 <= k <= d:
        raise ArgumentError(
            f"k = {k} is outside 1..{d} (the array's length)", next_step="choose k = max(1, ceil(density * length))"
        )


def _largest(a: Array, k: int) -> Array:
    bits = a.view(np.uint32 if a.dtype.itemsize == 4 else np.uint16) & (0x7FFFFFFF if a.dtype.itemsize == 4 else 0x7FFF)
    order = np.argsort(~bits, kind="stable")[:k]
    return np.sort(order).astype(np.uint32)


def topk(x: Any, k: int, *, threads: int | None = None) -> tuple[Any, Any]:
    """The k entries of largest magnitude: (indices uint32 ascending, values of x's dtype)."""
    a = flat_view(x, "x")
    _check_k(k, a.size)
    indices = _largest(a, k)
    return like(indices, x), like(a[indices], x)


def compress_(gradient: Any, residual: Any, k: int, *, out: Any = None, threads: int | None = None) -> tuple[Any, Any]:
    """acc = residual + gradient, written into `gradient` (float32) or `out` (float32; required for 16-bit gradients); the top k
    of acc are returned as (indices, values) and cleared there. `residual` is unchanged."""
    g, r = (
        flat_view(gradient, "gradient", writable=True),
        flat_view(residual, "residual", dtypes=(np.dtype(np.float32),)),
    )
    _check_k(k, g.size)
    acc = flat_view(out, "out", writable=True) if out is not None else g
    acc[:] = g.astype(np.float32) + r
    indices = _largest(acc, k)
    values = acc[indices].copy()
    acc[indices] = 0
    return like(indices, gradient), like(values, gradient)


def scatter_add_(dense: Any, indices: Any, values: Any) -> Any:
    """dense[indices] += values; indices ascending and distinct."""
    flat_view(dense, "dense", writable=True)[np.asarray(indices)] += np.asarray(values)
    return dense
