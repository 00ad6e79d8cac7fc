"""A call of a collective on a rank: the check that all ranks entered the same call, the stages inside the node, the
waits.

Every rank hashes the parameters of its call. Inside the node the hash is part of every stage; between nodes the ranks
of equal local rank send it to each other at the start (greetings.py), and compare the hashes before they use anything
else. A rank that continues therefore has the same hash as its whole node and as all ranks that it greeted
(`greetings.list_greeted`). A rank that receives another hash informs all ranks, also those that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import numpy as np
import xxhash

from topkube import _kernels
from topkube.algorithms import MATRIX_RANK
from topkube.arrays import DTYPE_CODES, Array, as_bytes
from topkube.collectives.greetings import LinkGreetings, MpiGreetings, list_greeted
from topkube.collectives.mismatch import describe_ranks
from topkube.collectives.request import Matrix, Request
from topkube.errors import MismatchError
from topkube.telemetry import phases, trace
from topkube.world import World

_Result = TypeVar("_Result")


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
        """Enter the call. With `greets_with_values`, the greetings are sent later, with values
        (`exchange.greeted_all_reduce`); otherwise they are on their way now."""
        world.enter()
        self.world = world
        self.name = f"all-reduce {algorithm!r}"
        self._description = _describe(algorithm, request)
        self._hash = xxhash.xxh3_64_intdigest(f"{world.calls} {self._description}".encode())
        self._stage = 0
        self.traced_bucket = trace.active.bucket if trace.active is not None else None
        """The number of the bucket in a trace."""
        self.greetings: LinkGreetings | MpiGreetings | None = None
        """The greetings between nodes, if this rank exchanges any."""
        self.greets_with_values = False
        """True if the greetings wait for values to carry."""
        if partners := list_greeted(world):
            self.greetings = (MpiGreetings if world.links is None else LinkGreetings)(world, partners, self._hash)
            self.greets_with_values = greets_with_values
            if not greets_with_values:
                self.greetings.send()

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

    def _run_inside_node(self, sent: int, stage: str, work: Callable[[int, float], _Result]) -> _Result:
        """Return what `work` returns, a stage inside the node, given its signature and the deadline. Convert its
        failures to typed errors. `stage` is its name in a trace."""
        self._stage += 1
        world = self.world
        world.cache["call"] = self
        try:
            with phases.current.timed("intra", stage, self.traced_bucket):
                result = work((self._hash + self._stage) % 2**64, world.deadline_seconds)
        except _kernels.NodeTimeout:
            world.give_up(self.name)
        except _kernels.NodeMismatch:
            self._raise_mismatch()
        if world.local_size > 1:
            phases.current.sent(intra=sent)
        return result

    def all_reduce_inside(self, x: Array, scale: float) -> bool:
        """Replace x by the node's sum times `scale`. Return True if the sum is finite."""
        node, values, code = self._node, as_bytes(x), DTYPE_CODES[x.dtype]
        stage = "all-reduce inside node"
        return self._run_inside_node(
            x.nbytes, stage, lambda *common: bool(node.all_reduce(values, code, scale, *common))
        )

    def reduce_scatter(self, x: Array, scale: float, out: Array | None = None, add: Array | None = None) -> bool:
        """Write the node's sum times `scale` (plus `add`) into this rank's shard of x, or into `out` (fp32). Return
        True if it is finite."""
        first, last = find_own_shard(self.world, x.size)
        sent, node, values, code = x.nbytes - (last - first) * x.itemsize, self._node, as_bytes(x), DTYPE_CODES[x.dtype]
        return self._run_inside_node(
            sent, trace.REDUCE, lambda *common: bool(node.reduce_scatter(values, code, scale, out, add, *common))
        )

    def all_gather(self, x: Array) -> None:
        """Gather all shards of x on every rank of the node."""
        first, last = find_own_shard(self.world, x.size)
        sent, node, values = (last - first) * x.itemsize, self._node, as_bytes(x)
        self._run_inside_node(sent, trace.GATHER, lambda *common: node.all_gather(values, x.itemsize, None, *common))

    def check_between_nodes(self) -> None:
        """Raise MismatchError unless the ranks that this rank exchanges with entered the same call. Called once, after
        the first stage inside the node and before the first message."""
        assert not self.greets_with_values
        if self.greetings is not None:
            self.wait_for(self.greetings.awaited)
            self.compare_greetings()

    def compare_greetings(self) -> None:
        """Raise MismatchError if a hash that has arrived differs. Called when the greetings are complete."""
        if self.greetings is not None and self.greetings.differ:
            self._raise_mismatch()

    def await_greetings(self) -> Iterator[Any]:
        """Yield the messages of the greetings, and compare the hashes when they are complete: the first part of an
        exchange (exchange.py)."""
        assert not self.greets_with_values
        yield self.greetings.awaited if self.greetings is not None else []
        self.compare_greetings()

    def check_everywhere(self) -> None:
        """Raise MismatchError unless all ranks entered the same call. For a call whose messages go to any rank."""
        self.check_inside()
        self.check_between_nodes()
        self.check_inside()

    def check_inside(self) -> None:
        """Raise MismatchError unless all ranks of this node entered the same call. For a call without a stage inside
        the node that compares hashes."""
        self._run_inside_node(0, "check of the call", self._node.check)

    def wait_for(self, awaited: Any) -> None:
        """Return when what an exchange awaits is complete: messages of MPI or of links. Raises CollectiveTimeout after
        the deadline."""
        self.world.wait(awaited, self.name, self._check_mismatch)

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
        groups, listed = describe_ranks(self.world, self.world.agreement, self._description)
        raise MismatchError(
            f"ranks entered collective {self.world.calls} with different parameters. {listed}"
            if groups > 1
            else f"ranks entered {listed} after different numbers of collectives",
            cause="ranks passed arrays of different lengths, shapes or types, or a residual on some ranks only, or took"
            " different branches",
            next_step="make every rank enter the same collectives in the same order, with equal parameters",
        )


def _describe(algorithm: str, request: Request) -> str:
    """Return the name of the algorithm and everything in the request that must be the same on all ranks. The density
    has all of its digits, because the last one may change the number of entries."""
    options = f" density={float(request.density)} wire={request.wire} selection={request.selection}"
    if request.dense_wire != "fp32":
        options += f" dense_wire={request.dense_wire}"
    if request.matrix_rank != MATRIX_RANK.default:
        options += f" matrix_rank={request.matrix_rank}"
    if request.matrices:
        options += f" matrices={_describe_matrices(request.matrices)}"
    if request.residual is not None:
        options += " residual with momentum" if request.residual.has_velocity else " with residual"
    return f"{algorithm} length={request.length} dtype={request.dtype} op={request.op}{options}"


def _describe_matrices(matrices: tuple[Matrix, ...]) -> str:
    """Return the rows and columns of the only matrix, or the number of matrices and a hash of their places."""
    if len(matrices) == 1:
        return f"{matrices[0].rows}x{matrices[0].columns}"
    places = " ".join(f"{matrix.start} {matrix.length} {matrix.columns}" for matrix in matrices)
    return f"{len(matrices)} (hash {xxhash.xxh3_64_hexdigest(places.encode())})"


def _check_current_call(world: World) -> None:
    call: Call = world.cache["call"]
    call.check_others()
