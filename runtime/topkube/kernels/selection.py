"""Selection by magnitude: exact top-k, error feedback fused with it, and MSTopK."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numpy as np

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, as_bytes, view_flat, view_like
from topkube.errors import ArgumentError
from topkube.kernels.arguments import (
    FLOAT32,
    check_apart,
    check_count,
    check_iterations,
    check_same_length,
    check_selectable,
    choose_threads,
)
from topkube.kernels.device import DeviceKernels, find_device_kernels
from topkube.kernels.previous_threshold import PreviousThreshold


class Effort(NamedTuple):
    """The effort of the last selection in this thread: passes over memory (at most 4; at most 6 of `mstopk` on a GPU),
    and candidates that its filter left."""

    passes: int
    candidates: int


class Thresholds(NamedTuple):
    """The last thresholds of MSTopK on both sides, and how many magnitudes reach them (Algorithm 1: thres1, k1,
    thres2, k2)."""

    upper: float
    above_upper: int
    lower: float
    above_lower: int


# `effort` and `thresholds` of the last call in this thread. After a call on a GPU, they are the DeviceKernels that read
# the numbers from the device.
_last = threading.local()


def last_effort() -> Effort:
    """Return the effort of the last `topk`, `compress_` or `mstopk` of this thread. If that call ran on a
    device, the function waits for it."""
    if isinstance(_last.effort, DeviceKernels):
        passes, read = _last.effort.read_effort()
        return Effort(passes, read.candidates)
    return Effort(*_last.effort)


def last_thresholds() -> Thresholds:
    """Return the thresholds of the last `mstopk` of this thread. If that call ran on a device, the function waits for
    it."""
    if isinstance(_last.thresholds, DeviceKernels):
        read = _last.thresholds.read_effort()[1]
        return Thresholds(read.thresholds[0], read.above[0], read.thresholds[1], read.above[1])
    return Thresholds(*_last.thresholds)


def entries_kept(length: int, density: float) -> int:
    """Return k = max(1, ceil(density * length)), at most `length`. Raises ArgumentError for a density outside (0,
    1]."""
    if not 0 < density <= 1:
        raise ArgumentError(
            f"density = {density} is outside (0, 1]", next_step="pass the share of entries to keep, for example 0.01"
        )
    product = round(density * length, 6)  # 0.07 * 100 is 7.000000000000001, which would be rounded up to 8
    return min(length, max(1, math.ceil(product)))


def topk(x: Any, k: int, *, threads: int | None = None, previous: PreviousThreshold | None = None) -> tuple[Any, Any]:
    """Return exactly the k entries of largest magnitude: (indices, values).

    x: d elements of float32, bfloat16 or float16, NumPy or torch (CPU or CUDA), any shape, contiguous; indices count
    in its flat view. indices: (k,) uint32, ascending. values: (k,), x's dtype, with their signs. Of equal magnitudes
    at the threshold the lowest index wins; NaN and infinity are the largest. threads: of the CPU, by default
    TOPKUBE_THREADS; the result does not depend on them. previous: the magnitude at which a GPU begins to search; the
    result does not depend on it. Raises ArgumentError if k is outside 1..d or x cannot be used.
    """
    if gpu := find_device_kernels(x=x):
        _last.effort = gpu
        return gpu.topk(x, k, previous)
    view = check_selectable(x, "x")
    k, threads = check_count(k, view.size), choose_threads(threads)
    indices, values = np.empty(k, np.uint32), np.empty(k, view.dtype)
    _last.effort = _kernels.topk(as_bytes(view), DTYPE_CODES[view.dtype], threads, indices, as_bytes(values))
    return view_like(indices, x), view_like(values, x)


def compress_(
    gradient: Any,
    residual: Any,
    k: int,
    *,
    out: Any = None,
    threads: int | None = None,
    previous: PreviousThreshold | None = None,
) -> tuple[Any, Any]:
    """Compute acc = residual + gradient and return its k largest entries as (indices, values), in one pass.

    acc, with the selected entries cleared, is left in `gradient`'s memory (float32), or in `out` if it is passed: it is
    the next residual. `residual` is unchanged: the caller commits the step by swapping the two buffers, or discards the
    step by keeping `residual`. gradient: (d,) float32, bfloat16 or float16; residual: (d,) float32; out: (d,) float32,
    required with a 16-bit gradient. None of them overlap (`out` may be `gradient` itself). indices: (k,) uint32
    ascending; values: (k,) float32, selected as by `topk`: if acc holds a NaN or an infinity, so does `values`.
    threads, previous: as for `topk`.
    Raises ArgumentError if an argument cannot be used; nothing is written then.
    """
    if gpu := find_device_kernels(gradient=gradient, residual=residual, out=out):
        _last.effort = gpu
        return gpu.compress_(gradient, residual, k, out, previous)
    gradient_view = check_selectable(gradient, "gradient")
    residual_view = view_flat(residual, "residual", dtypes=(FLOAT32,))
    if out is None and gradient_view.dtype != FLOAT32:
        raise ArgumentError(
            f"gradient has dtype {gradient_view.dtype}: the sum with the residual is float32 and does not fit its"
            " memory",
            next_step="pass out=numpy.empty(gradient.size, numpy.float32)",
        )
    acc = view_flat(
        gradient if out is None else out, "gradient" if out is None else "out", writable=True, dtypes=(FLOAT32,)
    )
    check_same_length("residual", residual_view.size, "gradient", gradient_view.size)
    check_same_length("out", acc.size, "gradient", gradient_view.size)
    check_apart("gradient", gradient_view, "residual", residual_view)
    check_apart("out", acc, "residual", residual_view)
    check_apart("gradient", gradient_view, "out", acc, same_allowed=True)
    k, threads = check_count(k, gradient_view.size), choose_threads(threads)
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    _last.effort = _kernels.compress(
        as_bytes(gradient_view),
        DTYPE_CODES[gradient_view.dtype],
        as_bytes(residual_view),
        as_bytes(acc),
        threads,
        indices,
        as_bytes(values),
    )
    return view_like(indices, gradient), view_like(values, gradient)


def mstopk(
    x: Any,
    k: int,
    iterations: int = 30,
    seed: int = 0,
    *,
    threads: int | None = None,
    previous: PreviousThreshold | None = None,
) -> tuple[Any, Any]:
    """Return approximately the k largest magnitudes, by "Towards Scalable Distributed Training of Deep Learning on
    Public Cloud Clusters", Algorithm 1 (MSTopK): (indices, values), exactly k of them, indices ascending.

    `iterations` bisections between the mean magnitude (a float64 sum in a fixed order) and the largest magnitude find
    two thresholds (float32). All entries that reach the upper threshold are returned. The rest of the k entries lie
    between the two thresholds: neighbours in the order of their indices, from an offset that `seed` determines. Other
    arguments, the result and the errors are those of `topk`. If x contains NaN or infinity, the mean has no meaning,
    and the exact top k is returned, which contains these values.
    """
    if gpu := find_device_kernels(x=x):
        _last.effort = _last.thresholds = gpu
        return gpu.mstopk(x, k, iterations, seed, previous)
    view = check_selectable(x, "x")
    k, threads, iterations = check_count(k, view.size), choose_threads(threads), check_iterations(iterations)
    indices, values = np.empty(k, np.uint32), np.empty(k, view.dtype)
    passes, candidates, *thresholds = _kernels.mstopk(
        as_bytes(view), DTYPE_CODES[view.dtype], iterations, seed % 2**64, threads, indices, as_bytes(values)
    )
    _last.effort, _last.thresholds = (passes, candidates), thresholds
    return view_like(indices, x), view_like(values, x)
