"""The reports of a run: the metrics of each rank, and on rank 0 a record of each step for people and loggers."""

from __future__ import annotations

import dataclasses
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from topkube.collectives.link import measure_link_rate
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.telemetry.loggers import StepWriter
from topkube.telemetry.progress import StepRecord
from topkube.telemetry.rank_file import ABSENT
from topkube.training.batches.uneven_batches import Sums
from topkube.training.distributed import DistributedOptimizer
from topkube.training.reporting.norms import Norms
from topkube.training.reporting.step_metrics import StepMetrics
from topkube.training.reporting.steps import REPORTER
from topkube.training.reporting.terminal import TerminalBar
from topkube.world import World


class RunReports:
    """The reports of the steps that `optimizer` makes in a run. The record of a step is written when the numbers of all
    ranks have arrived, with the announcement of the next batch."""

    def __init__(self, world: World, settings: Settings, optimizer: DistributedOptimizer) -> None:
        self._world, self._settings, self._optimizer = world, settings, optimizer
        self.numbers = (0.0,) * 5
        """This rank's numbers of the last step, which the ranks add up: the loss times its weight, the weight, and the
        bytes within the node, between nodes, and of a dense exchange."""
        self._record: StepRecord | None = None
        self._writer: StepWriter | TerminalBar | None = None
        self._metrics: StepMetrics | None = None
        self._last_time = 0.0

    def open(self) -> None:
        """Begin to report. All ranks call this together: they measure their links."""
        directory = self._settings.run_path
        if directory is not None:
            self._measure(directory)
        self._world.cache[REPORTER] = self
        if self._world.rank == 0:
            if directory is not None:
                self._writer = StepWriter(self._settings, directory)
            elif sys.stdout.isatty():
                self._writer = TerminalBar()

    def close(self) -> None:
        """Report no more. The record of a step after which the script left the loop is not written yet."""
        self.write_alone()
        self._world.cache.pop(REPORTER, None)
        if self._writer is not None:
            self._writer.close()
        if self._metrics is not None:
            self._optimizer.norms = None
            self._metrics.close()

    def _measure(self, directory: Path) -> None:
        """Start to write this rank's metrics to the run's directory."""
        link_rate = measure_link_rate(self._world)
        skipped_before = self._optimizer.counted_skipped_steps
        self._metrics = StepMetrics(directory, self._world.rank, self._settings.attempt, link_rate, skipped_before)
        self._optimizer.norms = Norms()

    def begin_loop(self) -> None:
        """Begin to measure: the first step begins now."""
        self._last_time = time.perf_counter()
        phases.current.take()

    def end_step(
        self,
        step: int,
        total: int | None,
        epoch: int,
        samples: int,
        loss: torch.Tensor | None,
        checkpoint_step: int | None,
        failed_checkpoints: int,
    ) -> None:
        """Note the end of step number `step`, in which all ranks had `samples`. `loss` is the mean of this rank's
        batch, None if it is unknown."""
        own, now = phases.current.take(), time.perf_counter()
        own_samples = self._optimizer.turns.samples
        weight = own_samples if loss is not None else 0
        total_loss = weight * float(loss) if loss is not None and weight else 0.0
        self.numbers = (total_loss, float(weight), own.intra_bytes, own.inter_bytes, own.dense_bytes)
        self._record = StepRecord(
            step=step,
            total_steps=total,
            epoch=epoch,
            samples=samples,
            samples_per_second=samples / max(now - self._last_time, 1e-9),
            seconds=own.seconds,
            density=self._optimizer.density_used,
            skipped_steps=self._optimizer.counted_skipped_steps,
            checkpoint_step=checkpoint_step,
            failed_checkpoints=failed_checkpoints,
            choice=self._optimizer.tuning.summary or None,
            time=time.time(),
        )
        if self._metrics is not None:
            self._metrics.count_step(self._record, now - self._last_time, own, own_samples, self._list_gauges())
        self._last_time = now

    def note_checkpoints(self, checkpoint_step: int | None, failed_checkpoints: int) -> None:
        """Update the record of the last step, which is not written yet."""
        if self._record is not None:
            self._record = dataclasses.replace(
                self._record, checkpoint_step=checkpoint_step, failed_checkpoints=failed_checkpoints
            )

    def write_after(self, announced: Future[Sums]) -> None:
        """Write the record of the last step as soon as `announced` holds the numbers of all ranks, the last of its
        numbers."""
        record, self._record, count = self._record, None, len(self.numbers)
        if record is not None:
            announced.add_done_callback(lambda done: self._write(record, *done.result()[-count:].tolist()))

    def write_alone(self) -> None:
        """Write the record of the last step, if it is not written yet, with the numbers of this rank only: the script
        has left the loop."""
        if self._record is not None:
            self._write(self._record, *self.numbers[:2], *(self._world.size * count for count in self.numbers[2:]))

    def _write(self, record: StepRecord, loss: float, weight: float, intra: float, inter: float, dense: float) -> None:
        if self._metrics is not None and weight:
            self._metrics.set_loss(loss / weight)
        if self._writer is not None:
            self._writer.write(
                dataclasses.replace(
                    record,
                    loss=loss / weight if weight else None,
                    intra_bytes=int(intra),
                    inter_bytes=int(inter),
                    dense_bytes=int(dense),
                )
            )
        if record is self._record:
            self._record = None

    def _list_gauges(self) -> dict[str, float]:
        norms, guard, tuning = self._optimizer.norms or Norms(), self._optimizer.guard, self._optimizer.tuning
        return {
            "differing_ranks": self._optimizer.differing_ranks,
            "gradient_norm": ABSENT if norms.gradient is None else norms.gradient,
            "residual_norm": ABSENT if norms.residual is None else norms.residual,
            "unsent_ratio": ABSENT if guard is None or guard.unsent_ratio is None else guard.unsent_ratio,
            "weight_spread": ABSENT if guard is None or guard.weight_spread is None else guard.weight_spread,
            "period": ABSENT if guard is None else guard.period,
            "predicted_exchange": ABSENT if tuning.predicted_seconds is None else tuning.predicted_seconds,
            "measured_exchange": ABSENT if tuning.measured_seconds is None else tuning.measured_seconds,
        }
