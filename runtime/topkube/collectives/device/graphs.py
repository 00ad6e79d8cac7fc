"""CUDA graphs of the work on a shard: its selection, encoding and decoding, each launched by a single call.

A graph records kernels with their addresses and numbers. So it is replayed only for the same work on the same memory.
The first time, work runs as usual; the second time it is recorded; from then on it is replayed. The memory of outputs
and workspaces that the work allocates belongs to the graph.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from topkube.collectives.all_reduce import ShardAllReduce
from topkube.collectives.device.memory import DeviceMemory
from topkube.collectives.shard import Shard
from topkube.errors import DeviceError

MOST_GRAPHS = 512
"""The most pieces of work that are remembered. If as many in a row are new, work does not repeat, and recording
stops."""


@dataclass
class _Work:
    """Work that was run before. `scratch` are the work buffers that it asked for: name, length, type."""

    scratch: list[tuple[str, int, str]] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    graph: Any = None
    result: Any = None
    flags: list[Any] = field(default_factory=list)


class WorkGraphs:
    """The graphs of one stream. `stopped` is the reason if work is no longer recorded, else "". `recorded` counts the
    graphs."""

    def __init__(self, memory: DeviceMemory, rank: int) -> None:
        import torch

        self.stopped, self.recorded = "", 0
        self._cuda: Any = torch.cuda
        self._memory, self._rank = memory, rank
        self._seen: OrderedDict[Hashable, _Work] = OrderedDict()
        self._new_in_a_row = 0
        self._pool: Any = None

    def run(self, key: Hashable, shard: Shard, work: Callable[[Shard], Any]) -> Any:
        """Return `work(shard)`, run on torch's current stream. `key` holds everything that decides which kernels the
        work launches, on which memory and with which numbers, but for the shard's work buffers."""
        if self.stopped:
            return work(shard)
        seen = self._seen.get(key)
        if seen is None:
            return self._run_first(key, shard, work)
        self._new_in_a_row = 0
        self._seen.move_to_end(key)
        addresses = [shard.scratch(*scratch_arguments).data_ptr() for scratch_arguments in seen.scratch]
        if seen.graph is None or seen.addresses != addresses:
            seen.addresses = addresses
            if not self._record(seen, shard, work):
                return work(shard)
        seen.graph.replay()
        shard.finite += seen.flags
        return seen.result

    def _run_first(self, key: Hashable, shard: Shard, work: Callable[[Shard], Any]) -> Any:
        seen = self._seen[key] = _Work()
        if len(self._seen) > MOST_GRAPHS:
            self._seen.popitem(last=False)
        self._new_in_a_row += 1
        if self._new_in_a_row > MOST_GRAPHS:
            self._stop("the memory of gradients changes from step to step, and a graph needs the same memory again")

        def note(name: str, length: int, dtype: str) -> Any:
            seen.scratch.append((name, length, dtype))
            return shard.scratch(name, length, dtype)

        return work(dataclasses.replace(shard, scratch=note))

    def _record(self, seen: _Work, shard: Shard, work: Callable[[Shard], Any]) -> bool:
        """Record the work without running it. Return False if that failed: nothing has run then. Raises DeviceError if
        CUDA cannot end the recording: torch goes on as if it recorded, and never frees memory again."""
        recorded, failure = dataclasses.replace(shard, finite=[]), None
        try:
            self._pool = self._pool or self._cuda.graph_pool_handle()
            graph = self._cuda.CUDAGraph()
            # Other threads may allocate and wait meanwhile: the script's backward runs, and NCCL's watchdog.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except Exception as error:
            failure = error
        else:
            try:
                seen.result = work(recorded)
            except Exception as error:  # an error of the work itself is raised when it runs as usual
                failure = error
            _end_capture(graph, failure)
        if failure is not None:
            self._stop(f"a CUDA graph cannot record them ({type(failure).__name__}: {failure})")
            return False
        seen.graph, seen.flags = graph, recorded.finite
        self.recorded += 1
        return True

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._seen.clear()
        print(
            f"topkube: rank {self._rank} launches the kernels of each bucket one by one: {reason}."
            " Next: TOPKUBE_DEVICE_GRAPHS=0 does the same without this message",
            file=sys.stderr,
            flush=True,
        )


def _end_capture(graph: Any, failure: Exception | None) -> None:
    """End the recording of a graph, whose work ended with `failure`."""
    try:
        graph.capture_end()
    except Exception as error:
        raise DeviceError(
            f"CUDA could not end the recording of a graph: {failure or error}",
            cause="the work of the algorithm waits for the device, although its class says is_repeatable",
            next_step="set TOPKUBE_DEVICE_GRAPHS=0, or is_repeatable = False in the class of the algorithm",
        ) from error


def describe_work(all_reduce: ShardAllReduce, shard: Shard) -> tuple[Hashable, ...]:
    """Return what decides which kernels the work on a shard launches, and on which memory."""
    request, values, residual = shard.request, shard.values, shard.request.residual
    state: tuple[Hashable, ...] = ()
    if residual is not None:
        buffers = residual.current, residual.pending, residual.velocity, residual.pending_velocity
        addresses = (buffer.data_ptr() for buffer in buffers)
        state = (residual.momentum, residual.gain, residual.is_tentative, residual.threshold.address, *addresses)
    parameters = request.length, request.op, request.density, request.wire, request.dense_wire, request.selection
    return all_reduce.algorithm.name, values.data_ptr(), len(values), values.dtype, *parameters, *state
