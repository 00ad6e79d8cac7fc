"""The largest tenth of the values with one bit each: the codec of `topk1bit`. The kernel `top_sign_pack_` describes the
bytes. The indices have 0.525 bits per element of the array, whatever the indices are; their entropy is 0.47. Rows of
a place therefore always have the same length."""

from __future__ import annotations

from collections.abc import Sequence

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.codecs import Codec
from topkube.collectives.sparse import count_selected

TOP_SHARE = 0.1
"""The share of the elements of each place that is sent."""


class TopSigns(Codec):
    """A codec of the largest tenth of the elements of each place, at least one: their indices, their signs, and the
    mean magnitude of each 256 of them in bf16. `places` are the slices of the values that belong to one tensor each."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._parts: list[tuple[slice, int, slice]] = []
        """(place, number of sent values, slice of the row) of each place."""
        self.row_bytes = 0
        for place in places:
            length = place.stop - place.start
            if length:
                count = min(count_selected(length, TOP_SHARE), length)
                start = self.row_bytes
                self.row_bytes += kernels.top_sign_bytes(length, count)
                self._parts.append((place, count, slice(start, self.row_bytes)))

    def pack(self, values: Array, row: Array) -> bool:
        is_finite = True
        for place, count, part in self._parts:
            is_finite = kernels.top_sign_pack_(values[place], count, row[part]) and is_finite
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for place, count, part in self._parts:
            for row, weight in zip(rows, weights, strict=True):
                kernels.top_sign_unpack_add_(out[place], count, row[part], weight)
