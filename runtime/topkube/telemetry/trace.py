"""The trace of a few steps of one rank, in the Trace Event Format, which Perfetto and chrome://tracing open.

A process of the trace is a rank. It has two tracks: `compute`, the thread that runs the script, and `communication`,
the thread that exchanges buckets. A third track, `delayed exchange`, has the thread of delayed exchanges of weights, if
there are any. Messages between nodes travel while the threads do other work, so they are asynchronous events, which
viewers show on tracks of their own. `ts` and `dur` are microseconds; `tdur` is the processor time of the thread.
Categories and their events are listed in docs/trace.md.

No event is recorded unless `active` is set: a hook costs one comparison.
"""

from __future__ import annotations

import atexit
import itertools
import json
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from topkube.files import write_text

COMPUTE, COMMUNICATION, DELAYED = 1, 2, 3
"""The numbers of the tracks."""
COMMUNICATION_THREAD, DELAYED_THREAD = "topkube-communication", "topkube-delayed-exchange"
"""The names of the thread that exchanges buckets, and of the thread of delayed exchanges of weights."""
_TRACKS = {COMMUNICATION_THREAD: COMMUNICATION, DELAYED_THREAD: DELAYED}
WARM_STEPS = 3
"""Steps before the first traced step: buckets are planned and buffers are allocated in them."""
STEP, DATA, FORWARD, BACKWARD, GRADIENT = "step", "data", "forward", "backward", "gradient"
BUCKET, STAGE, EXCHANGE, OPTIMIZER = "bucket", "stage", "exchange", "optimizer"
REDUCE, GATHER, SELECT, BETWEEN = "reduce inside node", "gather inside node", "select", "exchange between nodes"
_PHASES = {
    "data": (DATA, "data wait"),
    "select": (STAGE, SELECT),
    "intra": (STAGE, "inside node"),
    "inter": (STAGE, "wait for messages"),
    "update": (OPTIMIZER, "optimizer"),
}


class Trace:
    """The recorder of one rank. It skips WARM_STEPS steps, records `steps` steps, writes `directory`/rank-N.json and
    then sets `active` to None. `facts` describe the run: they are in the file's `otherData`."""

    def __init__(self, directory: Path, rank: int, node: int, steps: int, facts: dict[str, Any]) -> None:
        self.recording = False
        self._bucket: int | None = None
        self._has_delayed_track = False
        self._path = directory / f"rank-{rank}.json"
        self._rank, self._facts = rank, {**facts, "rank": rank, "node": node}
        self._steps_to_skip, self._steps_left = WARM_STEPS, steps
        self._origin, self._wall_origin = time.perf_counter_ns(), time.time_ns()
        self._events: list[dict[str, Any]] = []
        self._step_began: int | None = None
        self._step, self._exchanges = 0, itertools.count(1)
        self._processor = (0.0, 0.0)
        self._name_track(COMPUTE, "compute")
        self._name_track(COMMUNICATION, "communication")
        self._events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"node {node} rank {rank}"}}
        )
        atexit.register(self.close)

    def _name_track(self, track: int, name: str) -> None:
        self._events.append({"ph": "M", "name": "thread_name", "pid": self._rank, "tid": track, "args": {"name": name}})

    @property
    def bucket(self) -> int | None:
        """The number of the bucket whose exchange the communication thread starts or runs. It is None in the thread of
        delayed exchanges, which have no bucket."""
        return None if _find_track() == DELAYED else self._bucket

    # ---- events

    def record_span(
        self, category: str, name: str, start: int, end: int, processor: int | None = None, track: int = 0, **args: Any
    ) -> None:
        """Record work of a thread from `start` to `end` (perf_counter_ns), with its `processor` time in nanoseconds.
        `track` is that of the calling thread by default."""
        if not self.recording:
            return
        track = track or _find_track()
        if track == DELAYED and not self._has_delayed_track:
            self._has_delayed_track = True
            self._name_track(DELAYED, "delayed exchange")
        event = self._build_event("X", category, name, start, track)
        event["dur"] = (end - start) / 1e3
        if processor is not None:
            event["tdur"] = processor / 1e3
        if args:
            event["args"] = args
        self._events.append(event)

    def record_instant(self, category: str, name: str, at: int, **args: Any) -> None:
        """Record a moment on the compute track."""
        if self.recording:
            self._events.append({**self._build_event("i", category, name, at, COMPUTE), "s": "t", "args": args})

    def _build_event(self, kind: str, category: str, name: str, at: int, track: int) -> dict[str, Any]:
        ts = (at - self._origin) / 1e3
        return {"ph": kind, "cat": category, "name": name, "pid": self._rank, "tid": track, "ts": ts}

    def record_phase(
        self, phase: str, stage: str | None, bucket: int | None, start: int, end: int, processor: int
    ) -> None:
        """Record a block of `telemetry.phases` as `stage` of `bucket`: by default of the bucket at work."""
        category, name = _PHASES.get(phase, (STAGE, phase))
        bucket = self.bucket if bucket is None and category == STAGE else bucket
        args = {} if bucket is None else {"bucket": bucket}
        self.record_span(category, stage or name, start, end, processor, **args)

    @contextmanager
    def record_block(self, category: str, name: str, **args: Any) -> Iterator[None]:
        """Record a `with` block."""
        start, processor = time.perf_counter_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            self.record_span(category, name, start, time.perf_counter_ns(), time.thread_time_ns() - processor, **args)

    @contextmanager
    def record_bucket(self, number: int, **args: Any) -> Iterator[None]:
        """Record that the communication thread works on bucket `number`."""
        self._bucket = number
        try:
            with self.record_block(BUCKET, f"bucket {number}", bucket=number, **args):
                yield
        finally:
            self._bucket = None

    def record_exchange(self, exchange: Iterable[Any], name: str = BETWEEN) -> Generator[Any, None, None]:
        """Yield from `exchange`, and record it from its first message to its last as an asynchronous event."""
        number, bucket = f"{self._rank}.{next(self._exchanges)}", self.bucket
        start = time.perf_counter_ns()
        yield from exchange
        if self.recording:
            common = {"id": number, "args": {} if bucket is None else {"bucket": bucket}}
            self._events.append({**self._build_event("b", EXCHANGE, name, start, COMMUNICATION), **common})
            self._events.append(
                {**self._build_event("e", EXCHANGE, name, time.perf_counter_ns(), COMMUNICATION), **common}
            )

    def add_facts(self, **facts: Any) -> None:
        """Add facts that describe the run to the file's `otherData`."""
        self._facts |= facts

    # ---- steps

    def end_step(self) -> None:
        """Record the end of an optimizer step, and write the file after the last step."""
        now, processor = time.perf_counter_ns(), _read_processor_seconds()
        if self.recording and self._step_began is not None:
            compute, communication = (after - before for after, before in zip(processor, self._processor, strict=True))
            args: dict[str, Any] = {
                "step": self._step,
                "compute_cpu_ms": 1e3 * compute,
                "communication_cpu_ms": 1e3 * communication,
            }
            self.record_span(STEP, f"step {self._step}", self._step_began, now, track=COMPUTE, **args)
            self._steps_left -= 1
        self._step += 1
        self._steps_to_skip -= 1
        self.recording = self._steps_to_skip <= 0 < self._steps_left
        self._step_began, self._processor = now, processor
        if self._steps_left <= 0:
            self.close()

    def close(self) -> None:
        """Write the file, once. A rank that ends early writes what it has recorded, if that contains a whole step."""
        global active
        atexit.unregister(self.close)
        if active is self:
            active = None
        self.recording = False
        if any(event.get("cat") == STEP for event in self._events):
            content = {
                "displayTimeUnit": "ms",
                "otherData": {**self._facts, "originUnixNanoseconds": self._wall_origin},
                "traceEvents": self._events,
            }
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._path, json.dumps(content, separators=(",", ":")))
            except OSError as error:  # training continues without its trace
                print(f"topkube: warning: the trace of rank {self._rank} is lost: {error}", file=sys.stderr, flush=True)
        self._events = []


active: Trace | None = None
"""The recorder of this process, None if nothing is recorded."""


def _find_track() -> int:
    return _TRACKS.get(threading.current_thread().name, COMPUTE)


def _read_processor_seconds() -> tuple[float, float]:
    """Return the processor seconds so far of the calling thread, which computes, and of the threads that exchange."""
    exchanging = (thread.ident for thread in threading.enumerate() if thread.name in _TRACKS)
    clocks = (time.pthread_getcpuclockid(ident) for ident in exchanging if ident is not None)
    return time.thread_time(), sum(map(time.clock_gettime, clocks))
