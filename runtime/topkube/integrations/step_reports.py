"""Reports of the steps of another library's training loop: a record for the progress bar, the summary, the plot and
status.progress, and the metrics of each rank."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist

from topkube.heartbeat import Heartbeat, open_heartbeat
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.telemetry.loggers import StepWriter
from topkube.telemetry.progress import StepRecord
from topkube.training.reporting.step_metrics import StepMetrics

_SUMS = 6
"""Numbers that are added over all ranks: samples, weight and sum of the losses, and three counts of bytes."""


class StepReports:
    """Writes a record for each step, and counts the step in this rank's metrics, if TopKube started the ranks. A record
    is written when the next step ends, because the sums over all ranks arrive in the meantime."""

    def __init__(self, settings: Settings) -> None:
        """A collective: all ranks of the default process group call this together. Without a group, this process is
        the only rank."""
        self._writer: StepWriter | None = None
        self._metrics: StepMetrics | None = None
        self._heartbeat: Heartbeat | None = None
        self._group: Any = None
        self._record: StepRecord | None = None
        self._sums = torch.zeros(_SUMS, dtype=torch.float64)
        self._work: Any = None
        self._last_end = time.perf_counter()
        phases.current.take()
        self.is_on = settings.run_path is not None
        if settings.run_path is None:
            return
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if size > 1:
            # A group of its own: its messages must not mix with those of the training loop.
            self._group = dist.new_group(backend="gloo")
        self._metrics = StepMetrics(settings.run_path, rank, settings.attempt)
        if rank == 0:
            self._writer = StepWriter(settings, settings.run_path)
            self._heartbeat = open_heartbeat(settings.run_path, rank)

    def add(
        self,
        step: int,
        total_steps: int | None,
        epoch: int,
        samples: int,
        loss: float | None,
        checkpoint_step: int | None = None,
    ) -> None:
        """Report the end of step `step`, from 1. `samples` and `loss` are those of this rank: the number of its
        samples, and their mean loss. All ranks call this together."""
        if not self.is_on:
            return
        self.flush()
        weight = samples if loss is not None else 0
        own_phases = phases.current.take()
        sent = (own_phases.intra_bytes, own_phases.inter_bytes, own_phases.dense_bytes)
        self._sums = torch.tensor([samples, weight, weight * (loss or 0.0), *sent], dtype=torch.float64)
        if self._group is not None:
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        own_phases.seconds["forward"] = seconds  # the exchange is a part of it
        self._record = StepRecord(
            step=step,
            total_steps=total_steps,
            epoch=epoch,
            seconds=own_phases.seconds,
            checkpoint_step=checkpoint_step,
            density=own_phases.density,
            time=time.time(),
        )
        if self._metrics is not None:
            self._metrics.count_step(self._record, seconds, own_phases, samples, {})

    def note_activity(self) -> None:
        """Show the launcher and the alerts that the job makes progress between two steps: a batch of an evaluation is
        finished. Only rank 0 shows this, because the launcher takes different counts for ranks that wait."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def set_loss(self, step: int, loss: float) -> None:
        """Set the loss of the last reported step, if it is `step`: a number that is the same on all ranks."""
        if self._record is not None and self._record.step == step:
            self._record = dataclasses.replace(self._record, loss=loss)

    def flush(self) -> None:
        """Write the record of the last step. All ranks call this together."""
        record, self._record = self._record, None
        if self._work is not None:
            self._work.wait()
            self._work = None
        if record is None:
            return
        samples, weight, total_loss, intra, inter, dense = self._sums.tolist()
        loss = total_loss / weight if weight else record.loss
        if self._metrics is not None and loss is not None:
            self._metrics.set_loss(loss)
        if self._writer is None:
            return
        self._writer.write(
            dataclasses.replace(
                record,
                samples=int(samples),
                samples_per_second=samples / max(record.seconds["forward"], 1e-9),
                loss=loss,
                intra_bytes=int(intra),
                inter_bytes=int(inter),
                dense_bytes=int(dense),
            )
        )

    def close(self) -> None:
        """Write the last record and close the file. All ranks call this together; a second call does nothing."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self.is_on = False
