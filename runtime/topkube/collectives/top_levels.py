"""The largest 1/32 of the values with two bits each: the codec of `sparseloco`.

Indices are sent in the code of Elias and Fano (Elias, "Efficient storage and retrieval by content and address of static
files", 1974): the low bits of each index as they are, the high bits as distances from index to index in unary. For a
share of 1/32, the code has 0.22 bits per element of the tensor, whatever the indices are. All rows of one codec
therefore have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.codecs import TensorCodec
from topkube.collectives.sparse import count_selected
from topkube.errors import WireError
from topkube.kernels.parts import align, count_sign_blocks

LEVEL_SHARE = 1 / 32
"""The share of the elements of each tensor that is sent."""


class TopLevels(TensorCodec):
    """A codec of the largest 1/32 of the elements of each tensor, at least one, with two bits each: the sign, and which
    of two magnitudes.

    The sent values are split into blocks of 256. In each block, the values with a magnitude below the block's mean
    magnitude are sent as the mean of these magnitudes, and the other values as the mean of theirs. Both means are bf16.
    The sent part is therefore orthogonal to the remainder, but for the rounding to bf16.
    """

    def count_bytes(self, length: int) -> int:
        code = _build_code(length)
        return self._count_value_bytes(code.count) + code.nbytes

    def pack_tensor(self, values: Array, row: Array) -> bool:
        code = _build_code(values.size)
        start = self._count_value_bytes(code.count)
        indices, chosen = kernels.topk(values, code.count)
        is_finite = self._pack_and_subtract(chosen, row[:start])
        values[indices] = chosen
        code.write(indices, row[start:])
        return is_finite

    def unpack_add_tensor(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        code = _build_code(out.size)
        start = self._count_value_bytes(code.count)
        for row, weight in zip(rows, weights, strict=True):
            sent = self._unpack_values(code.count, row[:start], weight)
            kernels.scatter_add_(out, code.read(row[start:]), sent)

    @staticmethod
    def _count_value_bytes(count: int) -> int:
        """Return the bytes of `count` values: a multiple of 8."""
        return align(4 * count_sign_blocks(count) + 2 * -(-count // 8))

    def _pack_and_subtract(self, chosen: Array, row: Array) -> bool:
        """Write the part of `chosen`, (count,) float32, that is sent at the start of `row`, and subtract this part from
        `chosen`. Return False if it contains a NaN or an infinite value, else True."""
        count, levels = len(chosen), self._view_levels(len(chosen), row)
        magnitudes = np.zeros((len(levels), kernels.SIGN_BLOCK))
        magnitudes.reshape(-1)[:count] = np.abs(chosen)
        is_value = (np.arange(magnitudes.size) < count).reshape(magnitudes.shape)
        with np.errstate(invalid="ignore"):  # NaN and infinity: all ranks skip the step
            is_high = is_value & ~(magnitudes < _average_blocks(magnitudes, is_value)[:, None])
            low_means = _average_blocks(magnitudes, is_value & ~is_high)
            high_means = _average_blocks(magnitudes, is_high)
            levels[:] = np.stack([low_means, high_means], axis=1).astype(np.float32).astype(BFLOAT16)
            self._view_bits(count, row)[0] = np.packbits(np.signbit(chosen))
            self._view_bits(count, row)[1] = np.packbits(is_high.reshape(-1)[:count])
            chosen -= self._unpack_values(count, row, 1.0)
        return kernels.is_finite(levels.reshape(-1))

    def _unpack_values(self, count: int, row: Array, weight: float) -> Array:
        """Return the `count` values at the start of `row` times `weight`, float32."""
        is_negative, is_high = (np.unpackbits(bits, count=count).astype(bool) for bits in self._view_bits(count, row))
        levels = self._view_levels(count, row).astype(np.float32) * np.float32(weight)
        magnitudes = levels[np.arange(count) // kernels.SIGN_BLOCK, is_high.astype(np.intp)]
        values: Array = np.where(is_negative, -magnitudes, magnitudes)
        return values

    @staticmethod
    def _view_levels(count: int, row: Array) -> Array:
        """Return the two magnitudes of each block, (blocks, 2) bfloat16."""
        levels: Array = row[: 4 * count_sign_blocks(count)].view(BFLOAT16).reshape(-1, 2)
        return levels

    @staticmethod
    def _view_bits(count: int, row: Array) -> Array:
        """Return the bits of all signs, and those of all levels: (2, ceil(count / 8)) uint8."""
        start, bit_bytes = 4 * count_sign_blocks(count), -(-count // 8)
        return row[start : start + 2 * bit_bytes].reshape(2, bit_bytes)


def _average_blocks(values: Array, is_counted: Array) -> Array:
    """Return the mean of the counted values of each row, added up from the first to the last; 0 if none counts."""
    sums: Array = np.add.accumulate(np.where(is_counted, values, 0.0), axis=1)[:, -1]
    means: Array = sums / np.maximum(is_counted.sum(axis=1), 1)
    return means


@dataclass(frozen=True)
class _IndexCode:
    """The code of `count` ascending indices below `length`. The lowest `low_bits` bits of each index are sent as bit
    planes, one after the other. The unary part of all indices together has `unary_bits` bits."""

    length: int
    count: int
    low_bits: int
    unary_bits: int

    @classmethod
    def build(cls, length: int, count: int) -> _IndexCode:
        low_bits = max(length // count, 1).bit_length() - 1
        return cls(length, count, low_bits, ((length - 1) >> low_bits) + count)

    @property
    def _plane_bytes(self) -> int:
        return -(-self.count // 8)

    @property
    def nbytes(self) -> int:
        """The bytes of the code: a multiple of 8."""
        return align(self.low_bits * self._plane_bytes + -(-self.unary_bits // 8))

    def write(self, indices: Array, out: Array) -> None:
        """Write `indices`, (count,) uint32, into `out`, (nbytes,) uint8."""
        for plane in range(self.low_bits):
            out[plane * self._plane_bytes :][: self._plane_bytes] = np.packbits((indices >> plane & 1).astype(bool))
        unary = np.zeros(self.unary_bits, bool)
        unary[(indices >> self.low_bits) + np.arange(self.count, dtype=np.uint32)] = True
        start = self.low_bits * self._plane_bytes
        unary_bytes = np.packbits(unary)
        out[start : start + unary_bytes.size] = unary_bytes
        out[start + unary_bytes.size :] = 0

    def read(self, data: Array) -> Array:
        """Return the indices, (count,) uint32, that `write` wrote. Raises WireError if `data` is not such a code."""
        start = self.low_bits * self._plane_bytes
        ones = np.flatnonzero(np.unpackbits(data[start:], count=self.unary_bits))
        if ones.size == self.count:
            indices: Array = ones.astype(np.uint32)
            indices -= np.arange(self.count, dtype=np.uint32)
            indices <<= np.uint32(self.low_bits)
            for plane in range(self.low_bits):
                plane_bytes = data[plane * self._plane_bytes :][: self._plane_bytes]
                indices |= np.unpackbits(plane_bytes, count=self.count).astype(np.uint32) << np.uint32(plane)
            if indices[-1] < self.length and (indices[1:] > indices[:-1]).all():
                return indices
        raise WireError(
            f"{self.count} indices below {self.length} were expected, but the message holds others",
            cause="the message was damaged, or the nodes run different versions of TopKube",
            next_step="run the same version of TopKube on all nodes",
        )


def _build_code(length: int) -> _IndexCode:
    """Return the code of the indices of a tensor of `length` elements."""
    return _IndexCode.build(length, min(count_selected(length, LEVEL_SHARE), length))
