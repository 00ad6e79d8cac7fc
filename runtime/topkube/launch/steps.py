"""The progress of training, from the messages of workers: rank 0's step records, the counters of the nodes' caches, and
signs of life, which a stalled job lacks."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from topkube.job import CachedNode, CacheStatus, Progress
from topkube.launch.connection.messages import NodeCache
from topkube.telemetry.progress import StepRecord
from topkube.timestamps import format_timestamp

_WINDOW = 30
"""Number of records over which the rate of steps is computed."""
_MOST_STEPS, _LATEST = 10**15, 253402300799.0
"""The highest step that a record may have; the end of the year 9999 in Unix seconds."""
_MOST_NAMED, _MOST_NODES = 8, 256
"""The most ranks that a message names, and the most nodes in status.cache."""


def combine_caches(caches: Iterable[NodeCache]) -> CacheStatus | None:
    """Return status.cache from the counters of all workers; None if the job has no dataset. Workers on the same node
    may share its cache: its bytes count once."""
    reports = list(caches)
    if not reports:
        return None
    requests, misses = sum(report.requests for report in reports), sum(report.misses for report in reports)
    cached_bytes: dict[str, int] = {}
    for report in reports:
        if report.node:
            cached_bytes[report.node] = max(cached_bytes.get(report.node, 0), report.cached_bytes)
    return CacheStatus(
        hit_ratio=f"{1 - min(misses, requests) / requests:.4f}" if requests else None,
        remote_bytes=sum(report.remote_bytes for report in reports),
        nodes=[CachedNode(name=name, cached_bytes=size) for name, size in sorted(cached_bytes.items())[:_MOST_NODES]],
    )


def parse_record(values: Mapping[str, Any]) -> StepRecord | None:
    """Return the step record that a worker sent; None if `values` are no valid record. Ranks write the records, and a
    script may write anything into their file."""
    try:
        record = StepRecord.from_json(json.dumps(values))
    except (TypeError, ValueError, RecursionError):
        return None
    are_steps_whole = isinstance(record.step, int) and isinstance(record.total_steps, int | None)
    numbers = (record.time, record.samples_per_second, 0.0 if record.loss is None else record.loss)
    if not are_steps_whole or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return None
    if not 0 <= record.step <= _MOST_STEPS or not 0 <= (record.total_steps or 0) <= _MOST_STEPS:
        return None
    return record if 0 <= record.time <= _LATEST else None


class Steps:
    """The step records of a run, and when the ranks last showed a sign of progress."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._last_sign: float | None = None
        self._started: float | None = None
        self._saved_at = 0.0
        """Time of the first record with the newest checkpoint, in Unix seconds."""
        self._collectives: dict[int, int] = {}
        """The number of collectives that each rank has entered."""

    def start(self) -> None:
        """Start the clock when the start of the ranks begins."""
        self._started = time.monotonic()

    def add(self, record: StepRecord) -> None:
        """Add a record, which is a sign of progress."""
        newest = self._records[-1].checkpoint_step if self._records else None
        if record.checkpoint_step and record.checkpoint_step != newest:
            self._saved_at = record.time
        self._records.append(record)
        self._last_sign = time.monotonic()

    def build_progress(self) -> Progress | None:
        """Return status.progress; None before the first step."""
        if not self._records:
            return None
        last, first = self._records[-1], self._records[0]
        total = last.total_steps
        eta = None
        if total is not None and last.step > first.step and last.time > first.time:
            eta = round((total - last.step) * (last.time - first.time) / (last.step - first.step))
        elif total is not None and total <= last.step:
            eta = 0
        return Progress(
            step=last.step,
            total_steps=total,
            percent=min(100, 100 * last.step // total) if total else None,
            eta_seconds=max(0, eta) if eta is not None else None,
            loss=f"{last.loss:.4g}" if last.loss is not None else None,
            samples_per_second=round(last.samples_per_second, 1) or None,
            checkpoint_step=last.checkpoint_step,
            checkpoint_at=format_timestamp(datetime.fromtimestamp(self._saved_at, UTC)) if self._saved_at else None,
            failed_checkpoints=last.failed_checkpoints or None,
            choice=last.choice,
            updated_at=format_timestamp(datetime.fromtimestamp(last.time, UTC)),
        )

    def note_activity(self, collectives: Mapping[int, int], printed: bool) -> None:
        """Note signs of life other than steps: the number of collectives that ranks have entered, and output. Output
        counts only if there is no other sign: a program that does not use TopKube's collectives shows nothing else."""
        if any(count > self._collectives.get(rank, 0) for rank, count in collectives.items()):
            self._last_sign = time.monotonic()
        self._collectives |= collectives
        if printed and not self._records and not self._collectives:
            self._last_sign = time.monotonic()

    def find_ranks_behind(self) -> list[int]:
        """Return the ranks that have entered fewer collectives than other ranks, which wait for them."""
        furthest = max(self._collectives.values(), default=0)
        return sorted(rank for rank, count in self._collectives.items() if count < furthest)

    def describe_stall(self, stall_seconds: float, startup_seconds: float) -> str:
        """Return a message if there was no sign of life for `stall_seconds` since the last step, or for
        `startup_seconds` if there was no step yet (0: no limit); else an empty string."""
        limit = stall_seconds if self._records else startup_seconds
        last = self._last_sign or self._started
        if not limit or last is None or time.monotonic() - last <= limit:
            return ""
        if self._records:
            what = f"no rank has finished a step for {limit:g} s; the last was step {self._records[-1].step}"
            cause = "a rank hangs outside a collective (data loading, a checkpoint on a slow volume)"
        elif self._last_sign is not None:
            what = f"no rank has finished a first step or shown another sign of life for {limit:g} s"
            cause = "slow data, or a hang before the first step"
        else:
            what = f"no rank has finished a first step within {limit:g} s of its start"
            cause = "slow imports or data, or a hang before the first step"
        return f"{what}{self._describe_ranks_behind()}. Likely cause: {cause}. Next: read the ranks' logs"

    def _describe_ranks_behind(self) -> str:
        behind, furthest = self.find_ranks_behind(), max(self._collectives.values(), default=0)
        if not behind:
            return ""
        shown = ", ".join(map(str, behind[:_MOST_NAMED])) + (", …" if len(behind) > _MOST_NAMED else "")
        at = self._collectives[behind[0]]
        return f"; waited for: rank {shown} (collective {at} of {furthest})"
