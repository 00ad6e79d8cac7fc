"""Step reports of a script with its own training loop, for people and for deadlines."""

from __future__ import annotations

import time

from topkube.telemetry.progress import ProgressWriter, StepRecord
from topkube.world import World

REPORTER = "reporter of steps"
"""The key of the reporter in the world's cache: a `Run`, which also has loss, samples and bytes, or the first
optimizer."""


class StepReporter:
    """The step reports of an optimizer, on rank 0."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._writer: ProgressWriter | None = None

    def report_step(self, steps: int, skipped: int, density: float, choice: str | None) -> None:
        """Report a step. So far the optimizer has made `steps` updates and skipped `skipped` steps. `choice` is what
        `auto` or `dense` stands for, and why."""
        directory = self._world.run_directory
        if self._world.rank or directory is None or self._world.cache.setdefault(REPORTER, self) is not self:
            return
        self._writer = self._writer or ProgressWriter(directory)
        total, now = steps + skipped, time.time()
        record = StepRecord(total, None, density=density, skipped_steps=skipped, choice=choice, time=now)
        self._writer.write(record)
