"""Seconds per phase and bytes per level of a step. Collectives and training add to `current`, and each step takes the
totals and resets them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from topkube.telemetry import trace

PHASES = ("data", "forward", "backward", "select", "intra", "inter", "update")
"""The phases of a step. `select` is the compression, `intra` the exchange inside the node, `inter` the exchange between
nodes. These three run in the communication thread and overlap with `backward`; if nodes exchange weights, with
`update`. The other phases do not overlap."""


@dataclass
class Snapshot:
    """Totals since the last `take`: seconds per phase, the bytes that this rank sent inside the node and between nodes,
    and the bytes per rank of a dense ring all-reduce of the same gradients. `density` is that of the last exchange, as
    the hook for DistributedDataParallel notes it; 1 if nothing was compressed."""

    seconds: dict[str, float] = field(default_factory=dict)
    intra_bytes: int = 0
    inter_bytes: int = 0
    dense_bytes: int = 0
    density: float = 1.0


class Phases:
    """A thread-safe accumulator of phase seconds and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._totals = dict.fromkeys(PHASES, 0.0)
        self._counted_until = 0.0
        """The end of the last span of `add_span`."""
        self._intra = self._inter = self._dense = 0
        self._density = 1.0

    def timed(self, phase: str, stage: str | None = None, bucket: int | None = None) -> AbstractContextManager[None]:
        """Count the seconds of a `with` block for `phase`. A trace shows the block as `stage` of `bucket`."""
        return _Timed(self, phase, stage, bucket)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase, one of PHASES."""
        assert phase in PHASES, phase
        with self._lock:
            self._seconds[phase] += seconds
            self._totals[phase] += seconds

    def add_span(self, phase: str, start: float, end: float, updating_before: float) -> None:
        """Count the time from `start` to `end` (`time.perf_counter`) for forward, backward or update, without the part
        that counts already: the spans of several optimizers overlap, and with DeAR, updates are inside forward and
        backward. `updating_before` was `total("update")` at the start."""
        updating = self._totals["update"] - updating_before
        start, self._counted_until = max(start, self._counted_until), max(end, self._counted_until)
        self.add(phase, max(0.0, end - start - updating))

    def add_computations(
        self, phase: str, computations: Iterable[tuple[int, int, int]], bucket: int | None = None
    ) -> None:
        """Count work of compiled code for `phase`: when each part of it began (`time.perf_counter_ns`), its duration,
        and the processor time of its thread, in nanoseconds. A trace shows it as that of `bucket`."""
        for start, duration, processor in computations:
            self.add(phase, duration / 1e9)
            if trace.active is not None:
                trace.active.record_phase(phase, None, bucket, start, start + duration, processor)

    def total(self, phase: str) -> float:
        """Return the seconds of a phase since the start of the process. `take` does not reset them."""
        return self._totals[phase]

    def sent(self, *, intra: int = 0, inter: int = 0, dense: int = 0) -> None:
        """Count bytes that this rank sent, and the bytes that dense would have sent."""
        with self._lock:
            self._intra += intra
            self._inter += inter
            self._dense += dense

    def note_density(self, density: float) -> None:
        """Note the density of an exchange, for the record of its step."""
        self._density = density

    def take(self) -> Snapshot:
        """Return the totals since the last call, and reset them to zero."""
        with self._lock:
            snapshot = Snapshot(dict(self._seconds), self._intra, self._inter, self._dense, self._density)
            self._seconds.clear()
            self._intra = self._inter = self._dense = 0
            self._density = 1.0
        return snapshot


class _Timed:
    """The context of `Phases.timed`. A class, because a generator takes twice as long, in every stage of an
    exchange."""

    __slots__ = ("_bucket", "_phase", "_phases", "_processor", "_recorder", "_stage", "_start")

    def __init__(self, phases: Phases, phase: str, stage: str | None, bucket: int | None) -> None:
        self._phases, self._phase, self._stage, self._bucket = phases, phase, stage, bucket

    def __enter__(self) -> None:
        self._recorder = trace.active
        self._processor = time.thread_time_ns() if self._recorder is not None else 0
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter_ns()
        self._phases.add(self._phase, (end - self._start) / 1e9)
        if self._recorder is not None:
            processor = time.thread_time_ns() - self._processor
            self._recorder.record_phase(self._phase, self._stage, self._bucket, self._start, end, processor)


current = Phases()
"""The accumulator of this process."""
