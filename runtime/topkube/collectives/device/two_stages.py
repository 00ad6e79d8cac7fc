"""The exchange of a shard on a device in two stages (collectives/two_stage.py): rows are written and added up on the
device, and cross to other nodes through pinned host memory.

The host launches the work between the stages when the rows of the other nodes have arrived. So it also waits for the
device, but other exchanges continue meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.codecs import join_flags
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.exchange import Exchange, exchange_rows
from topkube.collectives.shard import Shard
from topkube.telemetry import phases


class DeviceTwoStages:
    """One exchange of `shard` by `all_reduce`, with work buffers of `slot`. All methods work on the stream of
    `memory`."""

    def __init__(self, memory: DeviceMemory, slot: Slot, all_reduce: CodecAllReduce, shard: Shard) -> None:
        self._memory, self._slot, self._all_reduce, self._shard = memory, slot, all_reduce, shard
        self._stage, self._change = all_reduce.build_stage(shard), shard.accumulate()
        segments = [slice(start, stop) for start, stop in itertools.pairwise(self._stage.bounds)]
        self._rows = all_reduce.codec(segments, len(shard.values), shard.request.wire)
        """The codec of the rows of all owners, side by side: one call of a kernel works on all of them."""
        stage, node, nodes = self._stage, shard.world.node, shard.world.nodes
        row_bytes = stage.codecs[node].row_bytes
        rows = shard.scratch("rows of owners", stage.total_bytes, "uint8")
        arrived = shard.scratch("rows of the segment", nodes * row_bytes, "uint8")
        means = shard.scratch("rows of means", stage.total_bytes, "uint8")
        self._on_device = rows, arrived, means
        self._in_host = [
            memory.find_host_memory(slot, buffer, name)
            for name, buffer in zip(("host rows", "host segment", "host means"), self._on_device, strict=True)
        ]

    @property
    def sent_bytes(self) -> int:
        """The bytes that this node sends in both stages."""
        return self._stage.sent_bytes

    def pack(self) -> None:
        """Write what this node sends to the owners, and begin to copy it to the host."""
        rows = self._on_device[0]
        self._stage.is_finite = join_flags(self._stage.is_finite, self._rows.pack(self._change, rows))
        self._memory.copy_between(self._in_host[0], rows)

    def travel(self, tag: int) -> Exchange:
        """Exchange the rows, once they are in the host's memory, and write the result into the shard. Yields the
        messages, and the mark of the device's work, that have to be complete before it continues."""
        world, stage, memory = self._shard.world, self._stage, self._memory
        node, comm = world.node, world.cross_comm
        rows, arrived, means = self._on_device
        host_rows, host_arrived, host_means = self._in_host
        yield from exchange_rows(comm, _list_rows(stage.cut_rows(host_rows)), _list_rows(self._cut(host_arrived)), tag)
        with memory.on_stream(), phases.current.timed("select"):
            memory.copy_between(arrived, host_arrived)
            segments = self._cut(arrived)
            segments[node] = stage.cut_rows(rows)[node]
            own_mean = stage.cut_rows(means)[node]
            stage.reduce(segments, [1.0] * world.nodes, own_mean)
            memory.copy_between(stage.cut_rows(host_means)[node], own_mean)
            reduced = memory.mark()
        if reduced is not None:
            yield [reduced]
        sent = _list_rows(stage.cut_rows(host_means))
        yield from exchange_rows(comm, [sent[node]] * world.nodes, sent, tag)
        with memory.on_stream(), phases.current.timed("select"):
            memory.copy_between(means, host_means)
            self._slot.read = memory.mark()
            write = partial(self._rows.unpack, rows=[means], weights=[1.0])
            self._all_reduce.end_two_stages(self._shard, stage, self._change, write)

    def _cut(self, arrived: Any) -> list[Any]:
        """Cut the rows of all nodes for the segment of this node."""
        nodes = self._shard.world.nodes
        return list(arrived.reshape(nodes, len(arrived) // nodes))


def _list_rows(rows: Sequence[Any]) -> list[Any]:
    """Return rows in host memory as mpi4py takes them."""
    return [row.numpy() for row in rows]
