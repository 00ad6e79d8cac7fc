"""All-reduce of torch tensors where they lie: NCCL inside the node, MPI between nodes, a stream of its own.

The same stages as `hierarchical` and `hitopk` (sparse.py), as a pipeline of two: while the entries of one tensor
travel between nodes, the next one is reduced and selected. Every rank launches in the same order (reduce 0, reduce 1,
gather 0, reduce 2, gather 1, ...), because NCCL matches calls by order. Bytes cross to the network through pinned host
memory, or directly where MPI takes device pointers. On CPU tensors the same code runs with gloo and without streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, flat_view, is_tensor
from topkube.collectives.call import Call, own_shard, shard_bounds
from topkube.collectives.cuda_aware import mpi_takes_device_pointers
from topkube.collectives.exchange import (
    PAIRWISE_LIMIT,
    Exchanges,
    all_gather_rows,
    all_reduce_buffer_length,
    pairwise_all_reduce,
    ring_all_reduce,
)
from topkube.collectives.node_group import NodeGroup
from topkube.collectives.registry import Algorithm, Request
from topkube.collectives.sparse import kept
from topkube.compression.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.telemetry import phases
from topkube.world import World

if TYPE_CHECKING:
    import torch

_SLOTS = 2


@dataclass
class _Slot:
    """Work buffers of one tensor under way, kept from call to call."""

    buffers: dict[str, Any]
    read: Any = None
    """The device has read this slot's host memory up to here."""


@dataclass
class _UnderWay:
    """A tensor between its two halves."""

    flat: Any
    padded: Any
    shard: Any
    algorithm: Algorithm
    request: Request
    call: Call
    slot: _Slot
    sent: Any
    """What the device has to finish before the messages start; None where there are none."""
    rows: Any
    exchanges: Exchanges | None
    finished: Callable[[], None]


class DeviceAllReduce:
    """All-reduce on `device` for one thread of one process. `begin` takes tensors one after another; `flush` ends what
    is under way and tells whether all of them were finite."""

    def __init__(self, world: World, device: torch.device) -> None:
        import torch

        self.world, self.device, self._torch = world, device, torch
        self._cuda = device.type == "cuda"
        self._group: NodeGroup | None = None
        self._direct = self._cuda and mpi_takes_device_pointers()
        cuda: Any = torch.cuda
        self.stream: Any = cuda.Stream(device, priority=-1) if self._cuda else None
        self._slots = [_Slot({}) for _ in range(_SLOTS)]
        self._number = 0
        self._under_way: _UnderWay | None = None
        self._finite: list[Any] = []

    # ---- what callers use

    def begin(
        self,
        flat: torch.Tensor,
        algorithm: Algorithm,
        op: str = "mean",
        density: float = 1.0,
        wire: str = "fp32",
        selection: str = "topk",
        residual: Residual | None = None,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Reduces `flat` (1-D, contiguous, float32, bfloat16 or float16) in place. `finished` is called on this
        thread and stream when flat's result is in place on the stream: at the latest in `flush`. Raises ArgumentError
        for an algorithm that knows host memory only."""
        if algorithm.sparse and algorithm.name != "hitopk":
            raise ArgumentError(
                f"{algorithm.name} works on CPU tensors", next_step='use "hitopk" or a dense algorithm on a GPU'
            )
        under_way = self._first_half(flat, algorithm, op, density, wire, selection, residual, finished)
        self._finish_previous()
        self._post(under_way)
        self._under_way = under_way

    def flush(self) -> bool:
        """Ends everything that is under way; whether all results on this rank were finite. Waits for the device."""
        self._finish_previous()
        with self._on_stream():
            finite = bool(self._torch.stack(self._finite).all()) if self._finite else True
        self._finite.clear()
        return finite

    def follow(self) -> None:
        """The caller's stream goes on when this one's work is done; the host does not wait."""
        if self._cuda:
            self._torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def ready(self) -> Any:
        """A mark in the caller's stream, for `after`."""
        if not self._cuda:
            return None
        return self._torch.cuda.current_stream(self.device).record_event()

    def after(self, mark: Any) -> None:
        """What is begun next waits for the mark."""
        if mark is not None:
            self.stream.wait_event(mark)

    def on_stream(self) -> Any:
        """A context in which torch works on this stream."""
        return self._on_stream()

    # ---- halves

    def _first_half(
        self,
        flat: Any,
        algorithm: Algorithm,
        op: str,
        density: float,
        wire: str,
        selection: str,
        residual: Residual | None,
        finished: Callable[[], None],
    ) -> _UnderWay:
        """Reduce inside the node, select, encode; and the copy to where the network takes it."""
        world, torch = self.world, self._torch
        dtype = {torch.float32: np.dtype(np.float32), torch.bfloat16: BFLOAT16, torch.float16: np.dtype(np.float16)}
        described = np.broadcast_to(np.zeros(1, dtype[flat.dtype]), (flat.numel(),))  # the length, without memory
        request = Request(described, op, density, wire, selection, residual)
        call = Call(world, f"{algorithm.name} on {self.device.type}", request)
        phases.current.sent(dense=2 * (world.size - 1) * described.nbytes // world.size)
        slot = self._slots[self._number % _SLOTS]
        self._number += 1
        if self._group is None:
            self._group = NodeGroup(world, self.device)
        with self._on_stream(), phases.current.timed("intra"):
            padded, shard = self._reduce(slot, flat, request.scale(world.size))
        if world.local_size > 1:
            phases.current.sent(intra=(world.local_size - 1) * described.nbytes // world.local_size)
        under_way = _UnderWay(flat, padded, shard, algorithm, request, call, slot, None, None, None, finished)
        if algorithm.sparse:
            with self._on_stream(), phases.current.timed("select"):
                self._select(under_way)
        elif world.nodes > 1 and world.cross_comm is not None:
            with self._on_stream():
                under_way.rows = self._to_host(slot, shard)
        if world.nodes > 1 and world.cross_comm is not None and self._cuda:
            under_way.sent = self.stream.record_event()
        return under_way

    def _reduce(self, slot: _Slot, flat: Any, scale: float) -> tuple[Any, Any]:
        """(the array in equal parts, this rank's shard of the node's sum times `scale`)."""
        assert self._group is not None
        world = self.world
        narrow = flat.dtype != self._torch.float32
        if narrow and scale != 1:
            flat.mul_(scale)  # before the sum: that of all ranks may exceed fp16
        if world.local_size == 1:
            padded = shard = flat
        elif world.local_size != world.shards:  # nodes of different sizes: shards and ranks do not match
            self._group.all_reduce(flat)
            first, last = own_shard(world, flat.numel())
            padded, shard = flat, flat[first:last]
        else:
            part = -(-flat.numel() // world.shards)
            padded = self._in_parts(slot, flat, part)
            shard = self._buffer(slot, "shard", part, flat.dtype)
            self._group.reduce_scatter(shard, padded)
            first, last = own_shard(world, flat.numel())
            shard = shard[: last - first]
        if not narrow and scale != 1:
            shard.mul_(scale)
        return padded, shard

    def _select(self, under_way: _UnderWay) -> None:
        """The shard's largest entries, encoded, in this node's row of `rows`."""
        world, request, shard = self.world, under_way.request, under_way.shard
        if world.cross_comm is None:
            return
        bounds = shard_bounds(under_way.flat.numel(), world.shards)
        k = kept(under_way.flat.numel(), request.density, world.shards)
        sizes = [
            kernels.encoded_size(stop - start, min(k, stop - start), request.wire)
            for start, stop in itertools.pairwise(bounds)
        ]
        row_bytes = -(-max(sizes) // 8) * 8
        rows = self._buffer(under_way.slot, "rows", world.nodes * row_bytes, self._torch.uint8)
        rows = rows.view(world.nodes, row_bytes)
        k = min(k, shard.numel())
        residual = request.residual
        pending = residual.pending if residual is not None else None
        if k == 0:
            indices, values = self._empty(0, self._torch.uint32), self._empty(0, self._torch.float32)
        elif residual is not None and (residual.momentum or request.selection == "mstopk"):
            if residual.momentum:
                residual.pending_velocity.copy_(shard)
                residual.accumulate()
            else:
                self._torch.add(residual.current, shard, out=pending)
            indices, values = _selected(pending, k, request.selection)
            residual.clear(indices.view(self._torch.int32).to(self._torch.int64) & 0xFFFFFFFF)
        elif residual is not None:
            indices, values = kernels.compress_(shard, residual.current, k, out=pending)
        else:
            indices, values = _selected(shard, k, request.selection)
        payload = kernels.encode(indices, values, shard.numel(), wire=request.wire, residual=pending, wait=False)
        row = rows[world.node, : len(payload)]
        row.copy_(payload if is_tensor(payload) else self._torch.from_numpy(payload))
        under_way.rows = rows
        if world.nodes > 1 and self._cuda and not self._direct:
            host = self._host_buffer(under_way.slot, rows.numel(), self._torch.uint8).view_as(rows)
            host[world.node].copy_(rows[world.node], non_blocking=True)

    def _post(self, under_way: _UnderWay) -> None:
        """Starts the messages, once the device has made what they carry."""
        world, call = self.world, under_way.call
        if world.nodes == 1:
            return
        call.same_everywhere()
        if world.cross_comm is None:
            return
        if under_way.sent is not None:
            with phases.current.timed("select"):
                call.wait(under_way.sent.query)
        exchanges = under_way.exchanges = Exchanges(call)
        if under_way.algorithm.sparse:
            rows = under_way.rows
            carried = rows if self._direct else self._host_of(under_way.slot, rows)
            exchanges.start(0, all_gather_rows(world.cross_comm, _for_mpi(carried), 0))
            phases.current.sent(inter=(world.nodes - 1) * rows.shape[1])
            return
        x = _array(under_way.rows)
        room = np.empty(all_reduce_buffer_length(x.size, world.nodes), x.dtype)
        ring = world.nodes > PAIRWISE_LIMIT
        reduce = ring_all_reduce if ring else pairwise_all_reduce
        exchanges.start(0, reduce(world.cross_comm, x, room, 0, lambda finite: None))
        phases.current.sent(inter=2 * (world.nodes - 1) * x.nbytes // world.nodes)

    def _finish_previous(self) -> None:
        """The second half of what is under way: its messages end, and every rank of the node gets all shards."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        if self.world.nodes == 1:
            under_way.call.same_everywhere()
        if under_way.exchanges is not None:
            under_way.exchanges.finish(0)
        with self._on_stream(), phases.current.timed("intra"):
            if under_way.algorithm.sparse:
                self._spread(under_way)
            elif under_way.exchanges is not None:
                under_way.shard.copy_(under_way.rows, non_blocking=True)
                under_way.slot.read = self._mark()
            if under_way.shard.numel() and not under_way.algorithm.sparse:
                self._finite.append(self._torch.isfinite(under_way.shard).all())
            self._gather(under_way)
            under_way.finished()

    def _spread(self, under_way: _UnderWay) -> None:
        """The shard becomes the sum of all nodes' entries, added in the nodes' order."""
        world, shard, torch = self.world, under_way.shard, self._torch
        if world.cross_comm is None or shard.numel() == 0:
            return
        rows = under_way.rows
        if world.nodes > 1 and self._cuda and not self._direct:
            rows.copy_(self._host_of(under_way.slot, rows), non_blocking=True)
            under_way.slot.read = self._mark()
        k = min(kept(under_way.flat.numel(), under_way.request.density, world.shards), shard.numel())
        size = kernels.encoded_size(shard.numel(), k, under_way.request.wire)
        total = (
            shard if shard.dtype == torch.float32 else self._buffer(under_way.slot, "sum", shard.numel(), torch.float32)
        )
        total.zero_()
        for row in rows:
            self._finite.append(self._as_flag(kernels.decode_add_(total, row[:size], wait=False)))
        if total is not shard:
            kernels.cast_(shard, total)

    def _gather(self, under_way: _UnderWay) -> None:
        assert self._group is not None
        world, flat, padded = self.world, under_way.flat, under_way.padded
        if world.local_size == 1:
            return
        if world.local_size != world.shards:
            for root, (start, stop) in enumerate(itertools.pairwise(shard_bounds(flat.numel(), world.shards))):
                self._group.broadcast(flat[start:stop], root)
            return
        part = padded.numel() // world.shards
        shard = self._buffer(under_way.slot, "shard", part, flat.dtype)  # what under_way.shard is the beginning of
        self._group.all_gather(padded, shard)
        if padded is not flat:
            for i, (start, stop) in enumerate(itertools.pairwise(shard_bounds(flat.numel(), world.shards))):
                flat[start:stop].copy_(padded[i * part : i * part + stop - start])
        phases.current.sent(intra=(world.local_size - 1) * part * flat.element_size())

    # ---- memory and streams

    def _on_stream(self) -> Any:
        return self._torch.cuda.stream(self.stream) if self._cuda else nullcontext()

    def _mark(self) -> Any:
        return self.stream.record_event() if self._cuda else None

    def _in_parts(self, slot: _Slot, flat: Any, part: int) -> Any:
        """`flat` itself where it is cut into equal parts; else a copy whose parts are padded by an element."""
        shards = self.world.shards
        if flat.numel() == part * shards:
            return flat
        padded = self._buffer(slot, "padded", part * shards, flat.dtype)
        for i, (start, stop) in enumerate(itertools.pairwise(shard_bounds(flat.numel(), shards))):
            padded[i * part : i * part + stop - start].copy_(flat[start:stop])
            padded[i * part + stop - start : (i + 1) * part].zero_()
        return padded

    def _empty(self, length: int, dtype: Any) -> Any:
        return self._torch.empty(length, dtype=dtype, device=self.device)

    def _buffer(self, slot: _Slot, name: str, length: int, dtype: Any) -> Any:
        needed = length * dtype.itemsize
        buffer = slot.buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            buffer = slot.buffers[name] = self._empty(needed, self._torch.uint8)
        return buffer[:needed].view(dtype)

    def _host_buffer(self, slot: _Slot, length: int, dtype: Any) -> Any:
        """Pinned memory, free once the device has read what was there before."""
        if slot.read is not None:
            slot.read.synchronize()
            slot.read = None
        needed = length * dtype.itemsize
        buffer = slot.buffers.get("host")
        if buffer is None or buffer.numel() < needed:
            buffer = self._torch.empty(needed, dtype=self._torch.uint8, pin_memory=self._cuda)
            slot.buffers["host"] = buffer
        return buffer[:needed].view(dtype)

    def _host_of(self, slot: _Slot, rows: Any) -> Any:
        if not self._cuda:
            return rows
        return slot.buffers["host"][: rows.numel()].view_as(rows)

    def _to_host(self, slot: _Slot, shard: Any) -> Any:
        """A dense shard where MPI and the CPU's sums reach it."""
        if not self._cuda:
            return shard
        host = self._host_buffer(slot, shard.numel(), shard.dtype)
        host.copy_(shard, non_blocking=True)
        return host

    def _as_flag(self, finite: Any) -> Any:
        return finite if is_tensor(finite) else self._torch.tensor(finite, device=self.device)


def _selected(x: Any, k: int, selection: str) -> tuple[Any, Any]:
    return kernels.mstopk(x, k) if selection == "mstopk" else kernels.topk(x, k)


def _array(x: Any) -> Any:
    """A CPU tensor as NumPy; bfloat16 too."""
    return flat_view(x, "shard", writable=True)


def _for_mpi(rows: Any) -> Any:
    """What mpi4py takes: NumPy on the host, the tensor itself (its CUDA array interface) on a device."""
    return rows if rows.is_cuda else rows.numpy()
