"""The exchange of changes in one stage: every node sends a row with its changes to all other nodes.

A shard is sent in parts. A part travels while the next parts are packed, and it is added to the result while later
parts travel. So the link waits for the processor only at the first part, and the processor for the link only at the
end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from topkube.algorithms import Route
from topkube.arrays import Array
from topkube.collectives.all_reduce import build_exchange
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.codecs import Codec, CodecOf
from topkube.collectives.exchange import Exchanges
from topkube.telemetry import phases

PART_ELEMENTS = 2**19
"""The elements of a part that a processor packs while the part before it travels (64 KB of signs)."""
_MOST_PARTS = 2**13
"""More parts than a shard has: two shards that are under way use different tags."""
FREE_TAGS = 2 * _MOST_PARTS
"""The first tag that no exchange of this module uses. MPI has 32,768 tags."""


class OneStage:
    """The exchange of one shard of `length` elements. `places` are the slices of the shard that belong to one tensor
    each; a part ends with the tensor in which it reaches `part_elements` (PART_ELEMENTS if it is None), so every tensor
    is packed as in a shard without parts. `bounds` and `codecs` are those of the parts: part i is [bounds[i],
    bounds[i + 1]) of the shard."""

    def __init__(
        self, codec_of: CodecOf, places: Sequence[slice], length: int, part_elements: int | None = None
    ) -> None:
        part_elements = max(part_elements or PART_ELEMENTS, -(-length // (_MOST_PARTS - 1)))
        self.bounds = [0]
        part_places: list[list[slice]] = [[]]
        for place in places:
            start = self.bounds[-1]
            part_places[-1].append(slice(place.start - start, place.stop - start))
            if place.stop - start >= part_elements and place.stop < length:
                self.bounds.append(place.stop)
                part_places.append([])
        self.bounds.append(length)
        sizes = [stop - start for start, stop in itertools.pairwise(self.bounds)]
        self.codecs: list[Codec] = [
            codec_of(own_places, size) for own_places, size in zip(part_places, sizes, strict=True)
        ]
        self._rows: list[Array] = []
        """The rows of all nodes for each part, (nodes, bytes), between `begin` and `finish`."""

    def begin(self, call: Call, pack: Callable[[int, Array], object], exchanges: Exchanges, number: int) -> None:
        """Send the changes of a shard to the other nodes of `call`. `pack(part, row)` writes what this node sends of a
        part into its row. The exchanges of the parts are started in `exchanges`. `number` is the number of the shard:
        shards with neighbouring numbers may be under way at the same time."""
        world, lane = call.world, number % 2
        size = world.nodes * sum(codec.row_bytes for codec in self.codecs)
        buffer = reserve_workspace(world, f"rows of nodes {lane}", size, np.uint8)
        self._rows, end = [], 0
        for part, codec in enumerate(self.codecs):
            start, end = end, end + world.nodes * codec.row_bytes
            rows = buffer[start:end].reshape(world.nodes, codec.row_bytes)
            self._rows.append(rows)
            with phases.current.timed("select"):
                pack(part, rows[world.node])
            if part == 0:
                call.check_between_nodes()
            exchange, sent = build_exchange(Route.ALL_GATHER, world.cross_links, rows, lane * _MOST_PARTS + part)
            exchanges.start(number * _MOST_PARTS + part, exchange)
            phases.current.sent(inter=sent)

    def finish(
        self,
        call: Call,
        add: Callable[[int, list[Array]], object],
        exchanges: Exchanges,
        number: int,
        pause_seconds: float | None = None,
    ) -> None:
        """Pass the rows of all nodes to `add(part, rows)`, part by part. The arguments `call`, `exchanges` and `number`
        are those of `begin`. `pause_seconds` is that of `Call.wait`."""
        for part in range(len(self.codecs)):
            exchanges.finish(number * _MOST_PARTS + part, call, pause_seconds)
            with phases.current.timed("select"):
                add(part, list(self._rows[part]))
        self._rows = []

    def cut(self, shard: Array) -> list[Array]:
        """Return the parts of `shard`, (length,)."""
        return [shard[start:stop] for start, stop in itertools.pairwise(self.bounds)]
