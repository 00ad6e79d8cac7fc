"""Codecs: they write float32 values as rows of bytes for other nodes, and leave in place the part of the values that
the bytes do not contain.

`Signs` keeps one bit per element with a scale per block, `Integers` four or eight bits, `Rounded` rounds every value;
top_signs.py and top_levels.py have codecs that send the largest elements only. The algorithms in codec_all_reduce.py
send such rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, Array

_ALIGNMENT = 8
_DTYPES = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}


class Codec(ABC):
    """The format of one row. `row_bytes` is its length, a multiple of 8."""

    row_bytes: int

    @abstractmethod
    def pack(self, values: Array, row: Array) -> bool:
        """Write the part of `values`, float32, that is sent into `row`, (row_bytes,) uint8, and subtract it from
        `values`. Return False if the sent part contains a NaN or an infinite value, else True."""

    @abstractmethod
    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        """Add to `out`, float32, the decoded rows times `weights`, in the order of the rows."""


CodecOf = Callable[[list[slice], int], Codec]
"""(places of tensors, length) -> the codec for that many values."""


class Signs(Codec):
    """A codec with one bit per element, and the mean magnitude of each block of 256 elements in bf16. Blocks start
    again in each of `places`, the slices of the values that are sent, so the last block of a place may be shorter."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._parts: list[tuple[slice, int]] = []
        """(place, offset in the row) of each place."""
        self.row_bytes = 0
        for place in places:
            self._parts.append((place, self.row_bytes))
            self.row_bytes += count_sign_row_bytes(_length_of(place))

    def pack(self, values: Array, row: Array) -> bool:
        is_finite = True
        for place, offset in self._parts:
            scales, bits = view_signs(row[offset:], place)
            is_finite = kernels.sign_pack_(values[place], scales, bits)[2] and is_finite
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for place, offset in self._parts:
            kernels.sign_unpack_add_(out[place], [view_signs(row[offset:], place) for row in rows], weights)


class Integers(Codec):
    """A codec with an integer of `bits` bits (4 or 8) per element, and a scale for each block of 256 elements
    (`kernels.quantised_pack_`). Blocks start again in each of `places`, the slices of the values that are sent."""

    def __init__(self, places: Sequence[slice], bits: int) -> None:
        self._bits = bits
        self._parts: list[tuple[slice, slice]] = []
        """(place, slice of the row) of each place."""
        self.row_bytes = 0
        for place in places:
            start, self.row_bytes = self.row_bytes, self.row_bytes + kernels.quantised_bytes(_length_of(place), bits)
            self._parts.append((place, slice(start, self.row_bytes)))

    def pack(self, values: Array, row: Array) -> bool:
        is_finite = True
        for place, message in self._parts:
            is_finite = kernels.quantised_pack_(values[place], self._bits, row[message]) and is_finite
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for place, message in self._parts:
            kernels.quantised_unpack_add_(out[place], self._bits, [row[message] for row in rows], weights)


class Rounded(Codec):
    """A codec of `length` values, rounded to `wire`: "fp32", "bf16" or "fp16"."""

    def __init__(self, length: int, wire: str) -> None:
        self._dtype, self._length = _DTYPES[wire], length
        self.row_bytes = align(self._dtype.itemsize * length)

    def pack(self, values: Array, row: Array) -> bool:
        if not self._length:
            return True
        sent = self._values(row)
        kernels.cast_(sent, values)
        is_finite = kernels.is_finite(sent)
        if self._dtype == np.float32:
            values[:] = 0
        else:
            values -= sent.astype(np.float32)
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        total = np.zeros_like(out)
        for row, weight in zip(rows, weights, strict=True):
            total += self._values(row).astype(np.float32) * np.float32(weight)
        out += total

    def _values(self, row: Array) -> Array:
        values: Array = row[: self._length * self._dtype.itemsize].view(self._dtype)
        return values


def count_sign_row_bytes(length: int) -> int:
    """Return the bytes of signs and scales for `length` elements: the scales, then the bits, rounded up to 8."""
    return align(2 * count_sign_blocks(length) + -(-length // 8))


def view_signs(row: Array, place: slice) -> tuple[Array, Array]:
    """Return the scales, (blocks,) uint16, and the bits, (ceil(length / 8),) uint8, at the start of `row`."""
    length = _length_of(place)
    blocks = count_sign_blocks(length)
    return row[: 2 * blocks].view("uint16"), row[2 * blocks : 2 * blocks + -(-length // 8)]


def count_sign_blocks(length: int) -> int:
    """Return the number of blocks of 256 in `length` elements."""
    return -(-length // kernels.SIGN_BLOCK)


def align(length: int) -> int:
    """Return `length` in bytes, rounded up to a multiple of 8."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _length_of(place: slice) -> int:
    length: int = place.stop - place.start
    return length
