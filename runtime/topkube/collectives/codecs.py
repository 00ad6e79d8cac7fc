"""Codecs turn float32 values into rows of bytes for other nodes, and leave in the values what the bytes do not contain.

`Signs` keeps one bit per element with a scale per block, `Rounded` rounds every value; top_signs.py has a codec that
sends some elements only. A `CodecAllReduce` is an algorithm whose nodes send all other nodes a row. Training with error
feedback in the weights (training/node_weights/) uses the codecs of such an algorithm for the changes of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.all_reduce import ShardAllReduce
from topkube.collectives.shard import Shard

_ALIGNMENT = 8
_DTYPES = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}


class Codec(ABC):
    """The format of one row. `row_bytes` is its length, a multiple of 8."""

    row_bytes: int

    @abstractmethod
    def pack(self, values: Array, row: Array) -> bool:
        """Write what is sent of `values`, float32, into `row`, (row_bytes,) uint8, and subtract it from `values`.
        Return True if all that is sent is finite; a NaN or an infinite value makes it False."""

    @abstractmethod
    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        """Add to `out`, float32, the sum of the decoded rows times `weights`, in the order of the rows."""


class Signs(Codec):
    """One bit per element and the mean magnitude of each block of 256 elements in bf16. Blocks start again in each of
    `places`, the slices of the values that are sent, so the last block of a place may be shorter."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._parts: list[tuple[slice, int]] = []
        self.row_bytes = 0
        for place in places:
            self._parts.append((place, self.row_bytes))
            self.row_bytes += sign_row_bytes(place.stop - place.start)

    def pack(self, values: Array, row: Array) -> bool:
        is_finite = True
        for place, offset in self._parts:
            scales, bits = sign_views(row[offset:], place)
            is_finite = kernels.sign_pack_(values[place], scales, bits)[2] and is_finite
        return is_finite

    def unpack_add(self, out: Array, rows: Sequence[Array], weights: Sequence[float]) -> None:
        for place, offset in self._parts:
            kernels.sign_unpack_add_(out[place], [sign_views(row[offset:], place) for row in rows], weights)


class Rounded(Codec):
    """All of `length` values, rounded to `wire`: "fp32", "bf16" or "fp16"."""

    def __init__(self, length: int, wire: str) -> None:
        self._dtype, self._length = _DTYPES[wire], length
        self.row_bytes = aligned(self._dtype.itemsize * length)

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


class CodecAllReduce(ShardAllReduce):
    """An algorithm whose nodes send a row each to all other nodes."""

    @abstractmethod
    def codec(self, places: Sequence[slice], length: int, wire: str, small: bool = False) -> Codec:
        """Return the codec for `length` values, of which those in `places` belong to one tensor each. `small` is True
        if the tensors are small (biases, norms)."""

    def pack(self, shard: Shard) -> Any:
        wire = shard.request.wire
        rows = shard.rows(max(self.codec([slice(0, n)], n, wire).row_bytes for n in shard.lengths))
        total = shard.accumulate()
        codec = self.codec([slice(0, len(total))], len(total), wire)
        shard.finite.append(codec.pack(total, rows[shard.world.node]))
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        length, is_wide = len(shard.values), shard.request.dtype == "float32"
        total = shard.values if is_wide else shard.scratch("float32 values", length, "float32")
        total[:] = 0
        codec = self.codec([slice(0, length)], length, shard.request.wire)
        codec.unpack_add(total, list(received), [1.0] * len(received))
        if not is_wide:
            kernels.cast_(shard.values, total)


class OneBit(CodecAllReduce):
    """Every node sends the signs of its values, and the mean magnitude of each block of 256. Small tensors are rounded
    to bf16 instead."""

    def codec(self, places: Sequence[slice], length: int, wire: str, small: bool = False) -> Codec:
        return Rounded(length, "bf16") if small else Signs(places)


class LocalSgd(CodecAllReduce):
    """Every node sends all its values, rounded to `wire`."""

    def codec(self, places: Sequence[slice], length: int, wire: str, small: bool = False) -> Codec:
        return Rounded(length, wire)


class SignSgd(ShardAllReduce):
    """Majority vote (Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant",
    2019). The sign of an element is that of most ranks, where a node votes for all its ranks; it is 0 if the votes are
    even. Its magnitude is the mean |x| of its block of 256 elements, averaged over the nodes, so that the result has
    the unit of a gradient. What was not sent is forgotten."""

    def pack(self, shard: Shard) -> Any:
        values = shard.scratch("values", len(shard.values), "float32")
        values[:] = shard.values
        rows = shard.rows(max(map(sign_row_bytes, shard.lengths)))
        scales, bits = sign_views(rows[shard.world.node], slice(0, len(values)))
        shard.finite.append(kernels.sign_pack_(values, scales, bits)[2])
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        length = len(shard.values)
        parts = [sign_views(row, slice(0, length)) for row in received]
        scales = np.zeros(_blocks(length), np.float32)
        for sent, _ in parts:
            scales += sent.view(BFLOAT16).astype(np.float32)
        ones = np.ones(len(scales), np.float32).astype(BFLOAT16).view(np.uint16)
        votes = shard.scratch("values", length, "float32")
        votes[:] = 0
        ranks = [float(len(ranks)) for ranks in shard.world.node_ranks]
        kernels.sign_unpack_add_(votes, [(ones, bits) for _, bits in parts], ranks)
        np.sign(votes, out=votes)
        votes *= np.repeat(scales, kernels.SIGN_BLOCK)[:length]
        shard.values[:] = votes.astype(shard.values.dtype)


def sign_row_bytes(length: int) -> int:
    """Return the bytes of signs and scales for `length` elements: the scales, then the bits, rounded up to 8."""
    return aligned(2 * _blocks(length) + -(-length // 8))


def sign_views(row: Array, place: slice) -> tuple[Array, Array]:
    """Return the scales, (blocks,) uint16, and the bits, (ceil(length / 8),) uint8, at the start of `row`."""
    length = place.stop - place.start
    blocks = _blocks(length)
    return row[: 2 * blocks].view("uint16"), row[2 * blocks : 2 * blocks + -(-length // 8)]


def _blocks(length: int) -> int:
    return -(-length // kernels.SIGN_BLOCK)


def aligned(length: int) -> int:
    """Return `length` in bytes, rounded up to a multiple of 8."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT
