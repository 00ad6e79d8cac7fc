"""All-reduce of torch tensors on their device: NCCL inside the node, MPI between nodes, a stream of its own.

Every algorithm that is declared `on_device` runs here: its `pack` and `unpack` (all_reduce.py) work on this rank's
shard on the stream, or it exchanges the shard in two stages (two_stages.py). Several tensors are under way: while the
shards of some travel between nodes, the next one is reduced inside the node and packed. Every rank launches collectives
of NCCL in the same order (reduce 0, reduce 1, gather 0, reduce 2, gather 1, ...; with MPI between nodes, one reduction
more comes before each gather), because NCCL matches calls by order. Bytes cross to the network through pinned host
memory, or directly if MPI takes device pointers. NCCL carries the bytes of an algorithm that declares this transport:
then all of its stages are in the stream, and no message of MPI carries data. On CPU tensors the same code runs with
gloo and without streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from topkube.algorithms import OWN, Route, Transport
from topkube.arrays import view_flat
from topkube.collectives.all_reduce import AllReduce, ShardAllReduce, build_exchange, count_dense
from topkube.collectives.call import Call
from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.device.cuda_aware import mpi_takes_device_pointers
from topkube.collectives.device.graphs import WorkGraphs, describe_work
from topkube.collectives.device.memory import DeviceFlag, DeviceMemory, Mark, Slot
from topkube.collectives.device.node_stages import gather_in_node, reduce_in_node
from topkube.collectives.device.rows import exchange_after_device
from topkube.collectives.device.series_groups import SeriesGroups
from topkube.collectives.device.two_stages import DeviceTwoStages
from topkube.collectives.exchange import Exchanges
from topkube.collectives.overlapped import TAGS
from topkube.collectives.request import Request
from topkube.collectives.shard import Shard
from topkube.errors import ArgumentError
from topkube.telemetry import phases
from topkube.world import World

if TYPE_CHECKING:
    import torch

_PAUSE_SECONDS = 100e-6
"""The time between two looks at messages while no work is due. The processors have little else to do."""
MOST_TRAVELLING = 4
"""The most tensors of which messages of MPI travel between nodes, when the next tensor begins."""


@dataclass
class _UnderWay:
    """A tensor whose all-reduce has begun (it is reduced in the node and packed) and is not finished. `number` counts
    the tensors of a series."""

    number: int
    all_reduce: ShardAllReduce
    call: Call
    slot: Slot
    padded: Any
    shard: Shard
    finished: Callable[[], None]
    packed: Any = None
    """What the algorithm sends and receives; None on ranks without a shard."""
    carried: Any = None
    """The same in memory that MPI reaches."""
    sent: Any = None
    """The mark that the device has to pass before the messages start."""
    two_stages: DeviceTwoStages | None = None
    """The exchange of an algorithm with two stages, in place of `packed` and `carried`."""
    travels: bool = False
    """True if messages carry the tensor between nodes."""


class DeviceAllReduce:
    """All-reduce on `device` for one thread of one process. `begin` takes tensors one after another; `flush` ends what
    is under way and returns True if all of them were finite. The tensors between two calls of `flush` are a series.

    An all-reduce has two halves: before its messages, the sum inside the node and the packing; after them, the
    unpacking and the all-gather inside the node."""

    def __init__(self, world: World, device: torch.device, has_graphs: bool = False) -> None:
        self.world, self.device = world, device
        self.memory = DeviceMemory(device)
        self.graphs = WorkGraphs(self.memory, world.rank) if has_graphs and self.memory.is_cuda else None
        self._groups = SeriesGroups(world, device)
        self._direct = self.memory.is_cuda and mpi_takes_device_pointers()
        self._most_travelling = MOST_TRAVELLING if world.nodes > 1 else 1
        self.slots = [Slot() for _ in range(self._most_travelling + 1)]
        """The work buffers of the tensors that may be under way when another one begins, and of that one."""
        self._number = 0
        self._under_way: deque[_UnderWay] = deque()
        self._exchanges = Exchanges(world)
        self._finite: list[Any] = []
        self._unchecked: list[Any] = []
        """The tensors of this series that `flush` checks."""

    # ---- what callers use

    def begin(self, all_reduce: AllReduce, request: Request, finished: Callable[[], None] = lambda: None) -> None:
        """Reduce `request.array`, a contiguous 1-D tensor on the device, in place. `finished` is called on this thread
        and stream when the result is in place on the stream: at the latest in `flush`. Raises ArgumentError if the
        algorithm is not declared `on_device`."""
        if not isinstance(all_reduce, ShardAllReduce) or not all_reduce.algorithm.on_device:
            device_algorithms = [algorithm.name for algorithm in OWN if algorithm.on_device]
            raise ArgumentError(
                f"{all_reduce.algorithm.name} works on CPU tensors",
                next_step=f"choose one of {', '.join(device_algorithms)} on a GPU",
            )
        self._groups.claim_node()
        under_way = self._reduce_and_pack(all_reduce, request, finished)
        if _is_carried_by_nccl(all_reduce):
            self._finish_all()
        self._start_messages(under_way)
        self._under_way.append(under_way)
        while len(self._under_way) > self._most_travelling:
            self._finish_oldest()

    def flush(self) -> bool:
        """End everything that is under way. Return True if all results on this rank were finite. Waits for the
        device."""
        self._finish_all()
        with self.on_stream():
            self._check_noted()
            finite = self.memory.read_all_true(self._finite)
        self._end_series()
        return finite

    def flush_undecided(self) -> DeviceFlag:
        """End everything that is under way. Return a flag that is 1 on all ranks if a result on one of them was not
        finite. The host does not wait for the device. All ranks call this together. It is allowed only if
        there is one node, or if all algorithms since the last flush use NCCL between nodes: with MPI the host waits."""
        self._finish_all()
        with self.on_stream():
            self._check_noted()
            not_finite = self.memory.flag_any_false(self._finite)
            self._groups.add_flag_over_ranks(not_finite)
            flag = self.memory.read_later((not_finite > 0).float().reshape(()))
        self._end_series()
        return flag

    def check_later(self, tensors: Sequence[Any]) -> None:
        """Count entries of `tensors`, each of one element at least, in the answer of `flush`, which checks all of them
        together. They were written in torch's current stream, and are kept until then."""
        if self.memory.is_cuda and self.memory.stream != self.memory.current_stream:
            self.wait_for(self.mark_caller())
        self._unchecked += tensors

    def _check_noted(self) -> None:
        for dtype in {tensor.dtype for tensor in self._unchecked}:
            same = [tensor for tensor in self._unchecked if tensor.dtype == dtype]
            self._finite.append(self.memory.are_finite(same))
        self._unchecked.clear()

    def lend(self, tensor: Any) -> None:
        """Keep the memory of a tensor of this stream until the caller's stream has done its work with it."""
        self.memory.lend(tensor, self.mark_caller())

    def _end_series(self) -> None:
        self._finite.clear()
        self._number = 0  # the same tensor has the same work buffers in each series, which graphs record
        self._groups.release()

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for the work of this stream; the host does not wait."""
        self.memory.make_caller_wait()

    def mark_caller(self) -> Mark | None:
        """Return a mark in the caller's stream, for `wait_for`."""
        return self.memory.mark_caller()

    def wait_for(self, mark: Mark | None) -> None:
        """Make what is begun next wait for the mark."""
        if mark is not None:
            self.memory.wait_for(mark)

    def on_stream(self) -> Any:
        """Return a context in which torch works on this stream."""
        return self.memory.on_stream()

    # ---- the two halves of an all-reduce

    def _reduce_and_pack(self, all_reduce: ShardAllReduce, request: Request, finished: Callable[[], None]) -> _UnderWay:
        """Reduce inside the node, pack the shard, and copy the message to the memory from which it is sent."""
        world, memory = self.world, self.memory
        call = Call(world, f"{all_reduce.algorithm.name} on {self.device.type}", request)
        count_dense(world, request.nbytes)
        number, self._number = self._number, self._number + 1
        slot = self.slots[number % len(self.slots)]
        if _is_carried_by_nccl(all_reduce) and world.nodes > 1:
            call.check_everywhere()  # NCCL connects at its first collective, and names no rank that is missing
        if all_reduce.over_all_ranks:
            with self.on_stream(), phases.current.timed("inter"):
                padded = values = request.array
                self._groups.reduce_over_ranks(values, request.scale(world.size))
        else:
            with self.on_stream(), phases.current.timed("intra"):
                scale = request.scale(world.size)
                padded, values = reduce_in_node(world, self._groups.node, memory, slot, request.array, scale)
            if world.local_size > 1:
                phases.current.sent(intra=(world.local_size - 1) * request.nbytes // world.local_size)
        shard = Shard(world, request, values, world.calls, partial(self._find_scratch, slot), self._finite)
        under_way = _UnderWay(number, all_reduce, call, slot, padded, shard, finished)
        if world.cross_comm is None:
            return under_way
        with self.on_stream(), phases.current.timed("select"):
            if isinstance(all_reduce, CodecAllReduce) and all_reduce.algorithm.has_two_stages(world.nodes):
                under_way.two_stages = DeviceTwoStages(memory, slot, all_reduce, shard)
                under_way.sent = memory.mark()
                return under_way
            packed = under_way.packed = self._pack(all_reduce, shard)
            if _is_carried_by_nccl(all_reduce):
                if not all_reduce.over_all_ranks:  # otherwise the shard is the sum of all ranks already
                    self._groups.reduce_between_nodes(packed)
            elif world.nodes > 1:
                is_gathered = all_reduce.algorithm.route is Route.ALL_GATHER
                is_direct = self._direct and is_gathered
                under_way.carried = packed if is_direct else memory.find_host_memory(slot, packed)
                if memory.is_cuda and not is_direct:
                    own = world.node if is_gathered else slice(None)
                    under_way.carried[own].copy_(packed[own], non_blocking=True)
                under_way.sent = memory.mark()
        return under_way

    def _pack(self, all_reduce: ShardAllReduce, shard: Shard) -> Any:
        if self.graphs is None or not all_reduce.is_repeatable:
            return all_reduce.pack(shard)
        return self.graphs.run(("pack", *describe_work(all_reduce, shard)), shard, all_reduce.pack)

    def _unpack(self, all_reduce: ShardAllReduce, shard: Shard, packed: Any) -> None:
        if self.graphs is None or not all_reduce.is_repeatable:
            all_reduce.unpack(shard, packed)
            return
        key = ("unpack", packed.data_ptr(), packed.shape, *describe_work(all_reduce, shard))
        self.graphs.run(key, shard, lambda same: all_reduce.unpack(same, packed))

    def _start_messages(self, under_way: _UnderWay) -> None:
        """Start the exchange between nodes. Its messages leave once the device has made what they carry."""
        world, call = self.world, under_way.call
        if world.nodes == 1 or _is_carried_by_nccl(under_way.all_reduce):
            return
        call.check_inside()
        if world.cross_comm is None:
            return
        tag = TAGS + under_way.number % len(self.slots)  # host collectives on the same communicator use tags below
        if under_way.two_stages is not None:
            exchange, sent = under_way.two_stages.travel(tag), under_way.two_stages.sent_bytes
        else:
            route = under_way.all_reduce.algorithm.route
            comm = world.cross_comm if self._direct else world.cross_links  # only MPI takes device pointers
            exchange, sent = build_exchange(route, comm, _convert_for_mpi(under_way.carried), tag)
        under_way.travels = True
        self._exchanges.start(under_way.number, exchange_after_device(under_way.sent, call, exchange))
        phases.current.sent(inter=sent)

    def advance(self) -> float | None:
        """Move what is under way as far as messages allow, without waiting. Return the seconds until the next call
        should come, None if no messages are awaited."""
        self._exchanges.advance()
        if self.world.local_size == 1:  # otherwise all ranks of the node gather in the same order
            while self._under_way and self._under_way[0].travels and not self._is_travelling(self._under_way[0]):
                self._finish_oldest()
        return _PAUSE_SECONDS if self._exchanges.are_running else None

    def _is_travelling(self, under_way: _UnderWay) -> bool:
        return self._exchanges.is_running(under_way.number)

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Do the second half of the tensor that has been under way longest: end its messages, unpack, and deliver all
        shards to every rank of the node."""
        under_way = self._under_way.popleft()
        if self.world.nodes == 1:  # with several nodes, the check came before the messages
            under_way.call.check_everywhere()
        if under_way.travels:
            self._exchanges.finish(under_way.number, under_way.call)
        if self.world.nodes > 1 and not _is_carried_by_nccl(under_way.all_reduce):
            self._check_surplus_ranks(under_way.call)
        with self.on_stream(), phases.current.timed("intra"):
            is_packed = self.world.cross_comm is not None and under_way.two_stages is None
            if is_packed and len(under_way.shard.values):
                if under_way.carried is not None and under_way.carried is not under_way.packed:
                    under_way.packed.copy_(under_way.carried, non_blocking=True)
                    under_way.slot.read = self.memory.mark()
                self._unpack(under_way.all_reduce, under_way.shard, under_way.packed)
            if not under_way.all_reduce.over_all_ranks:
                flat = under_way.shard.request.array
                gather_in_node(self.world, self._groups.node, self.memory, under_way.slot, flat, under_way.padded)
            under_way.finished()

    def _check_surplus_ranks(self, call: Call) -> None:
        """Raise MismatchError on all ranks of the node if one of them received the hash of another call from its
        partner. A rank without a shard has no partner, and would wait in the all-gather for ranks that have raised."""
        if self.world.local_size > self.world.shards:
            call.check_inside()

    def _find_scratch(self, slot: Slot, name: str, length: int, dtype: str) -> Any:
        return self.memory.find_buffer(slot, f"scratch {name}", length, dtype)


def _is_carried_by_nccl(all_reduce: ShardAllReduce) -> bool:
    """Return True if NCCL, not MPI, carries the bytes of the algorithm between nodes."""
    return all_reduce.algorithm.transport is Transport.NCCL


def _convert_for_mpi(x: Any) -> Any:
    """Return what mpi4py takes: NumPy on the host (bfloat16 too), the tensor itself on a device, which has CUDA's array
    interface."""
    if x.is_cuda:
        return x
    return x.numpy() if x.dim() > 1 else view_flat(x, "shard", writable=True)
