"""The largest tenth of the values with one bit each: the codec of `topk1bit`.

Indices are sent in the code of Elias and Fano (Elias, "Efficient storage and retrieval by content and address of static
files", 1974): the low bits of each index as they are, the high bits as distances from index to index in unary. For a
share of one tenth, the code has 0.525 bits per element, whatever the indices are; the entropy is 0.47. Rows of a place
therefore always have the same length. Signs and scales of the values have the format of `sign_pack_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.codecs import Codec, aligned, sign_row_bytes, sign_views
from topkube.collectives.sparse import selected_count
from topkube.errors import WireError

TOP_SHARE = 0.1
"""The share of the elements of each place that is sent."""


class TopSigns(Codec):
    """The largest tenth of the elements of each place, at least one: their indices, their signs, and the mean magnitude
    of each 256 of them in bf16. `places` are the slices of the values that belong to one tensor each."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._parts: list[tuple[slice, int, _IndexCode, int]] = []
        self.row_bytes = 0
        for place in places:
            length = place.stop - place.start
            if length:
                count = min(selected_count(length, TOP_SHARE), length)
                code = _IndexCode.of(length, count)
                self._parts.append((place, count, code, self.row_bytes))
                self.row_bytes += sign_row_bytes(count) + code.nbytes

    def pack(self, values: Array, row: Array) -> bool:
        is_finite = True
        for place, count, code, offset in self._parts:
            part, signs = values[place], sign_row_bytes(count)
            indices, chosen = kernels.topk(part, count)
            scales, bits = sign_views(row[offset:], slice(0, count))
            is_finite = kernels.sign_pack_(chosen, scales, bits)[2] and is_finite
            part[indices] = chosen  # sign_pack_ has subtracted what is sent
            code.write(indices, row[offset + signs : offset + signs + code.nbytes])
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for place, count, code, offset in self._parts:
            signs = sign_row_bytes(count)
            sent: Array = np.empty(count, np.float32)
            for row, weight in zip(rows, weights, strict=True):
                sent[:] = 0
                part = sign_views(row[offset:], slice(0, count))
                kernels.sign_unpack_add_(sent, [part], [weight])
                indices = code.read(row[offset + signs : offset + signs + code.nbytes])
                kernels.scatter_add_(out[place], indices, sent)


@dataclass(frozen=True)
class _IndexCode:
    """The code of `count` ascending indices below `length`. `low` is the number of low bits of each index, which are
    sent as bit planes, one after the other. `high` is the number of bits of the unary part."""

    length: int
    count: int
    low: int
    high: int

    @classmethod
    def of(cls, length: int, count: int) -> _IndexCode:
        low = max(length // count, 1).bit_length() - 1
        return cls(length, count, low, ((length - 1) >> low) + count)

    @property
    def _plane_bytes(self) -> int:
        return -(-self.count // 8)

    @property
    def nbytes(self) -> int:
        """The bytes of the code: a multiple of 8."""
        return aligned(self.low * self._plane_bytes + -(-self.high // 8))

    def write(self, indices: Array, out: Array) -> None:
        """Write `indices`, (count,) uint32, into `out`, (nbytes,) uint8."""
        for plane in range(self.low):
            out[plane * self._plane_bytes :][: self._plane_bytes] = np.packbits((indices >> plane & 1).astype(bool))
        unary = np.zeros(self.high, bool)
        unary[(indices >> self.low) + np.arange(self.count, dtype=np.uint32)] = True
        start = self.low * self._plane_bytes
        octets = np.packbits(unary)
        out[start : start + octets.size] = octets
        out[start + octets.size :] = 0

    def read(self, data: Array) -> Array:
        """Return the indices, (count,) uint32, that `write` wrote. Raises WireError if `data` is not such a code."""
        start = self.low * self._plane_bytes
        high = np.flatnonzero(np.unpackbits(data[start:], count=self.high))
        if high.size == self.count:
            indices: Array = high.astype(np.uint32)
            indices -= np.arange(self.count, dtype=np.uint32)
            indices <<= np.uint32(self.low)
            for plane in range(self.low):
                octets = data[plane * self._plane_bytes :][: self._plane_bytes]
                indices |= np.unpackbits(octets, count=self.count).astype(np.uint32) << np.uint32(plane)
            if indices[-1] < self.length and (indices[1:] > indices[:-1]).all():
                return indices
        raise WireError(
            f"{self.count} indices below {self.length} were expected, but the message holds others",
            cause="the message was damaged, or the nodes run different versions of TopKube",
            next_step="run the same version of TopKube on all nodes",
        )
