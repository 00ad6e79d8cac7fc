"""The product of two thin factors, and what it leaves of the matrix that it approximates."""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, as_bytes, view_flat
from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_apart, check_same_length

_FLOAT32 = (np.dtype(np.float32),)


def low_rank_product_(out: Any, residual: Any, left: Any, right: Any, weight: float) -> Any:
    """Compute out = left @ right.T and residual -= weight * out in one pass. Return `out`.

    left: float32 (rows, rank); right: float32 (columns, rank); out: rows * columns elements, float32, bf16 or fp16;
    residual: as many in float32. All are contiguous arrays of the CPU, and none overlaps another. The products of an
    element are added in the order of the rank, in float32, and their sum is rounded once to the type of `out`; the
    rounded value is what is subtracted. Results have the same bits on every instruction set. Raises ArgumentError.
    """
    rows, rank = _check_factor(left, "left")
    columns, right_rank = _check_factor(right, "right")
    if rank != right_rank:
        raise ArgumentError(
            f"left has {rank} columns, right has {right_rank}", next_step="pass two factors of the same rank"
        )
    views = {
        "out": view_flat(out, "out", writable=True),
        "residual": view_flat(residual, "residual", writable=True, dtypes=_FLOAT32),
        "left": view_flat(left, "left", dtypes=_FLOAT32),
        "right": view_flat(np.ascontiguousarray(right.T), "right", dtypes=_FLOAT32),
    }
    for name in ("out", "residual"):
        check_same_length(name, views[name].size, "the product", rows * columns)
        for other in ("residual", "left", "right"):
            if name != other:
                check_apart(name, views[name], other, views[other])
    _kernels.low_rank_product(
        as_bytes(views["out"]),
        DTYPE_CODES[views["out"].dtype],
        views["residual"],
        views["left"],
        views["right"],
        rank,
        weight,
    )
    return out


def _check_factor(factor: Any, name: str) -> tuple[int, int]:
    """Return the shape of a factor. Raises ArgumentError unless it is a matrix with a column."""
    if not isinstance(factor, np.ndarray) or factor.ndim != 2 or not factor.shape[1]:
        raise ArgumentError(f"{name} is not a matrix with at least one column", next_step="pass an array (rows, rank)")
    return factor.shape[0], factor.shape[1]
