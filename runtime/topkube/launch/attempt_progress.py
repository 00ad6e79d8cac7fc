"""The progress of an attempt on one worker: new steps, the counters of the node's cache, and other signs of life."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from topkube import heartbeat
from topkube.launch.connection.messages import NodeCache, StepDone
from topkube.launch.dataset_process import DatasetProcess
from topkube.launch.output.pod_output import RankLog
from topkube.telemetry.cache_counters import count_reads, read_totals
from topkube.telemetry.progress import PROGRESS_FILE, StepRecord, read_records

_STEP_SECONDS = 0.5
"""The time between two reports of steps."""
_LIFE_SECONDS = 2.0
"""The time between two reports of signs of life other than steps."""


class AttemptProgress:
    """The progress of the ranks with these `logs`, as they write it into the run's `directory`. `node` is the name of
    the node; `say` prints a line."""

    def __init__(
        self,
        directory: Path,
        logs: Mapping[int, RankLog],
        node: str,
        dataset: DatasetProcess,
        say: Callable[[str], None],
    ) -> None:
        self._directory, self._logs, self._node = directory, logs, node
        self._dataset, self._say = dataset, say
        self._steps_reported_at = self._life_reported_at = 0.0
        self._position = 0
        """The first byte of the step records that has not been read."""
        self._collectives: dict[int, int] = {}
        """The number of collectives that each rank has entered, as it was reported last."""
        self._printed_bytes = 0
        self._cache: NodeCache | None = None
        self._invalid_record_reported = False

    def build_report(self, *, is_last: bool) -> StepDone | None:
        """Return the message about the progress since the last report. Return None if there is none, or if the last
        report was a short time ago. The last report of an attempt does not wait."""
        now = time.monotonic()
        if now - self._steps_reported_at < _STEP_SECONDS and not is_last:
            return None
        self._steps_reported_at = now
        record = self._read_newest_record()
        cache = self._read_cache()
        collectives, has_printed = self._read_signs_of_life(now, is_last)
        if record is None and not collectives and not has_printed and (cache is None or cache == self._cache):
            return None
        self._cache = cache
        values = dataclasses.asdict(record) if record else {}
        return StepDone(record=values, cache=cache, collectives=collectives, printed=has_printed)

    def _read_newest_record(self) -> StepRecord | None:
        """Return the newest of the new step records; None if there is no new record. A script may write anything into
        their file: an invalid record is skipped, and reported once."""
        try:
            records = list(read_records(self._directory / PROGRESS_FILE, self._position))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._position = self._read_file_size()
            if not self._invalid_record_reported:
                self._invalid_record_reported = True
                self._say(
                    f"{PROGRESS_FILE} holds an invalid step record: {error}. Likely cause: the script writes "
                    "into the run's directory. Next: report steps with run.progress(...) only"
                )
            return None
        if not records:
            return None
        record, self._position = records[-1]
        return record

    def _read_file_size(self) -> int:
        try:
            return (self._directory / PROGRESS_FILE).stat().st_size
        except OSError:
            return 0

    def _read_signs_of_life(self, now: float, is_last: bool) -> tuple[dict[int, int], bool]:
        """Return the number of collectives of the ranks that have entered a collective since the last report, and True
        if a rank has printed something."""
        if now - self._life_reported_at < _LIFE_SECONDS and not is_last:
            return {}, False
        self._life_reported_at = now
        counts = {rank: heartbeat.read(self._directory, rank) for rank in self._logs}
        changed = {rank: count for rank, count in counts.items() if count != self._collectives.get(rank, 0)}
        self._collectives |= changed
        before, self._printed_bytes = self._printed_bytes, sum(log.size for log in self._logs.values())
        return changed, self._printed_bytes != before

    def _read_cache(self) -> NodeCache | None:
        """Return the counters of the node's cache; None if the job has no dataset."""
        totals, report = read_totals(self._directory), self._dataset.read_report()
        if not totals and not report:
            return None
        requests, misses = count_reads(totals)
        return NodeCache(
            node=self._node,
            requests=requests,
            misses=misses,
            remote_bytes=int(totals.get("remote_bytes", 0)) + int(report.get("remoteBytes") or 0),
            cached_bytes=int(report.get("cachedBytes") or 0),
        )
