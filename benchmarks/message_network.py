"""Nodes in one process: their exchanges run together, and their messages are copied from one to the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from topkube.arrays import Array, as_bytes
from topkube.collectives.global_top import GlobalTop

Kind = TypeVar("Kind", bound=GlobalTop)


class SimulatedNetwork:
    """The messages between simulated nodes. `sent_bytes` counts the bytes of each node's `Isend`
    calls, not those of collectives. If it `is_exact`, a message that is shorter than the room for it is an error."""

    def __init__(self, nodes: int, is_exact: bool = False) -> None:
        self.is_exact = is_exact
        self.comms = [SimulatedComm(self, node, nodes) for node in range(nodes)]
        self.messages: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self.collected: dict[int, dict[int, Any]] = defaultdict(dict)
        """What the nodes passed to each MPI collective, by its number."""
        self.sent_bytes = [0] * nodes

    def run(self, exchanges: Sequence[Any]) -> None:
        """Run the exchange of each node to its end. Fails if all of them wait for messages that nobody sends."""
        waiting: dict[int, list[SimulatedRequest]] = {node: [] for node in range(len(exchanges))}
        while waiting:
            ready = [node for node, requests in waiting.items() if all(request.test() for request in requests)]
            assert ready, f"nodes {sorted(waiting)} wait for each other"
            for node in ready:
                requests = next(exchanges[node], None)
                if requests is None:
                    del waiting[node]
                else:
                    waiting[node] = requests
        assert not any(self.messages.values()), "a message was not received"


def exchange_top(
    kind: type[Kind], residuals: Sequence[Array], k: int, wire: str
) -> tuple[list[Kind], SimulatedNetwork]:
    """Exchange the k largest entries of the sum of `residuals`, which has an array for each node. Delivered entries are
    removed from the residuals. Return each node's end of the exchange, and the network."""
    network = SimulatedNetwork(len(residuals))
    parts = [kind(residual, k, wire) for residual in residuals]
    network.run([part.exchange(comm) for part, comm in zip(parts, network.comms, strict=True)])
    for part, residual in zip(parts, residuals, strict=True):
        residual[part.find_delivered()] = 0
        part.return_rest(residual)
    return parts, network


class SimulatedRequest:
    """The request of a call that has begun. `try_to_end` returns True when the call has ended."""

    def __init__(self, try_to_end: Callable[[], bool]) -> None:
        self._try_to_end, self._has_ended = try_to_end, False

    def test(self) -> bool:
        self._has_ended = self._has_ended or self._try_to_end()
        return self._has_ended


class SimulatedComm:
    """The part of an MPI communicator that exchanges use."""

    def __init__(self, network: SimulatedNetwork, rank: int, size: int) -> None:
        self.rank, self.size, self._network, self._collectives = rank, size, network, 0

    def Isend(self, data: Any, to: int, tag: int = 0) -> SimulatedRequest:
        """Begin a message, which reads `data` when it is received, as MPI may: it must not change before the end."""
        raw = as_bytes(np.asarray(data))
        assert to != self.rank
        self._network.sent_bytes[self.rank] += raw.size
        message = [raw]
        self._network.messages[self.rank, to, tag].append(message)
        return SimulatedRequest(lambda: not message)

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> SimulatedRequest:
        def receive() -> bool:
            if not (queue := self._network.messages[source, self.rank, tag]):
                return False
            raw = queue.popleft().pop()
            room = as_bytes(np.asarray(buffer))
            assert raw.size == room.size if self._network.is_exact else raw.size <= room.size
            room[: raw.size] = raw
            return True

        return SimulatedRequest(receive)

    def Iallreduce(self, data: Any, result: Any) -> SimulatedRequest:
        """Begin a sum, as MPI does."""
        return self._collect(data, result, lambda rows: np.sum(rows, axis=0, dtype=result.dtype))

    def Iallgather(self, data: Any, result: Any) -> SimulatedRequest:
        return self._collect(data, result, np.stack)

    def _collect(self, data: Any, result: Any, combine: Callable[[list[Any]], Any]) -> SimulatedRequest:
        rows = self._network.collected[self._collectives]
        self._collectives += 1
        rows[self.rank] = np.array(data)

        def end() -> bool:
            if len(rows) < self.size:
                return False
            result[:] = combine([rows[rank] for rank in range(self.size)])
            return True

        return SimulatedRequest(end)
