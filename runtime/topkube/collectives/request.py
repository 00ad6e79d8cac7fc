"""The request for an all-reduce: its array and its parameters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from topkube.algorithms import DENSE_WIRE, DENSITY, MATRIX_RANK, SELECTION, WIRE
from topkube.collectives.error_feedback import Residual
from topkube.errors import ArgumentError

OPS = ("mean", "sum")


@dataclass(frozen=True)
class Matrix:
    """A part of an array that is a matrix: `length` elements from `start` on, row by row. The last row may be shorter
    than `columns`."""

    start: int
    length: int
    columns: int

    @property
    def rows(self) -> int:
        """The number of rows, with the last one, which may be shorter."""
        return -(-self.length // self.columns)


@dataclass(frozen=True)
class Request:
    """A request for an all-reduce, the same on every rank.

    `array` is reduced in place: a contiguous 1-D NumPy array, or a 1-D torch tensor on a device, of float32, bfloat16
    or float16. `op` is "mean" or "sum". `density`, `wire` (format of sparse values between nodes), `dense_wire` (format
    of dense float32 values between nodes), `selection` and `matrix_rank` matter to algorithms that declare them.
    `matrices` are the parts of the array that are matrices, if the algorithm reads `matrix_rank`; without them, it
    takes the array for a matrix. Raises ArgumentError if one of them is not allowed.
    """

    array: Any
    op: str = "mean"
    density: float = 1.0
    wire: str = "fp32"
    selection: str = "topk"
    residual: Residual | None = None
    dense_wire: str = "fp32"
    matrix_rank: int = MATRIX_RANK.default
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        values = (self.op, self.density, self.wire, self.dense_wire, self.selection, self.matrix_rank)
        try:
            _check_values(*values)
        except TypeError:  # a value that cannot be in a cache, which may still be allowed
            _check_values.__wrapped__(*values)

    @property
    def length(self) -> int:
        """The number of elements of the array."""
        return int(self.array.shape[0])

    @property
    def dtype(self) -> str:
        """The name of the array's type: "float32", "bfloat16" or "float16"."""
        return _name_type(self.array.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return self.length * int(self.array.dtype.itemsize)

    def scale(self, ranks: int) -> float:
        """Return the factor for the sum over `ranks`."""
        return 1.0 / ranks if self.op == "mean" else 1.0


@functools.lru_cache(maxsize=64, typed=True)
def _check_values(op: str, *values: Any) -> None:
    """Raise ArgumentError if a parameter of a request is not allowed. A value that passed is not checked again."""
    if op not in OPS:
        raise ArgumentError(f"op is {op!r}", next_step=f"choose one of {', '.join(OPS)}")
    for parameter, value in zip((DENSITY, WIRE, DENSE_WIRE, SELECTION, MATRIX_RANK), values, strict=True):
        parameter.check(value)


@functools.cache
def _name_type(dtype: Any) -> str:
    """Return the name of a type of NumPy or torch, which takes NumPy several microseconds."""
    return str(dtype).removeprefix("torch.")
