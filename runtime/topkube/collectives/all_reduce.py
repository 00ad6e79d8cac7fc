"""The base classes of implementations of algorithms, and the function that loads an implementation."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import numpy as np

from topkube.algorithms import Algorithm, Route, find_algorithm, find_package
from topkube.algorithms.cost import count_wider_bytes
from topkube.arrays import Array
from topkube.collectives.call import Call, find_own_shard, reserve_workspace
from topkube.collectives.error_feedback import Residual
from topkube.collectives.exchange import Exchanges
from topkube.collectives.request import Request
from topkube.collectives.rounds import Exchange, all_reduce, count_buffer_elements, gather_rows
from topkube.collectives.shard import Shard
from topkube.errors import AlgorithmError
from topkube.telemetry import phases
from topkube.world import World


class AllReduce(ABC):
    """The implementation of an algorithm. One object, made from the declaration, serves all arrays of the process."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    @abstractmethod
    def run(self, world: World, request: Request) -> bool:
        """Reduce `request.array`, a NumPy array, in place. Return True if everything that this rank saw was finite.

        Every rank calls this with the same request, but for the array's contents. Ranks may see different parts: the
        caller agrees on the step among all ranks, then accepts or discards what is in `request.residual.pending`.
        """


class NodeAllReduce(AllReduce):
    """An algorithm that differs from others only between nodes.

    Inside each node, ranks add up their arrays and each keeps one shard. Ranks of equal local rank on all nodes
    exchange their shards. At the end, each node gathers its shards.

    If `only_accumulates` is True, `exchange` reads the node's sum through `Shard.accumulate` only, if there is a
    residual. The reduction inside the node then writes the sum and the residual together, into the residual.
    """

    only_accumulates: ClassVar[bool] = False

    @abstractmethod
    def exchange(self, call: Call, shard: Shard) -> None:
        """Exchange the shard with those of equal local rank on other nodes: `shard.values` becomes the result of all
        nodes. Every rank with a shard calls this, also if its shard is empty, or if there is one node only."""

    def run(self, world: World, request: Request) -> bool:
        call, shard = self.reduce_inside(world, request)
        if world.cross_comm is not None:
            self.exchange(call, shard)
        call.all_gather(request.array)
        return all(map(bool, shard.finite))

    def reduce_inside(self, world: World, request: Request) -> tuple[Call, Shard]:
        """Begin a call, and reduce the array inside the node. Return this rank's shard of it."""
        call = Call(world, self.algorithm.name, request)
        count_dense(world, request.nbytes)
        residual = request.residual
        if self.only_accumulates and residual is not None and request.dtype == "float32":
            finite, is_accumulated = reduce_into_residual(call, request, residual), True
        else:
            finite, is_accumulated = call.reduce_scatter(request.array, request.scale(world.size)), False
        first, last = find_own_shard(world, request.length)
        scratch = partial(_find_scratch, world)
        values = request.array[first:last]
        return call, Shard(world, request, values, world.calls, scratch, [finite], is_accumulated)


class ShardAllReduce(NodeAllReduce):
    """An algorithm whose nodes send each other one message: `pack` returns what this rank sends, the algorithm's
    `route` carries it, `unpack` puts the result into the shard. The same `pack` and `unpack` serve CPU arrays and, if
    the algorithm is declared `on_device`, tensors on a GPU.

    If `is_repeatable` is True, `pack` and `unpack` launch the same kernels whenever lengths, types, the parameters of
    the request and the momentum of its residual are the same, and they never wait for the device: a CUDA graph may
    record them. If `over_all_ranks` is True, tensors on a GPU are not reduced inside the node first: the transport
    adds them up over all ranks, and the shard is the whole tensor.
    """

    is_repeatable: ClassVar[bool] = False
    over_all_ranks: ClassVar[bool] = False

    @abstractmethod
    def pack(self, shard: Shard) -> Any:
        """Return what this rank sends to its equals on other nodes, beside `shard.values`.

        For Route.ALL_REDUCE: a 1-D array of float32, bfloat16 or float16, of the same length on all of them, which
        becomes the sum. For Route.ALL_GATHER: `shard.rows(...)` with this node's row filled. `shard.values` may be
        empty.
        """

    @abstractmethod
    def unpack(self, shard: Shard, received: Any) -> None:
        """Put the result into `shard.values`, which is not empty. `received` is what `pack` returned, holding the sum,
        or the rows of all nodes."""

    def exchange(self, call: Call, shard: Shard) -> None:
        world = shard.world
        with phases.current.timed("select"):
            packed = self.pack(shard)
        call.check_between_nodes()
        if world.nodes > 1:
            exchange, sent = build_exchange(self.algorithm.route, world.cross_links, packed)
            finish_exchange(call, exchange, sent)
        if len(shard.values):
            with phases.current.timed("select"):
                self.unpack(shard, packed)


def reduce_into_residual(call: Call, request: Request, residual: Residual) -> bool:
    """Write the node's sum of this rank's shard plus the residual into `residual.pending`. Return True if it is
    finite."""
    scale = request.scale(call.world.size)
    if not residual.has_velocity:
        return call.reduce_scatter(request.array, scale, residual.pending, residual.current)
    finite = call.reduce_scatter(request.array, scale, residual.arriving)
    with phases.current.timed("select"):
        residual.accumulate()
    return finite


def build_exchange(route: Route, comm: Any, payload: Any, tag: int = 0) -> tuple[Exchange, int]:
    """Return the exchange that carries `payload` over `comm`, and the bytes that this rank sends. Exchanges that are
    under way at the same time need different tags."""
    if route is Route.ALL_GATHER:
        return gather_rows(comm, payload, tag), (comm.size - 1) * payload.shape[1]
    buffer = np.empty(count_buffer_elements(payload.size, comm.size), payload.dtype)
    sent = 2 * (comm.size - 1) * payload.nbytes // comm.size
    sent += int(count_wider_bytes(payload.dtype.itemsize, payload.size, comm.size))
    return all_reduce(comm, payload, buffer, tag, _ignore), sent


def finish_exchange(call: Call, exchange: Exchange, sent: int, pause_seconds: float | None = None) -> None:
    """Return when an exchange, in which this rank sends `sent` bytes, is complete. `pause_seconds` is that of
    `Call.wait`."""
    exchanges = Exchanges(call.world)
    exchanges.start(0, exchange)
    exchanges.finish(0, call, pause_seconds)
    phases.current.sent(inter=sent)


def count_dense(world: World, nbytes: int) -> None:
    """Count for telemetry what a dense ring would have sent per rank."""
    phases.current.sent(dense=2 * (world.size - 1) * nbytes // world.size)


@functools.cache
def load(algorithm: Algorithm) -> AllReduce:
    """Return the implementation of an algorithm. Raises AlgorithmError if its class cannot be imported or used."""
    module, _, name = algorithm.implementation.partition(":")
    try:
        implementation_class: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _explain_failure(algorithm, f"{type(error).__name__}: {error}") from error
    base_class = ShardAllReduce if algorithm.on_device else AllReduce
    if not (isinstance(implementation_class, type) and issubclass(implementation_class, base_class)):
        raise _explain_failure(algorithm, f"{name} is not a subclass of topkube.collectives.{base_class.__name__}")
    implementation: AllReduce = implementation_class(algorithm)
    return implementation


def load_by_name(name: str) -> AllReduce:
    """Return the implementation of the algorithm called `name`. Raises ArgumentError or AlgorithmError."""
    return load(find_algorithm(name))


def _explain_failure(algorithm: Algorithm, reason: str) -> AlgorithmError:
    package = find_package(algorithm.name)
    return AlgorithmError(
        f"{algorithm.implementation}, the implementation of {algorithm.name!r}"
        f"{f' in the package {package}' if package else ''}, cannot be used: {reason}",
        package=package.name if package else "",
        cause="the package is incomplete, or it was made for another version of TopKube",
        next_step=f"upgrade the package {package.name}" if package else "correct the declaration's `implementation`",
    )


def _find_scratch(world: World, name: str, length: int, dtype: str) -> Array:
    return reserve_workspace(world, f"scratch {name}", length, dtype)


def _ignore(finite: bool) -> None:
    """Do nothing: `unpack` checks if the sum is finite."""
