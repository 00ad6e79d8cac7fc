"""Greetings: the messages by which the ranks that exchange shards check that they entered the same call.

Each rank sends a hash of its call to the ranks of equal local rank on other nodes, and compares the hashes that arrive
before it uses anything else. The greeting of a small array also carries the array's values, so that they need no
messages of their own. Over `world.links`, compiled code sends and compares greetings, and adds up such values;
otherwise MPI carries them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube import kernels
from topkube.algorithms.cost import list_partners, sends_directly
from topkube.arrays import Array, as_bytes
from topkube.links import ANY_LENGTH_TAG
from topkube.world import World

_MOST_GREETED_BYTES, _ROOM_BYTES = 512 << 10, 1 << 20
"""The most bytes of values in a greeting, and in all greetings that a rank receives."""
_HASH_BYTES = 8


def count_greeted_bytes(nodes: int) -> int:
    """Return the most bytes of values in a greeting between `nodes` nodes: a multiple of 8, so that values are aligned;
    0 for one node, and for many nodes, whose exchanges have several rounds."""
    if nodes == 1 or not sends_directly(nodes):
        return 0
    return min(_MOST_GREETED_BYTES, _ROOM_BYTES // (nodes - 1)) // _HASH_BYTES * _HASH_BYTES


def list_greeted(world: World) -> list[int]:
    """Return the ranks of the communicator between nodes that this rank exchanges greetings with: all others, or among
    many nodes those that it exchanges values with in rounds and in rings. There, algorithms that send to all nodes
    (`exchange.exchange_rows`) or to pairs of them (`gtopk`) also send to ranks that they have not greeted. If the call
    of such a rank differs, the ranks that it greets find out, and inform all."""
    if world.cross_comm is None or world.nodes == 1:
        return []
    return list(list_partners(world.cross_comm.rank, world.cross_comm.size))


class MpiGreetings:
    """The greetings of a call with `partners`, as messages of MPI. `awaited` are the requests of those that are under
    way."""

    def __init__(self, world: World, partners: list[int], call_hash: int) -> None:
        self.awaited: list[Any] = []
        self._world, self._hash, self._partners = world, call_hash, partners
        self._sent: list[Array] = []
        # Other ranks may have entered calls with other parameters: there is room for the greetings of any call.
        self._arrived = np.empty((len(self._partners), _HASH_BYTES + count_greeted_bytes(world.nodes)), np.uint8)
        for row, partner in zip(self._arrived, self._partners, strict=True):
            self.awaited.append(world.cross_comm.Irecv(row, partner, ANY_LENGTH_TAG))

    def send(self) -> None:
        """Send the hash to all partners."""
        self.send_values([np.empty(0, np.uint8)] * self._world.nodes)

    def send_values(self, parts: list[Array]) -> None:
        """Send the hash, and `parts[p]` to rank p of the communicator between nodes."""
        for partner in self._partners:
            part = as_bytes(parts[partner])
            message = np.empty(_HASH_BYTES + part.size, np.uint8)
            message[:_HASH_BYTES].view(np.uint64)[0] = self._hash
            message[_HASH_BYTES:] = part
            self._sent.append(message)
            self.awaited.append(self._world.cross_comm.Isend(message, partner, ANY_LENGTH_TAG))

    @property
    def differ(self) -> bool:
        """True if a hash that has arrived differs. Read when `awaited` is complete."""
        hashes = self._arrived[:, :_HASH_BYTES].view(np.uint64).reshape(-1).tolist()
        return any(arrived != self._hash for arrived in hashes)

    def add_up(self, own: Array, scale: float) -> bool:
        """Replace `own` by its sum with the values that arrived, in rank order, times `scale`. Return True if it is
        finite. Called when `awaited` is complete and `differ` is False."""
        end, me = _HASH_BYTES + own.nbytes, self._world.cross_comm.rank
        inputs = {p: row[_HASH_BYTES:end].view(own.dtype) for p, row in zip(self._partners, self._arrived, strict=True)}
        inputs[me] = own
        kernels.sum_(own, [inputs[rank] for rank in range(self._world.nodes)], scale)
        return bool(kernels.is_finite(own))


class LinkGreetings:
    """The greetings of a call with `partners`, as messages of `world.links`. `awaited` is what is under way, an empty
    list before that."""

    def __init__(self, world: World, partners: list[int], call_hash: int) -> None:
        assert world.links is not None
        self.awaited: Any = []
        self._links, self._partners, self._hash = world.links, partners, call_hash
        self._room = count_greeted_bytes(world.nodes)
        self._greeting: Any = None

    def send(self) -> None:
        """Send the hash to all partners, and receive theirs."""
        self._greeting = self._links.greet(self._partners, self._hash, self._room)
        self.awaited = self._greeting.all_greeted

    def reduce(self, x: Array, tag: int, scale: float, is_in_one_round: bool) -> Any:
        """Send the hash with values, and begin to replace x by its sum over all nodes times `scale`: the values of all
        of it, or those of segments, and then the sums with `tag`. Return the reduction: `is_finite` tells about this
        rank's part."""
        self._greeting = self._links.greet_and_reduce(
            self._partners, self._hash, self._room, x, tag, scale, is_in_one_round
        )
        self.awaited = self._greeting.all_greeted
        return self._greeting

    def abandon(self) -> None:
        """Leave the reduction, although it is not complete: x does not change any more."""
        self._links.abandon(self._greeting)

    @property
    def differ(self) -> bool:
        """True if a hash that has arrived differs. Read when `awaited` is complete."""
        return bool(self._greeting.differs)
