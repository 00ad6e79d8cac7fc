"""A call of a collective on a rank: the check that all ranks entered the same call, the stages inside the node, the
waits.

Every rank hashes the parameters of its call. Inside the node the hash is part of every stage; between nodes the ranks
of equal local rank send it to each other at the start (the greeting), and compare the hashes before they use anything
else. A rank that continues therefore has the same hash as its whole node and as all ranks that it exchanges with. A
rank that receives another hash informs all ranks, also those that wait.

The greeting of a small array also carries the array's values, so that they need no messages of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import xxhash

from topkube import _kernels
from topkube.algorithms import MATRIX_RANK
from topkube.algorithms.cost import PAIRWISE_LIMIT
from topkube.arrays import DTYPE_CODES, Array, as_bytes
from topkube.collectives.request import Request
from topkube.errors import MismatchError
from topkube.links import ANY_LENGTH_TAG
from topkube.telemetry import phases, trace
from topkube.world import World

_TAG = ANY_LENGTH_TAG
"""The tag of the greetings on the communicator between nodes. Tags of pieces count from 0."""
_MOST_GREETED_BYTES, _ROOM_BYTES = 512 << 10, 1 << 20
"""The most bytes of values in a greeting, and in all greetings that a rank receives."""
_HASH_BYTES = 8


def compute_shard_bounds(length: int, shards: int) -> list[int]:
    """Return the bounds of the shards of `length` elements: shard i is [bounds[i], bounds[i + 1])."""
    return [length * i // shards for i in range(shards + 1)]


def find_own_shard(world: World, length: int) -> tuple[int, int]:
    """Return the bounds of this rank's shard of `length` elements; it is empty for surplus ranks."""
    if world.local_rank >= world.shards:
        return 0, 0
    return length * world.local_rank // world.shards, length * (world.local_rank + 1) // world.shards


def reserve_workspace(world: World, name: str, length: int, dtype: Any) -> Array:
    """Return a buffer that is kept from call to call: allocating pages costs more than the work in them."""
    bytes_needed = length * np.dtype(dtype).itemsize
    buffer: Array | None = world.cache.get(name)
    if buffer is None or buffer.size < bytes_needed:
        buffer = world.cache[name] = np.empty(bytes_needed, np.uint8)
    view: Array = buffer[:bytes_needed].view(dtype)
    return view


class Call:
    """An all-reduce in progress on this rank."""

    def __init__(self, world: World, algorithm: str, request: Request, greets_with_values: bool = False) -> None:
        """Enter the call. With `greets_with_values`, `greet` sends the greeting later; otherwise it is on its way
        now."""
        world.enter()
        self.world = world
        self.name = f"all-reduce {algorithm!r}"
        options = f" density={request.density:g} wire={request.wire} selection={request.selection}"
        if request.dense_wire != "fp32":
            options += f" dense_wire={request.dense_wire}"
        if request.matrix_rank != MATRIX_RANK.default:
            options += f" matrix_rank={request.matrix_rank}"
        self._description = f"{algorithm} length={request.length} dtype={request.dtype} op={request.op}{options}"
        self._hash = xxhash.xxh3_64_intdigest(f"{world.calls} {self._description}".encode())
        self._stage = 0
        self.traced_bucket = trace.active.bucket if trace.active is not None else None
        """The number of the bucket in a trace."""
        self.greetings: list[Any] = []
        """The requests of the greetings between nodes."""
        self._sent: list[Array] = []
        self._partners = _list_partners(world)
        # Other ranks may have entered calls with other parameters: there is room for the greetings of any call.
        self._arrived = np.empty((len(self._partners), _HASH_BYTES + count_greeted_bytes(world.nodes)), np.uint8)
        for row, partner in zip(self._arrived, self._partners, strict=True):
            self.greetings.append(world.cross_links.Irecv(row, partner, _TAG))
        self.greets_with_values = greets_with_values and bool(self._partners)
        if not self.greets_with_values:
            self._send_greetings([np.empty(0, np.uint8)] * len(self._partners))

    def _send_greetings(self, values: list[Array]) -> None:
        for partner, part in zip(self._partners, values, strict=True):
            message = np.empty(_HASH_BYTES + part.size, np.uint8)
            message[:_HASH_BYTES].view(np.uint64)[0] = self._hash
            message[_HASH_BYTES:] = part
            self._sent.append(message)
            self.greetings.append(self.world.cross_links.Isend(message, partner, _TAG))

    def greet(self, parts: list[Array]) -> list[Any]:
        """Send the greetings, with the values `parts[p]` for rank p of the communicator between nodes. Return the
        requests of all greetings. Called once, if `greets_with_values` is True."""
        self.greets_with_values = False
        self._send_greetings([as_bytes(parts[partner]) for partner in self._partners])
        return self.greetings

    def read_greeted(self, nbytes: int) -> dict[int, Array]:
        """Return the first `nbytes` of the values that each partner sent with its greeting, uint8. Called after
        `compare_greetings`."""
        ends = _HASH_BYTES + nbytes
        return {p: row[_HASH_BYTES:ends] for p, row in zip(self._partners, self._arrived, strict=True)}

    @property
    def _node(self) -> Any:
        """The shared memory of this node."""
        world = self.world
        node = world.cache.get("node")
        if node is None:
            cells = 4  # as many as fit into the window, up to 64
            while _kernels.Node.window_bytes(world.local_size, cells + 1) <= world.window.size and cells < 64:
                cells += 1
            node = _kernels.Node(
                world.window,
                world.local_rank,
                world.local_size,
                world.shards,
                cells,
                world.crowded,
                lambda: _check_current_call(world),
            )
            world.cache["node"] = node
        return node

    @contextmanager
    def _run_inside_node(self, sent: int, stage: str) -> Iterator[tuple[int, float]]:
        """Yield the signature and the deadline of one stage, and convert its failures to typed errors. `stage` is its
        name in a trace."""
        self._stage += 1
        world = self.world
        world.cache["call"] = self
        try:
            with phases.current.timed("intra", stage, self.traced_bucket):
                yield (self._hash + self._stage) % 2**64, world.deadline_seconds
        except _kernels.NodeTimeout:
            world.give_up(self.name)
        except _kernels.NodeMismatch:
            self._raise_mismatch()
        if world.local_size > 1:
            phases.current.sent(intra=sent)

    def all_reduce_inside(self, x: Array, scale: float) -> bool:
        """Replace x by the node's sum times `scale`. Return True if the sum is finite."""
        with self._run_inside_node(x.nbytes, "all-reduce inside node") as (signature, deadline):
            return bool(self._node.all_reduce(as_bytes(x), DTYPE_CODES[x.dtype], scale, signature, deadline))

    def reduce_scatter(self, x: Array, scale: float, out: Array | None = None, add: Array | None = None) -> bool:
        """Write the node's sum times `scale` (plus `add`) into this rank's shard of x, or into `out` (fp32). Return
        True if it is finite."""
        first, last = find_own_shard(self.world, x.size)
        with self._run_inside_node(x.nbytes - (last - first) * x.itemsize, trace.REDUCE) as (signature, deadline):
            return bool(
                self._node.reduce_scatter(as_bytes(x), DTYPE_CODES[x.dtype], scale, out, add, signature, deadline)
            )

    def all_gather(self, x: Array) -> None:
        """Gather all shards of x on every rank of the node."""
        first, last = find_own_shard(self.world, x.size)
        with self._run_inside_node((last - first) * x.itemsize, trace.GATHER) as (signature, deadline):
            self._node.all_gather(as_bytes(x), x.itemsize, None, signature, deadline)

    def check_between_nodes(self) -> None:
        """Raise MismatchError unless the ranks that this rank exchanges with entered the same call. Called once, after
        the first stage inside the node and before the first message."""
        if self.greetings:
            self.world.wait(self.greetings, self.name, self._check_mismatch)
            self.compare_greetings()

    def compare_greetings(self) -> None:
        """Raise MismatchError if a hash that has arrived differs. Called when `greetings` are complete."""
        hashes = self._arrived[:, :_HASH_BYTES].view(np.uint64).reshape(-1).tolist()
        if any(arrived != self._hash for arrived in hashes):
            self._raise_mismatch()

    def check_everywhere(self) -> None:
        """Raise MismatchError unless all ranks entered the same call. For a call whose messages go to any rank."""
        self.check_inside()
        self.check_between_nodes()
        self.check_inside()

    def check_inside(self) -> None:
        """Raise MismatchError unless all ranks of this node entered the same call. For a call without a stage inside
        the node that compares hashes."""
        with self._run_inside_node(0, "check of the call") as (signature, deadline):
            self._node.check(signature, deadline)

    def wait(
        self,
        ready: Callable[[], bool],
        pause_seconds: float | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """Return when `ready()` is true. Raises CollectiveTimeout after the deadline. If `pause_seconds` is given, the
        wait sleeps for that long between two calls of `ready`. `sleep` is that of `waiting.wait_until`."""
        self.world.wait_until(ready, self.name, self._check_mismatch, pause_seconds=pause_seconds, sleep=sleep)

    def check_others(self) -> None:
        """Join a roll call, and check if other ranks entered another call. Long waits inside the node call this."""
        self.world.check_roll_call(self.name)
        self._check_mismatch()

    def _check_mismatch(self) -> None:
        if self.world.control.has_seen_mismatch():
            self._raise_mismatch()

    def _raise_mismatch(self) -> NoReturn:
        self.world.control.report_mismatch()
        groups, listed = self.world.describe_ranks(self.world.agreement, self._description)
        raise MismatchError(
            f"ranks entered collective {self.world.calls} with different parameters. {listed}"
            if groups > 1
            else f"ranks entered {listed} after different numbers of collectives",
            cause="ranks passed arrays of different lengths or types, or took different branches",
            next_step="make every rank enter the same collectives in the same order, with equal parameters",
        )


def count_greeted_bytes(nodes: int) -> int:
    """Return the most bytes of values in a greeting between `nodes` nodes: a multiple of 8, so that values are aligned;
    0 for rings and one node."""
    if not 1 < nodes <= PAIRWISE_LIMIT:
        return 0
    return min(_MOST_GREETED_BYTES, _ROOM_BYTES // (nodes - 1)) // _HASH_BYTES * _HASH_BYTES


def _list_partners(world: World) -> list[int]:
    """Return the ranks of the communicator between nodes that this rank exchanges greetings with."""
    if world.cross_comm is None or world.nodes == 1:
        return []
    nodes, me = world.cross_comm.size, world.cross_comm.rank
    # With more nodes, exchanges are rings, and hashes go to both neighbours only.
    return [(me + distance) % nodes for distance in (range(1, nodes) if nodes <= PAIRWISE_LIMIT else (1, nodes - 1))]


def _check_current_call(world: World) -> None:
    call: Call = world.cache["call"]
    call.check_others()
