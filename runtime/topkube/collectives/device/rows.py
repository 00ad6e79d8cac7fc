"""The exchange of rows between nodes, for values on a device: a codec writes and reads the rows there, and they cross
to other nodes through pinned host memory.

An object is one exchange. `pack` comes first, then `travel` runs among other exchanges. What other nodes have sent is
on the device then: `mean` is what all nodes add to the values that they agree on, and `moved` is the same without what
this node has sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from topkube.arrays import Array
from topkube.collectives.call import Call
from topkube.collectives.codecs import Codec
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.exchange import exchange_rows
from topkube.collectives.rounds import Exchange
from topkube.collectives.two_stage import TwoStage
from topkube.telemetry import phases
from topkube.world import World

WeightedRows = tuple[Sequence[Any], Sequence[float]]
"""Rows on the device, and the factor of each."""


class DeviceRows(ABC):
    """One exchange of rows among the nodes of `world`, whose shares in the mean are `factors`. `codec` is that of all
    values that this rank sends. All work is on the stream of `memory`, except for `pack`, which works on the current
    stream. Buffers are those of `slot`. Those of `own_slot`, if it is passed, have what `pack` writes, which then lasts
    while other exchanges use `slot`."""

    def __init__(
        self,
        memory: DeviceMemory,
        slot: Slot,
        codec: Codec,
        world: World,
        factors: Sequence[float],
        own_slot: Slot | None = None,
    ) -> None:
        self._memory, self._slot, self._own_slot = memory, slot, own_slot or slot
        self.codec, self._world, self._factors = codec, world, factors
        self._own: Any = None
        """The rows that this node sends, after `pack`."""
        self._own_in_host: Any = None

    def pack(self, change: Any) -> Any:
        """Write what this node sends of `change`, float32, and begin to copy it to the host. The rest stays in
        `change`. Return what `Codec.pack` returns."""
        self._own, self._own_in_host = self._find_buffers(self._own_slot, "own rows", self.codec.row_bytes)
        is_finite = self.codec.pack(change, self._own)
        self._memory.copy_between(self._own_in_host, self._own)
        return is_finite

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """The bytes that this node sends to other nodes."""

    @abstractmethod
    def travel(self, comm: Any, tag: int) -> Exchange:
        """Exchange the rows through `comm`, the links between the nodes, once they are in the host's memory.
        Yields the messages, and the marks of the device's work, that have to be complete before it continues."""

    @property
    @abstractmethod
    def mean(self) -> WeightedRows:
        """What all nodes add, for `Codec.unpack_add`."""

    @property
    @abstractmethod
    def moved(self) -> WeightedRows:
        """What all nodes add, less what this node has sent."""

    def _find_buffers(self, slot: Slot, name: str, length: int) -> tuple[Any, Any]:
        """Return a buffer of bytes on the device, and its host memory."""
        on_device = self._memory.find_buffer(slot, name, length, "uint8")
        return on_device, self._memory.find_host_memory(slot, on_device, f"{name} in the host")


class RowsInOneStage(DeviceRows):
    """Every node sends its row to all other nodes."""

    _arrived: Any = None
    """The rows of all nodes but this one, after `travel`."""

    @property
    def sent_bytes(self) -> int:
        return (self._world.nodes - 1) * int(self.codec.row_bytes)

    def travel(self, comm: Any, tag: int) -> Exchange:
        nodes, node, row_bytes = self._world.nodes, self._world.node, self.codec.row_bytes
        with self._memory.on_stream():
            buffers = self._find_buffers(self._slot, "rows of nodes", nodes * row_bytes)
        self._arrived, in_host = (buffer.view(nodes, row_bytes) for buffer in buffers)
        sent = _list_rows([self._own_in_host]) * nodes
        yield from exchange_rows(comm, sent, _list_rows(in_host), tag)
        with self._memory.on_stream():
            for others in (slice(0, node), slice(node + 1, nodes)):
                self._memory.copy_between(self._arrived[others], in_host[others])
            self._slot.read = self._memory.mark()

    @property
    def mean(self) -> WeightedRows:
        return self._rows, self._factors

    @property
    def moved(self) -> WeightedRows:
        return self._rows, [factor - (node == self._world.node) for node, factor in enumerate(self._factors)]

    @property
    def _rows(self) -> list[Any]:
        return [self._own if node == self._world.node else row for node, row in enumerate(self._arrived)]


class RowsInTwoStages(DeviceRows):
    """Every node sends the owners of segments their rows, and the owners send the rows of the means to all nodes
    (collectives/two_stage.py). The memory of `stage` is on the device. The host launches the work between the stages
    when the rows of the other nodes have arrived; other exchanges continue meanwhile. `pack` leaves zeros in the own
    segment, where nothing is sent; `moved` has only the mean there."""

    def __init__(self, stage: TwoStage, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stage = stage
        self._means: Any = None
        """The rows that all owners have sent, after `travel`."""
        self.own_change: Any = None
        """The change of this node in its own segment, after `pack`."""
        self.own_rest: Any = None
        """What remains of it, after `travel`."""

    @property
    def segment(self) -> slice:
        """This node's own segment."""
        return self._stage.segment

    @property
    def sent_bytes(self) -> int:
        return self._stage.sent_bytes

    def pack(self, change: Any) -> Any:
        segment = change[self._stage.segment]
        self.own_change = self._memory.find_buffer(self._own_slot, "own change", len(segment), "float32")
        self.own_change.copy_(segment)
        segment.zero_()  # so that this part of the rows has no effect
        self._stage.is_finite = super().pack(change)
        return self._stage.is_finite

    def travel(self, comm: Any, tag: int) -> Exchange:
        stage, memory, nodes, node = self._stage, self._memory, self._world.nodes, self._world.node
        row_bytes = stage.codecs[node].row_bytes
        with memory.on_stream():
            buffers = self._find_buffers(self._slot, "rows of the segment", nodes * row_bytes)
            self._means, means_in_host = self._find_buffers(self._slot, "rows of means", stage.total_bytes)
        arrived, arrived_in_host = (buffer.view(nodes, row_bytes) for buffer in buffers)
        rows = _list_rows(stage.cut_rows(self._own_in_host))
        yield from exchange_rows(comm, rows, _list_rows(arrived_in_host), tag)
        with memory.on_stream(), phases.current.timed("select"):
            memory.copy_between(arrived, arrived_in_host)
            self.own_rest = memory.find_buffer(self._slot, "own rest", len(self.own_change), "float32")
            self.own_rest.copy_(self.own_change)
            own_mean = stage.cut_rows(self._means)[node]
            stage.reduce(self.own_rest, list(arrived), own_mean)
            memory.copy_between(stage.cut_rows(means_in_host)[node], own_mean)
            reduced = memory.mark()
        if reduced is not None:
            yield [reduced]
        means = _list_rows(stage.cut_rows(means_in_host))
        yield from exchange_rows(comm, [means[node]] * nodes, means, tag)
        with memory.on_stream():
            memory.copy_between(self._means, means_in_host)
            self._slot.read = memory.mark()

    @property
    def mean(self) -> WeightedRows:
        return [self._means], [1.0]

    @property
    def moved(self) -> WeightedRows:
        return [self._means, self._own], [1.0, -1.0]


def exchange_after_device(sent: Any, call: Call, exchange: Exchange) -> Exchange:
    """Yield what `exchange` awaits, after the device has passed the mark `sent`, and after other nodes have shown that
    they entered the same call."""
    if sent is not None:
        yield [sent]
    yield from call.await_greetings()
    yield from exchange


def _list_rows(rows: Sequence[Any]) -> list[Array]:
    """Return rows in host memory as mpi4py takes them."""
    return [row.numpy() for row in rows]
