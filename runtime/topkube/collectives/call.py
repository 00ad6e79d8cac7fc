"""One call of a collective on one rank: the check that all ranks entered the same one, the stages inside the node,
the waits.

Every rank hashes what it was asked for. Inside the node the hash is part of every stage; between nodes the ranks of
equal local rank send it to each other at the start, and look at what came before they send anything else. A rank that
goes on has therefore the same hash as its whole node and as all that it will exchange with; one that meets another hash
tells all ranks, also those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import xxhash

from topkube import _kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.registry import Request
from topkube.errors import MismatchError
from topkube.telemetry import phases
from topkube.world import World

_CODES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
_DESCRIPTION_BYTES = 160
_TAG = 32767
"""Of the hashes, on the communicator between nodes: the largest tag that every MPI has. Pieces count from 0."""
_NEIGHBOURS_ABOVE = 16
"""With more nodes than that exchanges are rings, and hashes go to both neighbours only."""


def as_bytes(array: Array) -> Array:
    """The bytes of a contiguous array, as a view; MPI and the kernels take them without asking for the type."""
    return array.view(np.uint8)


def shard_bounds(length: int, shards: int) -> list[int]:
    """Where `length` elements are cut: shard i is [bounds[i], bounds[i + 1])."""
    return [length * i // shards for i in range(shards + 1)]


def own_shard(world: World, length: int) -> tuple[int, int]:
    """This rank's shard of `length` elements; empty for surplus ranks."""
    if world.local_rank >= world.shards:
        return 0, 0
    return length * world.local_rank // world.shards, length * (world.local_rank + 1) // world.shards


def workspace(world: World, name: str, length: int, dtype: Any) -> Array:
    """A buffer that is kept from call to call: fresh pages cost more than the work in them."""
    bytes_needed = length * np.dtype(dtype).itemsize
    buffer: Array | None = world.cache.get(name)
    if buffer is None or buffer.size < bytes_needed:
        buffer = world.cache[name] = np.empty(bytes_needed, np.uint8)
    view: Array = buffer[:bytes_needed].view(dtype)
    return view


class Call:
    """One all-reduce in progress on this rank."""

    def __init__(self, world: World, algorithm: str, request: Request) -> None:
        world.enter()
        self.world = world
        self.name = f"all-reduce {algorithm!r}"
        sparse = f" density={request.density:g} wire={request.wire} selection={request.selection}"
        array = request.array
        self._description = f"{algorithm} length={array.size} dtype={array.dtype} op={request.op}{sparse}"
        self._hash = xxhash.xxh3_64_intdigest(f"{world.calls} {self._description}".encode())
        self._stage = 0
        self._greetings: list[Any] = []
        self._peers = np.empty(0, np.uint64)
        if world.cross_comm is not None and world.nodes > 1:
            self._greet(world.cross_comm)

    def _greet(self, comm: Any) -> None:
        nodes, me = comm.size, comm.rank
        others = range(1, nodes) if nodes <= _NEIGHBOURS_ABOVE else (1, nodes - 1)
        self._mine, self._peers = np.array([self._hash], np.uint64), np.empty(len(others), np.uint64)
        for place, distance in enumerate(others):
            peer = (me + distance) % nodes
            self._greetings.append(comm.Irecv(self._peers[place : place + 1], peer, _TAG))
            self._greetings.append(comm.Isend(self._mine, peer, _TAG))

    @property
    def _node(self) -> Any:
        """The shared-memory object of this node."""
        world = self.world
        node = world.cache.get("node")
        if node is None:
            cells = 4
            while _kernels.Node.bytes(world.local_size, cells + 1) <= world.window.size and cells < 64:
                cells += 1
            node = _kernels.Node(
                world.window,
                world.local_rank,
                world.local_size,
                world.shards,
                cells,
                world.crowded,
                lambda: _look(world),
            )
            world.cache["node"] = node
        return node

    @contextmanager
    def _inside_node(self, sent: int) -> Iterator[tuple[int, float]]:
        """The signature and the deadline of one stage; its failures become ours."""
        self._stage += 1
        world = self.world
        world.cache["call"] = self
        try:
            with phases.current.timed("intra"):
                yield (self._hash + self._stage) % 2**64, world.deadline_seconds
        except _kernels.NodeTimeout:
            world.give_up(self.name)
        except _kernels.NodeMismatch:
            self._mismatch()
        if world.local_size > 1:
            phases.current.sent(intra=sent)

    def all_reduce_inside(self, x: Array, scale: float) -> bool:
        """x becomes the node's sum times `scale`; whether it is finite."""
        with self._inside_node(x.nbytes) as (signature, deadline):
            return bool(self._node.all_reduce(as_bytes(x), _CODES[x.dtype], scale, signature, deadline))

    def reduce_scatter(self, x: Array, scale: float, out: Array | None = None, add: Array | None = None) -> bool:
        """This rank's shard of x, or `out` (fp32), becomes the node's sum times `scale` (plus `add`); whether it is
        finite."""
        first, last = own_shard(self.world, x.size)
        with self._inside_node(x.nbytes - (last - first) * x.itemsize) as (signature, deadline):
            return bool(self._node.reduce_scatter(as_bytes(x), _CODES[x.dtype], scale, out, add, signature, deadline))

    def all_gather(self, x: Array) -> None:
        """Every rank gets all shards of x."""
        first, last = own_shard(self.world, x.size)
        with self._inside_node((last - first) * x.itemsize) as (signature, deadline):
            self._node.all_gather(as_bytes(x), x.itemsize, None, signature, deadline)

    def same_between_nodes(self) -> None:
        """Raises MismatchError unless the ranks that this one exchanges with entered the same call. Once, behind
        the first stage inside the node and before the first message."""
        greetings, self._greetings = self._greetings, []
        if greetings:
            self.world.wait(greetings, self.name, self._listen)
            if (self._peers != self._hash).any():
                self._mismatch()

    def same_everywhere(self) -> None:
        """The same for a call whose messages go to any rank."""
        with self._inside_node(0) as (signature, deadline):
            self._node.check(signature, deadline)
        self.same_between_nodes()
        with self._inside_node(0) as (signature, deadline):
            self._node.check(signature, deadline)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready()` holds; CollectiveTimeout after the deadline."""
        self.world.wait_until(ready, self.name, self._listen)

    def look(self) -> None:
        """What a long wait inside the node does: joins a roll call, and hears whether the others entered something
        else."""
        self.world.look(self.name)
        self._listen()

    def _listen(self) -> None:
        if self.world.told_different():
            self._tell_mismatch()

    def _mismatch(self) -> NoReturn:
        self.world.tell_different()
        self._tell_mismatch()

    def _tell_mismatch(self) -> NoReturn:
        world = self.world
        mine = np.zeros(_DESCRIPTION_BYTES, np.uint8)
        text = self._description.encode()[:_DESCRIPTION_BYTES]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        everyone = np.empty((world.size, _DESCRIPTION_BYTES), np.uint8)
        world.wait([world.agreement.Iallgather(mine, everyone)], "the comparison of mismatched collectives")
        groups: dict[str, list[int]] = {}
        for rank, row in enumerate(everyone):
            groups.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
        listed = "; ".join(f"ranks {', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items())
        raise MismatchError(
            f"ranks entered collective {world.calls} with different parameters. {listed}"
            if len(groups) > 1
            else f"ranks entered {listed} after different numbers of collectives",
            cause="ranks passed arrays of different lengths or types, or took different branches",
            next_step="make every rank enter the same collectives in the same order, with equal parameters",
        )


def _look(world: World) -> None:
    call: Call = world.cache["call"]
    call.look()
