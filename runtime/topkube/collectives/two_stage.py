"""The exchange of changes in two stages: what each node sends does not grow with the number of nodes.

A shard is cut into one segment per node, its owner. Each node compresses its changes and sends every other owner its
segment. The owner adds what the other nodes sent to its own change, which it has not compressed, compresses the
weighted mean with the same codec, and sends the row to all nodes. What it does not send of the mean, L, becomes a part
of its own change: L divided by its weight in the mean, so the next mean contains it. (Tang et al., "DoubleSqueeze:
Parallel stochastic gradient descent with double-pass error-compensated compression", 2019, with owners in place of one
server, and without a residual of the server.)

If nodes train with their own changes (training/node_weights/), the mean of their weights is therefore the mean without
any compression. But with many nodes, the owner's weights would be far from those of the other nodes. So at most
`MOST_TIMES` L becomes a part of the owner's change, and `owed` keeps the rest for the next mean.

`pack`, `reduce` and `add` are the work before, between and after the two stages. `exchange` sends the rows, and
`travel` does the same as an exchange that other exchanges accompany (overlapped.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from topkube.arrays import Array, is_tensor, view_like
from topkube.collectives.all_reduce import finish_exchange
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.codecs import Codec, CodecOf, join_flags
from topkube.collectives.exchange import Place, exchange_rows
from topkube.collectives.rounds import Exchange
from topkube.kernels import SIGN_BLOCK
from topkube.telemetry import phases
from topkube.world import World

MOST_TIMES = 16.0
"""The most times that what an owner has not sent of the mean becomes a part of its own change."""


class TwoStage:
    """The two stages for one shard of `length` elements, on node number `node`. `weights` has the weight of each node
    in the mean (1 for a sum).

    `places` are the slices of the shard that belong to one tensor each. `codecs[i]` is the codec of node i's segment,
    which is [bounds[i], bounds[i + 1]) of the shard. `owed` is what this node, as an owner, keeps of the mean beside
    its own change: float32, one value per element of its own segment. It is empty if `keeps_owed` is False.
    `is_finite` is False if something that this node sent was not finite. Shards are NumPy arrays, or tensors on a GPU:
    `allocate_zeros(length)` then returns the memory of `owed`, and `is_finite` is a bool tensor.
    """

    def __init__(
        self,
        codec_of: CodecOf,
        places: Sequence[slice],
        length: int,
        node: int,
        weights: Sequence[float],
        allocate_zeros: Callable[[int], Any] | None = None,
    ) -> None:
        nodes = len(weights)
        self.bounds = cut_into_segments(length, nodes)
        self.places: list[slice] = []
        """The slices of the shard that belong to one tensor and one segment each."""
        self.codecs: list[Codec] = []
        for start, stop in itertools.pairwise(self.bounds):
            cut = _cut(places, start, stop)
            self.places += cut
            self.codecs.append(codec_of([slice(p.start - start, p.stop - start) for p in cut], stop - start))
        self._node, self._nodes = node, nodes
        self._weight, self._weights_of_others = weights[node], [*weights[:node], *weights[node + 1 :]]
        self._times = min(1 / self._weight, MOST_TIMES)
        self.keeps_owed = min(weights) * MOST_TIMES < 1
        """True if a part of what owners have not sent is in `owed`: the same on all nodes."""
        self.is_finite: Any = True
        length = self.segment.stop - self.segment.start if self.keeps_owed else 0
        self.owed: Any = allocate_zeros(length) if allocate_zeros is not None else np.zeros(length, np.float32)

    @property
    def segment(self) -> slice:
        """This node's own segment of the shard."""
        return slice(self.bounds[self._node], self.bounds[self._node + 1])

    def read_owed(self) -> Array:
        """Return `owed` in the host's memory, one value per element of the own segment: a copy if it is on a GPU. Waits
        for the device."""
        if not self.keeps_owed:
            return np.zeros(self.segment.stop - self.segment.start, np.float32)
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
        own: Array,
        pause_seconds: float | None = None,
    ) -> list[Array]:
        """Exchange changes among the nodes of `call` in both stages. `pack` writes what this node sends into one row
        per segment, except for its own. `own` is its change in its own segment, and becomes what `reduce` leaves.
        Return the rows that all owners sent of the mean, for `add`. `pause_seconds` is that of `Call.wait`."""
        me, comm = self._node, call.world.cross_links
        row_bytes = self.codecs[me].row_bytes
        rows, segments, means = self._reserve_rows(call.world, "")
        with phases.current.timed("select"):
            pack(rows)
        first = exchange_rows(comm, rows, segments, 0)
        finish_exchange(call, first, self.total_bytes - row_bytes, pause_seconds)
        with phases.current.timed("select"):
            self.reduce(own, segments, means[me])
        second = exchange_rows(comm, [means[me]] * self._nodes, means, 1)
        finish_exchange(call, second, (self._nodes - 1) * row_bytes, pause_seconds)
        return means

    def travel(
        self, call: Call, pack: Callable[[Sequence[Array]], None], own: Array, place: Place
    ) -> Generator[list[Any], None, list[Array]]:
        """Do what `exchange` does, and yield the messages that have to arrive before it continues; their bytes are
        `sent_bytes`. The first are the greetings of `call`, which are compared. Rows are packed before."""
        means = yield from self.travel_to_owners(call, pack, own, place)
        yield from self.travel_from_owners(call.world.cross_links, means, place.tag)
        return means

    def travel_to_owners(
        self, call: Call, pack: Callable[[Sequence[Array]], None], own: Array, place: Place, kept: str | None = None
    ) -> Generator[list[Any], None, list[Array]]:
        """Do the first stage of `travel`. Return the buffers of the rows that owners send of the mean, with the own row
        filled. The name of their memory ends with `kept`, by default with the number of the place."""
        me, comm = self._node, call.world.cross_links
        rows, segments, means = self._reserve_rows(call.world, f" {place.buffer}", kept)
        with phases.current.timed("select", bucket=call.traced_bucket):
            pack(rows)
        yield from call.await_greetings()
        yield from exchange_rows(comm, rows, segments, place.tag)
        with phases.current.timed("select", bucket=call.traced_bucket):
            self.reduce(own, segments, means[me])
        return means

    def travel_from_owners(self, comm: Any, means: Sequence[Array], tag: int) -> Exchange:
        """Do the second stage of `travel` over `comm`: send the own row of `means` to all nodes, and receive those of
        the other owners."""
        return exchange_rows(comm, [means[self._node]] * self._nodes, means, tag)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this node sends in both stages."""
        return sum(self.sent_bytes_of_stages)

    @property
    def sent_bytes_of_stages(self) -> tuple[int, int]:
        """The bytes that this node sends in each of the stages."""
        row_bytes = self.codecs[self._node].row_bytes
        return self.total_bytes - row_bytes, (self._nodes - 1) * row_bytes

    def _reserve_rows(
        self, world: World, name: str, kept: str | None = None
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return buffers: the rows that this node sends to the owners, the rows of all nodes for its own segment, and
        the rows of the means. Its own rows of the first two are not used. `name` distinguishes exchanges that are under
        way at the same time; `kept` is the name of the means, if they are in use for longer."""
        row_bytes = self.codecs[self._node].row_bytes
        rows = self.cut_rows(reserve_workspace(world, f"rows of owners{name}", self.total_bytes, np.uint8))
        arrived = reserve_workspace(world, f"rows of the segment{name}", self._nodes * row_bytes, np.uint8)
        segments = list(arrived.reshape(self._nodes, row_bytes))
        means = reserve_workspace(world, f"rows of means{name if kept is None else kept}", self.total_bytes, np.uint8)
        return rows, segments, self.cut_rows(means)

    def pack(self, change: Any, rows: Sequence[Any]) -> None:
        """Write the part of `change` that is sent into one row per segment, except for the own one, and subtract it
        from `change`. `change` is the whole shard: (length,) float32."""
        for number, (codec, row) in enumerate(zip(self.codecs, rows, strict=True)):
            if number != self._node:
                segment = change[self.bounds[number] : self.bounds[number + 1]]
                self.is_finite = join_flags(self.is_finite, codec.pack(segment, row))

    def reduce(self, own: Any, rows: Sequence[Any], sent: Any) -> None:
        """Write the part that is sent of the weighted mean into `sent`. `rows` are those of all nodes for the own
        segment; that of this node is not read, because `own` is its change, float32. The rest becomes the change of
        this node, in `own`, and a part of `owed`."""
        codec = self.codecs[self._node]
        if self._weight != 1:
            own *= np.float32(self._weight).item()
        if self.keeps_owed:
            own += self.owed
        if self._weights_of_others:
            rows_of_others = [row for number, row in enumerate(rows) if number != self._node]
            codec.unpack_add(own, rows_of_others, self._weights_of_others)
        self.is_finite = join_flags(self.is_finite, codec.pack(own, sent))
        if self.keeps_owed:
            self.owed[:] = own
            self.owed *= np.float32(max(0.0, 1 - self._times * self._weight)).item()
        if self._times != 1:
            own *= np.float32(self._times).item()

    def add(self, out: Any, rows: Sequence[Any]) -> None:
        """Add what all owners sent to `out`, the whole shard."""
        for codec, row, start, stop in zip(self.codecs, rows, self.bounds, self.bounds[1:], strict=False):
            codec.unpack_add(out[start:stop], [row], [1.0])

    def write(self, out: Any, rows: Sequence[Any]) -> None:
        """Write what all owners sent to `out`, the whole shard."""
        for number in range(self._nodes):
            self.write_segment(out, rows, number)

    def write_segment(self, out: Any, rows: Sequence[Any], number: int) -> None:
        """Write what owner `number` sent to its segment of `out`, the whole shard."""
        start, stop = self.bounds[number : number + 2]
        self.codecs[number].unpack(out[start:stop], [rows[number]], [1.0])


@functools.lru_cache(maxsize=256)
def cut_into_segments(length: int, nodes: int) -> tuple[int, ...]:
    """Return the bounds of the owners' segments of a shard: segment i is [bounds[i], bounds[i + 1]). Blocks that share
    a scale are not cut."""
    blocks = -(-length // SIGN_BLOCK)
    return tuple(min(SIGN_BLOCK * (blocks * i // nodes), length) for i in range(nodes + 1))


def _cut(places: Sequence[slice], start: int, stop: int) -> list[slice]:
    """Return the parts of `places` in [start, stop)."""
    cut = [slice(max(place.start, start), min(place.stop, stop)) for place in places]
    return [place for place in cut if place.start < place.stop]
