"""How far the training is, from what workers send: step records (rank 0's), and what their nodes' caches do; and
whether it still moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime

from topkube.job import CachedNode, CacheStatus, Progress
from topkube.launch.messages import NodeCache
from topkube.telemetry.progress import StepRecord

_WINDOW = 30
"""Records over which the rate of steps is taken."""


_MOST_NODES = 256


def together(caches: Iterable[NodeCache]) -> CacheStatus | None:
    """What all workers' caches say, as status.cache; None where the job has no dataset. Workers on one node may share
    its cache: the node counts once."""
    said = list(caches)
    if not said:
        return None
    requests, misses = sum(one.requests for one in said), sum(one.misses for one in said)
    held: dict[str, int] = {}
    for one in said:
        if one.node:
            held[one.node] = max(held.get(one.node, 0), one.cached_bytes)
    return CacheStatus(
        hit_ratio=f"{1 - min(misses, requests) / requests:.4f}" if requests else None,
        remote_bytes=sum(one.remote_bytes for one in said),
        nodes=[CachedNode(name=name, cached_bytes=size) for name, size in sorted(held.items())[:_MOST_NODES]],
    )


class Steps:
    """The newest record, and when it came."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._moved: float | None = None
        self._started: float | None = None

    def started(self) -> None:
        """The ranks are being started."""
        self._started = time.monotonic()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        self._moved = time.monotonic()

    def progress(self) -> Progress | None:
        """As status.progress; None before the first step."""
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
            samples_per_second=round(last.samples_per_second, 1),
            updated_at=datetime.fromtimestamp(last.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def stalled(self, stall_seconds: float, startup_seconds: float) -> str:
        """What to say when no step has been finished for `stall_seconds`, or none at all for `startup_seconds` after
        the start (0: no limit); empty while all is well."""
        now = time.monotonic()
        if self._moved is not None and stall_seconds and now - self._moved > stall_seconds:
            step = self._records[-1].step
            return (
                f"no rank has finished a step for {stall_seconds:g} s; the last was step {step}. Likely cause: a rank "
                "hangs outside a collective (data loading, a checkpoint on a slow volume). Next: read the ranks' logs"
            )
        if (
            self._moved is None
            and self._started is not None
            and startup_seconds
            and now - self._started > startup_seconds
        ):
            return (
                f"no rank has finished a first step within {startup_seconds:g} s of its start. Likely cause: slow "
                "imports or data, or a hang before the first step. Next: read the ranks' logs"
            )
        return ""
