"""The all-reduce of a shard on a device in two stages (collectives/two_stage.py, rows.py)."""

from __future__ import annotations

from functools import partial

from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.device.rows import RowsInTwoStages
from topkube.collectives.rounds import Exchange
from topkube.collectives.shard import Shard
from topkube.telemetry import phases


class DeviceTwoStages:
    """One exchange of `shard` by `all_reduce`, with work buffers of `slot`, on the stream of `memory`, which is the
    current one. What this node sends to the owners is packed, and on its way to the host."""

    def __init__(self, memory: DeviceMemory, slot: Slot, all_reduce: CodecAllReduce, shard: Shard) -> None:
        self._memory, self._all_reduce, self._shard = memory, all_reduce, shard
        self._stage, self._change = all_reduce.build_stage(shard), shard.accumulate()
        # The codec of the rows of all owners, side by side: one call of a kernel works on all of them.
        self._codec = all_reduce.codec(self._stage.places, len(shard.values), shard.request.wire)
        factors = [1.0] * shard.world.nodes
        self._rows = RowsInTwoStages(self._stage, memory, slot, self._codec, shard.world, factors)
        self._rows.pack(self._change)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this node sends in both stages."""
        return self._rows.sent_bytes

    def travel(self, tag: int) -> Exchange:
        """Exchange the rows, once they are in the host's memory, and write the result into the shard. Yields the
        messages, and the mark of the device's work, that have to be complete before it continues."""
        yield from self._rows.travel(self._shard.world.cross_links, tag)
        with self._memory.on_stream(), phases.current.timed("select"):
            rows, weights = self._rows.mean
            write = partial(self._codec.unpack, rows=rows, weights=weights)
            self._change[self._stage.segment] = self._rows.own_rest
            self._all_reduce.end_two_stages(self._shard, self._stage, write)
