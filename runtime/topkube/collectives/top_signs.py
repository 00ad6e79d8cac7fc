"""The largest tenth of the values with one bit each: the codec of `topk1bit`. The kernel `top_sign_pack_` describes the
bytes. The indices have 0.525 bits per element of the array, whatever the indices are; their entropy is 0.47. Rows of
a tensor therefore always have the same length."""

from __future__ import annotations

from collections.abc import Sequence

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.codecs import TensorCodec
from topkube.collectives.sparse import count_selected

TOP_SHARE = 0.1
"""The share of the elements of each tensor that is sent."""


class TopSigns(TensorCodec):
    """A codec of the largest tenth of the elements of each tensor, at least one: their indices, their signs, and the
    mean magnitude of each 256 of them in bf16."""

    def count_bytes(self, length: int) -> int:
        return int(kernels.top_sign_bytes(length, _count_sent(length)))

    def pack_tensor(self, values: Array, row: Array) -> bool:
        return bool(kernels.top_sign_pack_(values, _count_sent(values.size), row))

    def unpack_add_tensor(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for row, weight in zip(rows, weights, strict=True):
            kernels.top_sign_unpack_add_(out, _count_sent(out.size), row, weight)


def _count_sent(length: int) -> int:
    """Return how many of `length` elements are sent."""
    return min(count_selected(length, TOP_SHARE), length)
