"""One bit per element, with a scale per block: `OneBit`, and the rows of bytes in which shards travel between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.all_reduce import ShardAllReduce
from topkube.collectives.shard import Shard


def sign_row_bytes(length: int) -> int:
    """Return the bytes of a row for `length` elements: the scales, then the bits, rounded up to a multiple of 8."""
    return -(-(2 * _blocks(length) + -(-length // 8)) // 8) * 8


def sign_row_views(row: Array, length: int) -> tuple[Array, Array]:
    """Return the scales, (blocks,) uint16, and the bits, (ceil(length / 8),) uint8, in a row of bytes."""
    blocks = _blocks(length)
    return row[: 2 * blocks].view("uint16"), row[2 * blocks : 2 * blocks + -(-length // 8)]


def unpack_rows(out: Array, rows: Array, weights: Sequence[float]) -> None:
    """Add to `out` (float32) what the rows of all nodes send, times the nodes' weights, in the order of the nodes."""
    kernels.sign_unpack_add_(out, [sign_row_views(row, len(out)) for row in rows], weights)


class OneBit(ShardAllReduce):
    """Every rank sends the signs of its shard and the mean magnitude of each block of 256 elements, in bf16. What is
    not sent stays in the residual. In training the residual is in the node's weights (training/node_weights/)."""

    def pack(self, shard: Shard) -> Any:
        rows = shard.rows(max(map(sign_row_bytes, shard.lengths)))
        total = shard.accumulate()
        scales, bits = sign_row_views(rows[shard.world.node], len(total))
        shard.finite.append(kernels.sign_pack_(total, scales, bits)[2])
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        is_wide = shard.request.dtype == "float32"
        total = shard.values if is_wide else shard.scratch("float32 values", len(shard.values), "float32")
        total[:] = 0
        unpack_rows(total, received, [1.0] * len(received))
        if not is_wide:
            kernels.cast_(shard.values, total)


def _blocks(length: int) -> int:
    return -(-length // kernels.SIGN_BLOCK)
