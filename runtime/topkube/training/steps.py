"""Steps of a script that has a loop of its own: reported all the same, so that people and deadlines see them."""

from __future__ import annotations

import time

from topkube.telemetry.progress import ProgressWriter, StepRecord
from topkube.world import World

REPORTER = "reporter of steps"
"""In the world's cache: who reports, a `Run` (it knows loss, samples and bytes too) or else the first optimizer."""


class StepReports:
    """What one optimizer tells of its steps, on rank 0."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._writer: ProgressWriter | None = None

    def step(self, steps: int, skipped: int, density: float) -> None:
        """`steps` updates were made so far, and `skipped` ones were not."""
        directory = self._world.run_directory
        if self._world.rank or directory is None or self._world.cache.setdefault(REPORTER, self) is not self:
            return
        self._writer = self._writer or ProgressWriter(directory)
        record = StepRecord(steps + skipped, None, density=density, skipped_steps=skipped, time=time.time())
        self._writer.write(record)
