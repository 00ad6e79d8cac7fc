"""Codecs: they write float32 values as rows of bytes for other nodes, and leave in place the part of the values that
the bytes do not contain.

`Signs` keeps one bit per element with a scale per block, `Integers` three, four or eight bits, `Rounded` rounds every
value; top_signs.py and top_levels.py have codecs that send the largest elements only. The algorithms in
codec_all_reduce.py send such rows.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, Array, is_tensor, view_bytes_as
from topkube.kernels.parts import PartLayout, align, count_sign_bytes, view_signs

_LARGEST_FP16 = 65504.0
_DTYPES = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}


class Codec(ABC):
    """The format of one row. `row_bytes` is its length, a multiple of 8."""

    row_bytes: int
    works_on_device: ClassVar[bool] = False
    """True if values and rows may be tensors on a GPU, where few launches pack or add them."""

    @abstractmethod
    def pack(self, values: Any, row: Any) -> Any:
        """Write the part of `values`, float32, that is sent into `row`, (row_bytes,) uint8, and subtract it from
        `values`. Return False if the sent part contains a NaN or an infinite value, else True: a bool, or for tensors
        on a GPU, a bool tensor of shape () there."""

    @abstractmethod
    def unpack_add(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        """Add to `out`, float32, the decoded rows times `weights`, in the order of the rows."""

    def unpack(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        """Write to `out`, float32, the sum of the decoded rows times `weights`, in the order of the rows."""
        out[:] = 0
        self.unpack_add(out, rows, weights)


def join_flags(first: Any, second: Any) -> Any:
    """Return True if both flags are: a bool, or a bool tensor on a GPU if one of them is."""
    return second if first is True else first & second


CodecOf = Callable[[list[slice], int], Codec]
"""(places of tensors, length) -> the codec for that many values."""


class TensorCodec(Codec):
    """A codec that packs every tensor on its own, with `pack_tensor` and `unpack_add_tensor`. `places` are the slices
    of the values that belong to one tensor each, and every value belongs to one."""

    packs_differences_fast: ClassVar[bool] = False
    """True if `pack_differences` takes about as long as a copy of the tensors."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._places, self._row_places = list(places), list[slice]()
        self.row_bytes = 0
        for place in places:
            start = self.row_bytes
            self.row_bytes += self.count_bytes(place.stop - place.start) if place.stop > place.start else 0
            self._row_places.append(slice(start, self.row_bytes))

    @abstractmethod
    def count_bytes(self, length: int) -> int:
        """Return the bytes of a tensor of `length` elements, at least one: a multiple of 8."""

    @abstractmethod
    def pack_tensor(self, values: Any, row: Any) -> Any:
        """Do what `pack` does for one tensor. `row` has the bytes of this tensor."""

    @abstractmethod
    def unpack_add_tensor(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        """Do what `unpack_add` does for one tensor. `rows` have the bytes of this tensor."""

    def pack(self, values: Any, row: Any) -> Any:
        return self.pack_tensors([values[place] for place in self._places], row)

    def pack_tensors(self, tensors: Sequence[Any], row: Any) -> Any:
        """Do what `pack` does. `tensors` has one array for each place."""
        is_finite: Any = True
        for values, part in zip(tensors, self._row_places, strict=True):
            if len(values):
                is_finite = join_flags(is_finite, self.pack_tensor(values, row[part]))
        return is_finite

    def pack_differences(self, tensors: Sequence[Array], bases: Sequence[Array], row: Array) -> bool:
        """Write the part of `tensors` - `bases` that is sent into `row`. Both are float32, with one array for each
        place, and stay as they are. Return what `pack` returns."""
        is_finite = True
        for values, base, part in zip(tensors, bases, self._row_places, strict=True):
            if values.size:
                is_finite = self.pack_difference(values, base, row[part]) and is_finite
        return is_finite

    def pack_difference(self, values: Array, base: Array, row: Array) -> bool:
        """Do what `pack_differences` does for one tensor."""
        return bool(self.pack_tensor(values - base, row))

    def unpack_add(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        self.unpack_add_tensors([out[place] for place in self._places], rows, weights)

    def unpack_add_tensors(self, tensors: Sequence[Any], rows: Sequence[Any], weights: Sequence[float]) -> None:
        """Do what `unpack_add` does. `tensors` has one array for each place."""
        for out, part in zip(tensors, self._row_places, strict=True):
            if len(out):
                self.unpack_add_tensor(out, [row[part] for row in rows], weights)


class PartsCodec(TensorCodec):
    """A codec whose tensors are the parts of a layout (topkube/kernels/parts.py): on a GPU, one call of a kernel packs
    or adds all of them."""

    works_on_device = True

    def __init__(self, places: Sequence[slice]) -> None:
        super().__init__(places)
        self._layout: PartLayout | None = None

    @abstractmethod
    def build_layout(self, places: Sequence[slice]) -> PartLayout:
        """Return the layout of the tensors at `places`. Its message is the row of this codec."""

    @property
    def layout(self) -> PartLayout:
        """The layout of all tensors, made when it is first needed."""
        if self._layout is None:
            self._layout = self.build_layout(self._places)
        return self._layout

    def pack(self, values: Any, row: Any) -> Any:
        if not _is_on_gpu(values):
            return super().pack(values, row)
        return kernels.pack_parts_(values, row, self.layout, wait=False)

    def unpack_add(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        if _is_on_gpu(out):
            kernels.unpack_add_parts_(out, rows, weights, self.layout)
        else:
            super().unpack_add(out, rows, weights)


def _is_on_gpu(values: Any) -> bool:
    return is_tensor(values) and bool(values.is_cuda)


class Signs(PartsCodec):
    """A codec with one bit per element, and the mean magnitude of each block of 256 elements in bf16. Blocks start
    again in each tensor, so the last block of a tensor may be shorter."""

    packs_differences_fast = True

    def build_layout(self, places: Sequence[slice]) -> PartLayout:
        return kernels.SignLayout(places)

    def count_bytes(self, length: int) -> int:
        return count_sign_bytes(length)

    def pack_tensor(self, values: Any, row: Any) -> Any:
        scales, bits = view_signs(row, len(values))
        return kernels.sign_pack_(values, scales, bits, wait=False)[2]

    def pack_differences(self, tensors: Sequence[Array], bases: Sequence[Array], row: Array) -> bool:
        return kernels.sign_pack_differences(tensors, bases, row)

    def unpack_add_tensors(self, tensors: Sequence[Any], rows: Sequence[Any], weights: Sequence[float]) -> None:
        if any(map(is_tensor, tensors)):
            super().unpack_add_tensors(tensors, rows, weights)
        else:
            kernels.sign_unpack_add_tensors_(tensors, rows, weights)

    def unpack_add_tensor(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        kernels.sign_unpack_add_(out, [view_signs(row, len(out)) for row in rows], weights)


class Integers(PartsCodec):
    """A codec with an integer of `bits` bits (3, 4 or 8) per element, and a scale for each block of 256 elements. With
    8 bits, an integer stands for itself times the scale; with 4 bits, its square does; with 3 bits, it is the number of
    a level (`kernels.quantised_pack_`). Blocks start again in each tensor."""

    def __init__(self, places: Sequence[slice], bits: int) -> None:
        self._bits = bits
        super().__init__(places)

    def build_layout(self, places: Sequence[slice]) -> PartLayout:
        return kernels.IntegerLayout(places, self._bits)

    def count_bytes(self, length: int) -> int:
        return kernels.quantised_bytes(length, self._bits)

    def pack_tensor(self, values: Any, row: Any) -> Any:
        return kernels.quantised_pack_(values, self._bits, row, wait=False)

    def unpack_add_tensor(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        kernels.quantised_unpack_add_(out, self._bits, list(rows), weights)

    def unpack(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        if _is_on_gpu(out):
            kernels.unpack_add_parts_(out, rows, weights, self.layout, replaces=True)
            return
        for place, part in zip(self._places, self._row_places, strict=True):
            if place.stop > place.start:
                parts = [row[part] for row in rows]
                kernels.quantised_unpack_add_(out[place], self._bits, parts, weights, replaces=True)


class Rounded(Codec):
    """A codec of `length` values, rounded to `wire`: "fp32", "bf16" or "fp16". Of a value beyond the range of float16,
    its largest number is sent; the rest remains, like an error of rounding."""

    works_on_device = True

    def __init__(self, length: int, wire: str) -> None:
        self._dtype, self._length = _DTYPES[wire], length
        self.row_bytes = align(self._dtype.itemsize * length)

    def pack(self, values: Any, row: Any) -> Any:
        if not self._length:
            return True
        sent = self._view(row)
        kernels.cast_(sent, values.clip(-_LARGEST_FP16, _LARGEST_FP16) if self._dtype == np.float16 else values)
        if self._dtype == np.float32:
            is_finite = _find_finite(values)
            values[:] = 0
            return is_finite
        values -= _widen(sent)
        return _find_finite(values)

    def unpack_add(self, out: Any, rows: Sequence[Any], weights: Sequence[float]) -> None:
        if not self._length:
            return
        total: Any = None
        for row, weight in zip(rows, weights, strict=True):
            product = _widen(self._view(row))
            product *= np.float32(weight).item()
            if total is None:
                total = product
            else:
                total += product
        out += total

    def _view(self, row: Any) -> Any:
        return view_bytes_as(row[: self._length * self._dtype.itemsize], self._dtype)


def _find_finite(values: Any) -> Any:
    """Return if all values are finite: a bool, or a bool tensor if they are on a GPU."""
    return values.isfinite().all() if _is_on_gpu(values) else kernels.is_finite(values)


def _widen(values: Any) -> Any:
    """Return a copy of the values as float32."""
    return values.to(copy=True, dtype=sys.modules["torch"].float32) if is_tensor(values) else values.astype(np.float32)
