"""The exchange of changes in two stages: what each node sends does not grow with the number of nodes.

A shard is cut into one segment per node, its owner. Each node compresses its changes and sends every owner its segment.
The owner adds the weighted mean of all nodes to its own residual, compresses the sum with the same codec, keeps the
rest as its residual, and sends the row to all nodes. (Tang et al., "DoubleSqueeze: Parallel stochastic gradient descent
with double-pass error-compensated compression", 2019, with owners in place of one server.)

`pack`, `reduce` and `add` are the work before, between and after the two stages. `exchange` sends the rows, and
`travel` does the same as an exchange that other exchanges accompany (overlapped.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from topkube.arrays import Array, is_tensor, view_like
from topkube.collectives.all_reduce import finish_exchange
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.codecs import Codec, CodecOf, join_flags
from topkube.collectives.exchange import Place, exchange_rows
from topkube.kernels import SIGN_BLOCK
from topkube.telemetry import phases
from topkube.world import World


class TwoStage:
    """The two stages for one shard of `length` elements, on node number `node` of `nodes`.

    `places` are the slices of the shard that belong to one tensor each. `codecs[i]` is the codec of node i's segment,
    which is [bounds[i], bounds[i + 1]) of the shard. `owed` is what this node, as an owner, has not sent of the mean
    change of all nodes: float32, one value per element of its own segment. `is_finite` is False if something that this
    node sent was not finite. Shards are NumPy arrays, or tensors on a GPU: `allocate_zeros(length)` then returns the
    memory of `owed`, and `is_finite` is a bool tensor.
    """

    def __init__(
        self,
        codec_of: CodecOf,
        places: Sequence[slice],
        length: int,
        node: int,
        nodes: int,
        allocate_zeros: Callable[[int], Any] | None = None,
    ) -> None:
        blocks = -(-length // SIGN_BLOCK)
        self.bounds = [min(SIGN_BLOCK * (blocks * i // nodes), length) for i in range(nodes + 1)]
        self.places: list[slice] = []
        """The slices of the shard that belong to one tensor and one segment each."""
        self.codecs: list[Codec] = []
        for start, stop in itertools.pairwise(self.bounds):
            cut = _cut(places, start, stop)
            self.places += cut
            self.codecs.append(codec_of([slice(p.start - start, p.stop - start) for p in cut], stop - start))
        self._node, self._nodes = node, nodes
        self.is_finite: Any = True
        length = self.segment.stop - self.segment.start
        self.owed: Any = allocate_zeros(length) if allocate_zeros is not None else np.zeros(length, np.float32)

    @property
    def segment(self) -> slice:
        """This node's own segment of the shard."""
        return slice(self.bounds[self._node], self.bounds[self._node + 1])

    def read_owed(self) -> Array:
        """Return `owed` in the host's memory: a copy if it is on a GPU. Waits for the device."""
        values: Array = self.owed.cpu().numpy() if is_tensor(self.owed) else self.owed
        return values

    def write_owed(self, values: Array) -> None:
        """Write `values`, float32, into `owed`."""
        self.owed[:] = view_like(values, self.owed)

    def cut_rows(self, buffer: Any) -> list[Any]:
        """Cut `buffer`, (total_bytes,) uint8, into one row per segment."""
        rows, end = list[Any](), 0
        for codec in self.codecs:
            rows.append(buffer[end : end + codec.row_bytes])
            end += codec.row_bytes
        return rows

    @property
    def total_bytes(self) -> int:
        """The bytes of one row per segment."""
        return sum(codec.row_bytes for codec in self.codecs)

    def exchange(
        self,
        call: Call,
        pack: Callable[[Sequence[Array]], None],
        weights: Sequence[float],
        pause_seconds: float | None = None,
    ) -> list[Array]:
        """Exchange changes among the nodes of `call` in both stages. `pack` writes what this node sends into one row
        per segment. `weights` has one factor per node. Return the rows that all owners sent of the mean, for `add`.
        `pause_seconds` is that of `Call.wait`."""
        me, comm = self._node, call.world.cross_comm
        row_bytes = self.codecs[me].row_bytes
        rows, segments, means = self._reserve_rows(call.world, "")
        with phases.current.timed("select"):
            pack(rows)
        first = exchange_rows(comm, rows, segments, 0)
        finish_exchange(call, first, self.total_bytes - row_bytes, pause_seconds)
        with phases.current.timed("select"):
            self.reduce(segments, weights, means[me])
        second = exchange_rows(comm, [means[me]] * self._nodes, means, 1)
        finish_exchange(call, second, (self._nodes - 1) * row_bytes, pause_seconds)
        return means

    def travel(
        self, call: Call, pack: Callable[[Sequence[Array]], None], weights: Sequence[float], place: Place
    ) -> Generator[list[Any], None, list[Array]]:
        """Do what `exchange` does, and yield the messages that have to arrive before it continues; their bytes are
        `sent_bytes`. The first are the greetings of `call`, which are compared. Rows are packed before."""
        me, comm = self._node, call.world.cross_comm
        rows, segments, means = self._reserve_rows(call.world, f" {place.buffer}")
        with phases.current.timed("select", bucket=call.traced_bucket):
            pack(rows)
        yield call.greetings
        call.compare_greetings()
        yield from exchange_rows(comm, rows, segments, place.tag)
        with phases.current.timed("select", bucket=call.traced_bucket):
            self.reduce(segments, weights, means[me])
        yield from exchange_rows(comm, [means[me]] * self._nodes, means, place.tag)
        return means

    @property
    def sent_bytes(self) -> int:
        """The bytes that this node sends in both stages."""
        row_bytes = self.codecs[self._node].row_bytes
        return self.total_bytes - row_bytes + (self._nodes - 1) * row_bytes

    def _reserve_rows(self, world: World, name: str) -> tuple[list[Array], list[Array], list[Array]]:
        """Return buffers: the rows that this node sends to the owners, the rows of all nodes for its own segment, of
        which its own row is the same memory, and the rows of the means. `name` distinguishes exchanges that are under
        way at the same time."""
        row_bytes = self.codecs[self._node].row_bytes
        rows = self.cut_rows(reserve_workspace(world, f"rows of owners{name}", self.total_bytes, np.uint8))
        arrived = reserve_workspace(world, f"rows of the segment{name}", self._nodes * row_bytes, np.uint8)
        segments = list(arrived.reshape(self._nodes, row_bytes))
        segments[self._node] = rows[self._node]
        means = reserve_workspace(world, f"rows of means{name}", self.total_bytes, np.uint8)
        return rows, segments, self.cut_rows(means)

    def pack(self, change: Any, rows: Sequence[Any]) -> None:
        """Write the part of `change` that is sent into one row per segment, and subtract it from `change`. `change` is
        the whole shard: (length,) float32."""
        for codec, row, start, stop in zip(self.codecs, rows, self.bounds, self.bounds[1:], strict=False):
            self.is_finite = join_flags(self.is_finite, codec.pack(change[start:stop], row))

    def reduce(self, rows: Sequence[Any], weights: Sequence[float], sent: Any) -> None:
        """Add the weighted mean of all nodes' rows for the own segment to `owed`. Write the part that is sent into
        `sent`; the rest stays in `owed`."""
        codec = self.codecs[self._node]
        codec.unpack_add(self.owed, rows, weights)
        self.is_finite = join_flags(self.is_finite, codec.pack(self.owed, sent))

    def add(self, out: Any, rows: Sequence[Any]) -> None:
        """Add what all owners sent to `out`, the whole shard."""
        for codec, row, start, stop in zip(self.codecs, rows, self.bounds, self.bounds[1:], strict=False):
            codec.unpack_add(out[start:stop], [row], [1.0])

    def write(self, out: Any, rows: Sequence[Any]) -> None:
        """Write what all owners sent to `out`, the whole shard."""
        for codec, row, start, stop in zip(self.codecs, rows, self.bounds, self.bounds[1:], strict=False):
            codec.unpack(out[start:stop], [row], [1.0])


def _cut(places: Sequence[slice], start: int, stop: int) -> list[slice]:
    """Return the parts of `places` in [start, stop)."""
    cut = [slice(max(place.start, start), min(place.stop, stop)) for place in places]
    return [place for place in cut if place.start < place.stop]
