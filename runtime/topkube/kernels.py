"""Selection, error feedback, wire and dense kernels, on NumPy arrays and torch CPU tensors.

Every function checks its arguments before it writes anything, releases the GIL while it works, and gives the same bits on
every instruction set and any number of threads. `docs/kernels.md` explains how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import BFLOAT16, Array, flat_view, like
from topkube.errors import ArgumentError, SettingsError
from topkube.settings import Settings

_FLOAT32 = np.dtype(np.float32)
_CODES = {_FLOAT32: 0, BFLOAT16: 1, np.dtype(np.float16): 2}  # csrc/cpu/dtype.hpp


def _bytes(view: Array) -> Array:
    return view.view(np.uint8)


def _same_length(name: str, view: Array, other_name: str, other: Array) -> None:
    if view.size != other.size:
        raise ArgumentError(
            f"{name} has {view.size} elements, {other_name} has {other.size}", next_step="pass arrays of equal length"
        )


def _overlap(a: Array, b: Array) -> bool:
    start_a, start_b = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    return bool(start_a < start_b + b.nbytes and start_b < start_a + a.nbytes)


def _apart(name: str, view: Array, other_name: str, other: Array, *, same_allowed: bool = False) -> None:
    """Raises ArgumentError where the two share memory; `same_allowed` lets through the very same elements."""
    if not _overlap(view, other):
        return
    same = view.__array_interface__["data"][0] == other.__array_interface__["data"][0]
    if same_allowed and same and view.dtype == other.dtype:
        return
    raise ArgumentError(
        f"{name} and {other_name} overlap in memory",
        cause="two views of one array",
        next_step=f"pass a copy of {other_name}",
    )


# The instruction set


def simd_paths() -> list[str]:
    """The instruction sets that this processor can run, best first: some of "avx512", "avx2", "portable"."""
    return list(_kernels.simd_paths())


def simd() -> str:
    """The instruction set in use."""
    return str(_kernels.simd())


def use_simd(path: str) -> str:
    """Takes the path called `path` ("auto": the best) in all threads of this process; returns the one that was in use.

    The setting TOPKUBE_SIMD does the same when this module is loaded. Results are the same on every path.
    Raises SettingsError where this processor cannot run it.
    """
    before = simd()
    if not _kernels.use_simd(simd_paths()[0] if path == "auto" else path):
        raise SettingsError(
            f"this processor has no SIMD path {path!r}; it runs {', '.join(simd_paths())}",
            next_step="unset TOPKUBE_SIMD, or set it to one of these",
        )
    return before


use_simd(Settings.from_environment().simd)


# Dense


def sum_(out: Any, inputs: Sequence[Any], scale: float = 1.0) -> Any:
    """out = (inputs[0] + inputs[1] + ...) * scale, element by element, summed in the list's order; returns `out`.

    Arithmetic is float32; a 16-bit `out` is rounded once, to nearest even. `inputs`: one or more arrays of one dtype and
    of `out`'s length; one of them may be `out` itself. Raises ArgumentError on mismatched lengths or dtypes, or partial
    overlap.
    """
    to = flat_view(out, "out", writable=True)
    views = [flat_view(x, f"inputs[{i}]") for i, x in enumerate(inputs)]
    if not views:
        raise ArgumentError("inputs is empty", next_step="pass at least one array")
    for i, view in enumerate(views):
        _same_length(f"inputs[{i}]", view, "out", to)
        if view.dtype != views[0].dtype:
            raise ArgumentError(
                f"inputs[{i}] has dtype {view.dtype}, inputs[0] has {views[0].dtype}",
                next_step="pass inputs of one dtype",
            )
        _apart("out", to, f"inputs[{i}]", view, same_allowed=True)
    _kernels.sum(_bytes(to), _CODES[to.dtype], [_bytes(view) for view in views], _CODES[views[0].dtype], scale)
    return out


def add_(out: Any, x: Any) -> Any:
    """out += x in float32, rounded once to `out`'s dtype; returns `out`. Same lengths and dtypes, no part overlap."""
    return sum_(out, [out, x])


def scale_(x: Any, factor: float) -> Any:
    """x *= factor in float32, rounded once to x's dtype; returns `x`."""
    view = flat_view(x, "x", writable=True)
    _kernels.scale(_bytes(view), _CODES[view.dtype], factor)
    return x


def cast_(out: Any, x: Any) -> Any:
    """out = x, rounded to nearest even where `out` is narrower (dtype.hpp says how); returns `out`. No overlap."""
    to, view = flat_view(out, "out", writable=True), flat_view(x, "x")
    _same_length("x", view, "out", to)
    _apart("out", to, "x", view)
    if to.dtype == view.dtype:
        _kernels.copy(_bytes(to), _bytes(view))
    else:
        _kernels.sum(_bytes(to), _CODES[to.dtype], [_bytes(view)], _CODES[view.dtype], 1.0)
    return out


def is_finite(x: Any) -> bool:
    """Whether no element of `x` is NaN or infinite. An empty array is finite."""
    view = flat_view(x, "x")
    return bool(_kernels.is_finite(_bytes(view), _CODES[view.dtype]))


# Selection


def _check_k(k: int, d: int) -> None:
    if not 1 <= k <= d:
        raise ArgumentError(
            f"k = {k} is outside 1..{d} (the array's length)", next_step="choose k = max(1, ceil(density * length))"
        )


def _largest(a: Array, k: int) -> Array:
    bits: Array = np.abs(a).view(np.uint32 if a.dtype.itemsize == 4 else np.uint16)
    order = np.argsort(~bits, kind="stable")[:k]
    return np.sort(order).astype(np.uint32)


def topk(x: Any, k: int, *, threads: int | None = None) -> tuple[Any, Any]:
    """The k entries of largest magnitude: (indices uint32 ascending, values of x's dtype)."""
    a = flat_view(x, "x")
    _check_k(k, a.size)
    indices = _largest(a, k)
    return like(indices, x), like(a[indices], x)


def compress_(gradient: Any, residual: Any, k: int, *, out: Any = None, threads: int | None = None) -> tuple[Any, Any]:
    """acc = residual + gradient, written into `gradient` (float32) or `out` (float32; required for 16-bit gradients);
    the top k of acc are returned as (indices, values) and cleared there. `residual` is unchanged."""
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
