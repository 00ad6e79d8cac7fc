"""Kernels for many torch tensors in host memory at once. A call of a kernel takes as long as reading some thousands of
elements, so small tensors share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, view_flat
from topkube.errors import ArgumentError

_codes: dict[Any, int] = {}
"""The codes of the types of torch tensors that were passed before."""


def are_finite(tensors: Sequence[Any]) -> bool:
    """Return True if no element of `tensors` is NaN or infinite. Tensors without elements are finite.

    All are contiguous torch tensors in host memory, of one dtype: float32, bfloat16 or float16. Raises ArgumentError
    for other tensors.
    """
    if not tensors:
        return True
    code = _check(tensors, tensors[0].dtype, "tensors")
    return bool(_kernels.are_finite([x.data_ptr() for x in tensors], [x.numel() for x in tensors], code))


def gather_(out: Any, tensors: Sequence[Any], starts: Sequence[int]) -> Any:
    """Copy the elements of `tensors[i]` to those of `out` from `starts[i]` on. Return `out`, shape (n,).

    All are contiguous torch tensors in host memory, of one dtype: float32, bfloat16 or float16. They do not overlap.
    Raises ArgumentError for other tensors, and if `out` has too few elements, before anything is written.
    """
    places, addresses, sizes = _find_places(out, tensors, starts, "out")
    _kernels.copy_each(places, addresses, sizes)
    return out


def scatter_(tensors: Sequence[Any], values: Any, starts: Sequence[int]) -> None:
    """Copy the elements of `values` from `starts[i]` on to those of `tensors[i]`: the opposite of `gather_`. torch does
    not notice that the tensors change."""
    places, addresses, sizes = _find_places(values, tensors, starts, "values")
    _kernels.copy_each(addresses, places, sizes)


def _find_places(
    flat: Any, tensors: Sequence[Any], starts: Sequence[int], name: str
) -> tuple[list[int], list[int], list[int]]:
    """Return the addresses in `flat`, those of the tensors, and the sizes in bytes. Raises ArgumentError."""
    _check([flat], flat.dtype, name)
    _check(tensors, flat.dtype, "tensors")
    lengths = [x.numel() for x in tensors]
    if any([not 0 <= start <= flat.numel() - n for start, n in zip(starts, lengths, strict=True)]):
        raise ArgumentError(
            f"{name} has {flat.numel()} elements, too few for a tensor that begins at one of {list(starts)}",
            next_step="pass starts at which the tensors fit",
        )
    address, itemsize = flat.data_ptr(), flat.element_size()
    places = [address + start * itemsize for start in starts]
    return places, [x.data_ptr() for x in tensors], [n * itemsize for n in lengths]


def _check(tensors: Sequence[Any], dtype: Any, name: str) -> int:
    """Return the code of `dtype`. Raises ArgumentError unless all tensors have it and are allowed."""
    if dtype not in _codes or not all(
        [x.dtype is dtype and x.is_cpu and x.is_contiguous() and not x.is_neg() for x in tensors]
    ):
        for i, tensor in enumerate(tensors):
            if tensor.is_neg():
                raise ArgumentError(
                    f"{name}[{i}] has its negative bit set: its memory holds the opposite values",
                    next_step="pass tensor.resolve_neg()",
                )
            code = DTYPE_CODES[view_flat(tensor, f"{name}[{i}]").dtype]
            if tensor.dtype != dtype:
                raise ArgumentError(
                    f"{name}[{i}] has dtype {tensor.dtype}, and not {dtype}", next_step="pass tensors of one dtype"
                )
            _codes[dtype] = code
    return _codes.get(dtype, 0)
