"""How far the training is, from what workers send: step records (rank 0's), and what their nodes' caches do; and
whether it still moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from topkube.job import CachedNode, CacheStatus, Progress
from topkube.launch.messages import NodeCache
from topkube.telemetry.progress import StepRecord

_WINDOW = 30
"""Records over which the rate of steps is taken."""
_MOST_NAMED, _MOST_NODES = 8, 256


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
        self._collectives: dict[int, int] = {}
        """Entered so far, by rank."""

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
            samples_per_second=round(last.samples_per_second, 1) or None,
            updated_at=datetime.fromtimestamp(last.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def heard(self, collectives: Mapping[int, int], printed: bool) -> None:
        """Signs of life besides steps: how many collectives ranks have entered; and output, which counts where a rank
        says nothing else, because a program that uses none of ours has no other way."""
        if any(count > self._collectives.get(rank, 0) for rank, count in collectives.items()):
            self._moved = time.monotonic()
        self._collectives |= collectives
        if printed and not self._records and not self._collectives:
            self._moved = time.monotonic()

    def behind(self) -> list[int]:
        """The ranks that have entered fewer collectives than others: others wait for them."""
        furthest = max(self._collectives.values(), default=0)
        return sorted(rank for rank, count in self._collectives.items() if count < furthest)

    def stalled(self, stall_seconds: float, startup_seconds: float) -> str:
        """What to say when nothing has moved for `stall_seconds` since the last step, or for `startup_seconds` where
        there was no step yet (0: no limit); empty while all is well."""
        limit = stall_seconds if self._records else startup_seconds
        last = self._moved or self._started
        if not limit or last is None or time.monotonic() - last <= limit:
            return ""
        if self._records:
            what = f"no rank has finished a step for {limit:g} s; the last was step {self._records[-1].step}"
            cause = "a rank hangs outside a collective (data loading, a checkpoint on a slow volume)"
        elif self._moved is not None:
            what = f"no rank has finished a first step or shown another sign of life for {limit:g} s"
            cause = "slow data, or a hang before the first step"
        else:
            what = f"no rank has finished a first step within {limit:g} s of its start"
            cause = "slow imports or data, or a hang before the first step"
        return f"{what}{self._behind_words()}. Likely cause: {cause}. Next: read the ranks' logs"

    def _behind_words(self) -> str:
        behind, furthest = self.behind(), max(self._collectives.values(), default=0)
        if not behind:
            return ""
        shown = ", ".join(map(str, behind[:_MOST_NAMED])) + (", …" if len(behind) > _MOST_NAMED else "")
        at = self._collectives[behind[0]]
        return f"; waited for: rank {shown} (collective {at} of {furthest})"
