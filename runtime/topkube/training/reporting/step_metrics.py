"""The metrics of a rank that trains, counted with the record of each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from topkube.data.base.open_datasets import sum_statistics
from topkube.telemetry.phases import Snapshot
from topkube.telemetry.progress import StepRecord
from topkube.telemetry.rank_file import ABSENT, RankMetrics

_CACHE_CHECK_SECONDS = 1.0
"""Time between two reads of the data cache's counters."""


class StepMetrics:
    """The metrics of this rank in the run's `directory`. `link_rate` is the measured rate of the rank's link in bytes
    per second; None if it was not measured. `skipped_before` is the number of skipped steps that a checkpoint contains:
    Prometheus would take them for new ones, because all counters of an attempt begin with 0."""

    def __init__(
        self, directory: Path, rank: int, attempt: int, link_rate: float | None = None, skipped_before: int = 0
    ) -> None:
        self._metrics = RankMetrics(directory, rank, attempt)
        self._metrics["link_rate"] = link_rate or ABSENT
        self._cache_checked = 0.0
        self._skipped_before = skipped_before

    def count_step(
        self, record: StepRecord, seconds: float, own: Snapshot, samples: int, gauges: Mapping[str, float]
    ) -> None:
        """Count a finished step that took `seconds`. `own` and `samples` are those of this rank. `gauges` has values
        that `record` does not contain, by their names in `rank_file.FIELDS`."""
        now = time.perf_counter()
        if now >= self._cache_checked + _CACHE_CHECK_SECONDS:
            self._cache_checked = now
            self._metrics.store_cache_counters(sum_statistics())
        of_record = {
            "step": record.step,
            "total_steps": ABSENT if record.total_steps is None else record.total_steps,
            "density": record.density,
            "skipped_steps": record.skipped_steps - self._skipped_before,
            "last_step": record.time,
        }
        self._metrics.count_step(seconds, own, samples, {**of_record, **gauges})

    def set_loss(self, loss: float) -> None:
        """Set the mean loss over all samples of the last step, and write it."""
        self._metrics["loss"] = loss
        self._metrics.flush()

    def close(self) -> None:
        """Write no more. The last values stay in the directory."""
        self._metrics.close()
