"""A run: batches in step on all ranks, progress, and checkpoints that a restart goes on from."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from topkube.collectives.link import link_rate
from topkube.data import DistributedSampler
from topkube.data.watch import statistics
from topkube.ending import all_end
from topkube.errors import CheckpointError, StorageError, TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.telemetry.progress import ProgressWriter, StepRecord
from topkube.telemetry.rank_file import ABSENT, RankMetrics
from topkube.training.checkpoint import CheckpointStore, Loaded
from topkube.training.distributed import DistributedOptimizer
from topkube.training.generators import generators, set_generators
from topkube.training.norms import Norms
from topkube.training.schedule import schedule
from topkube.training.steps import REPORTER
from topkube.training.terminal import TerminalBar
from topkube.training.uneven import Sums
from topkube.world import current

_CACHE_LOOK_SECONDS = 1.0
"""Between two looks at what the data cache has counted."""


def checkpointing(
    model: torch.nn.Module,
    optimizer: DistributedOptimizer,
    sampler: DistributedSampler | None = None,
    *,
    settings: Settings | None = None,
    **more: Any,
) -> Run:
    """The context of a training run. On entry it resumes from the newest checkpoint, if there is one; inside,
    `run.progress` hands out batches, saves every spec.checkpoint.everySteps steps, on SIGTERM (all ranks after the
    same step; the process then ends with exit code 143) and at the end. Without a checkpoint directory it only
    reports progress.

    `sampler` lets a run go on in the middle of an epoch. `more` are further things with `state_dict` and
    `load_state_dict`, by name: `scheduler=scheduler`. Raises CheckpointError, and TrainingError for a plain torch
    optimizer.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise TrainingError(
            f"checkpointing got a {type(optimizer).__name__}",
            next_step="wrap it first: topkube.DistributedOptimizer(optimizer, model.named_parameters())",
        )
    return Run(model, optimizer, sampler, settings or Settings.from_environment(), more)


class Run:
    """What `checkpointing` gives. `step` counts the batches that are done, `epoch` the passes over the data."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: DistributedOptimizer,
        sampler: DistributedSampler | None,
        settings: Settings,
        more: dict[str, Any],
    ) -> None:
        self.step = 0
        self.epoch = 0
        self._model, self._optimizer, self._sampler, self._more = model, optimizer, sampler, more
        self._world, self._settings = current(), settings
        self._store: CheckpointStore | None = None
        if settings.checkpoint_directory:
            directory = Path(settings.checkpoint_directory)
            job = settings.job_uid or settings.job_name
            self._store = CheckpointStore(directory, settings.checkpoint_keep, self._world, job, settings.attempt)
        self.failed_checkpoints = 0
        """Checkpoints of this run that the disk refused."""
        self._saved, self._told = (0, 0), False
        self._due = self._stop = False
        self._generators: dict[str, Any] | None = None
        self._passes_asked = 0
        self._total: int | None = None
        self._samples = 0
        self._loss: torch.Tensor | float | None = None
        self._turn: Future[Sums] | None = None
        self._record: StepRecord | None = None
        self._report = (0.0,) * 5
        self._writer: ProgressWriter | TerminalBar | None = None
        self._metrics: RankMetrics | None = None
        self._last_time = self._cache_looked = 0.0
        self._hook: Any = None
        self._previous_handler: Any = None

    # ---- the context

    def __enter__(self) -> Run:
        self._hook = self._model.register_forward_hook(self._take_loss)
        if self._store is not None:
            self._store.claim()
            loaded = self._store.load(*self._optimizer.residual_copy)
            if loaded is not None:
                self._resume(loaded)
            if threading.current_thread() is threading.main_thread():
                self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._settings.run_path is not None:
            self._measure(self._settings.run_path)
        self._world.cache[REPORTER] = self
        if self._world.rank == 0:
            if self._settings.run_path is not None:
                self._writer = ProgressWriter(self._settings.run_path)
            elif sys.stdout.isatty():
                self._writer = TerminalBar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        unsaved = self._saved != (self.step, self.epoch) and not self._optimizer.accumulating
        if kind is None and self._store is not None and unsaved:
            self.save()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        self._world.cache.pop(REPORTER, None)
        if self._writer is not None:
            self._writer.close()
        if self._metrics is not None:
            self._optimizer.norms = None
            self._metrics.close()

    def _measure(self, directory: Path) -> None:
        """From here on the rank's metrics are in the run's directory."""
        self._metrics = RankMetrics(directory, self._world.rank, self._settings.attempt)
        self._metrics["link_rate"] = link_rate(self._world) or ABSENT
        self._optimizer.norms = Norms()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    # ---- batches

    def progress(self, loader: Iterable[Any], total: int | None = None, epochs: int | None = None) -> Iterator[Any]:
        """The batches of `loader`: `epochs` passes over it (one if neither is given), or as many as `total` steps need.

        All ranks end together, uneven batches count by their samples (see `DistributedOptimizer.join`), and what a
        checkpoint already covers is passed over, also where this is called once per epoch.
        """
        passes = epochs if epochs is not None else 1 if total is None else sys.maxsize
        self._passes_asked = min(self._passes_asked + passes, sys.maxsize)
        self._last_time = time.perf_counter()
        phases.current.take()
        try:
            while self.epoch < self._passes_asked and (total is None or self.step < total):
                if self._sampler is not None:
                    self._sampler.set_epoch(self.epoch)
                self._total = total if total is not None else self._expected(loader)
                before, resumed = self.step, self._sampler is not None and self._sampler.position > 0
                yield from self._one_pass(loader, total)
                if self.step == before and not resumed:
                    raise TrainingError("the loader gave no batch on any rank", next_step="check the dataset's length")
            schedule().submit(lambda: None).result()  # what the communication thread has to write is written now
        finally:  # waits for nothing: a loop that was left alone is closed when the interpreter ends
            if self._record is not None:  # the script broke off: only this rank's own numbers are known
                self._write(self._record, *self._report[:2], *(self._world.size * count for count in self._report[2:]))
            self._passes_asked = min(self._passes_asked, self.epoch)

    def _one_pass(self, loader: Iterable[Any], total: int | None) -> Iterator[Any]:
        turns = self._optimizer.turns
        for batch in turns.batches(loader, more=self._tell, seen=self._heard, opened=self._restore_generators):
            yield batch
            self._end_step()
            if total is not None and self.step >= total:
                self._heard(turns.announce(0, *self._tell()))
                turns.end()
                return
        self.epoch += 1
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)

    def _tell(self) -> tuple[float, ...]:
        """What goes with the announcement of a batch: whether to stop, and the numbers of the step before."""
        return (float(self._stop), *self._report)

    def _heard(self, turn: Future[Sums]) -> None:
        """Rank 0 writes the step before as soon as all ranks' numbers are there."""
        record, self._record, self._turn = self._record, None, turn
        if record is not None:
            turn.add_done_callback(lambda done: self._write(record, *done.result()[2:].tolist()))

    def _end_step(self) -> None:
        assert self._turn is not None
        self._optimizer.turns.forget_replay()
        sums, own, now = self._turn.result(), phases.current.take(), time.perf_counter()
        samples, stop = int(sums[0]), bool(sums[1])
        self.step += 1
        if self._sampler is not None:
            self._sampler.advance(samples)
        weight = self._optimizer.turns.samples if self._loss is not None else 0
        loss = weight * float(self._loss) if self._loss is not None and weight else 0.0
        self._loss = None
        self._report = (loss, float(weight), own.intra_bytes, own.inter_bytes, own.dense_bytes)
        self._record = StepRecord(
            step=self.step,
            total_steps=self._total,
            epoch=self.epoch,
            samples=samples,
            samples_per_second=samples / max(now - self._last_time, 1e-9),
            seconds=own.seconds,
            density=self._optimizer.density_used,
            skipped_steps=self._optimizer.skipped_steps,
            checkpoint_step=self._saved[0] or None,
            failed_checkpoints=self.failed_checkpoints,
            time=time.time(),
        )
        if self._metrics is not None:
            if now >= self._cache_looked + _CACHE_LOOK_SECONDS:
                self._cache_looked = now
                self._metrics.cache(statistics())
            self._metrics.step(now - self._last_time, own, self._optimizer.turns.samples, self._gauges(self._record))
        self._last_time = now
        self._checkpoint(stop)

    def _gauges(self, record: StepRecord) -> dict[str, float]:
        norms = self._optimizer.norms or Norms()
        return {
            "step": record.step,
            "total_steps": ABSENT if record.total_steps is None else record.total_steps,
            "density": record.density,
            "skipped_steps": record.skipped_steps,
            "last_step": record.time,
            "gradient_norm": ABSENT if norms.gradient is None else norms.gradient,
            "residual_norm": ABSENT if norms.residual is None else norms.residual,
        }

    def _write(self, record: StepRecord, loss: float, weight: float, intra: float, inter: float, dense: float) -> None:
        if self._metrics is not None and weight:
            self._metrics["loss"] = loss / weight
            self._metrics.flush()
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

    def _expected(self, loader: Any) -> int | None:
        """Steps of the run: those done, what is left of this pass, and whole passes after it."""
        try:
            left = full = len(loader)
            if self._sampler is not None and self._sampler.position:
                position, self._sampler.position = self._sampler.position, 0
                full, self._sampler.position = len(loader), position
        except TypeError:
            return None
        return self.step + left + full * (self._passes_asked - self.epoch - 1)

    # ---- loss

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Notes the loss of this rank's batch for the progress report, and gives it back:
        `run.loss(criterion(...)).backward()`. A model that itself returns its loss, as one number, needs no call."""
        self._loss = value.detach()
        return value

    def _take_loss(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim == 0 and output.requires_grad:
            self._loss = output.detach()

    # ---- checkpoints

    def _checkpoint(self, stop: bool) -> None:
        if self._store is None:
            return
        self._due = self._due or stop or self.step % self._settings.checkpoint_every == 0
        if self._due and not self._optimizer.accumulating:
            self._save_or_go_on()
            self._due = False
        if stop and not self._due:
            all_end()
            raise SystemExit(128 + signal.SIGTERM)

    def _save_or_go_on(self) -> None:
        """A disk that is full for a while does not end training: the failure is counted, and told once."""
        try:
            self.save()
            if self._told and self._world.rank == 0:
                print(f"topkube: the checkpoint of step {self.step} is written again", file=sys.stderr, flush=True)
            self._told = False
        except StorageError as error:
            self.failed_checkpoints += 1
            if not self._told and self._world.rank == 0:
                print(f"topkube: warning: training goes on without: {error}", file=sys.stderr, flush=True)
            self._told = True
        if self._record is not None:
            self._record = dataclasses.replace(
                self._record, checkpoint_step=self._saved[0] or None, failed_checkpoints=self.failed_checkpoints
            )

    def save(self) -> None:
        """Saves a checkpoint of the step just done; all ranks together. Raises StorageError where the disk refuses,
        with the checkpoint before still in place."""
        assert self._store is not None
        optimizer = self._optimizer.state_dict()
        own = {"residuals": optimizer["topkube"].pop("residuals"), "generators": generators()}

        def shared() -> dict[str, Any]:
            return {
                "step": self.step,
                "epoch": self.epoch,
                "model": self._model.state_dict(),
                "optimizer": optimizer,
                "sampler": self._sampler.state_dict() if self._sampler is not None else None,
                "more": {name: thing.state_dict() for name, thing in self._more.items()},
            }

        self._store.save(self.step, shared, own)
        self._saved = (self.step, self.epoch)

    def _resume(self, loaded: Loaded) -> None:
        shared, own = loaded.shared, loaded.own
        state = shared["optimizer"]
        state["topkube"]["residuals"] = own["residuals"]
        try:
            self._model.load_state_dict(shared["model"])
            self._optimizer.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint {loaded.place.name} in {self._settings.checkpoint_directory} belongs to another model"
                f" or optimizer: {error}",
                cause="the script changed, or another job writes to this directory",
                next_step="give the run a directory of its own (spec.checkpoint.path), or the script that it was",
            ) from error
        self.step, self.epoch = self._saved = shared["step"], shared["epoch"]
        if self._sampler is not None and shared["sampler"] is not None:
            self._sampler.load_state_dict(shared["sampler"])
        for name, thing in self._more.items():
            if name in shared["more"]:
                thing.load_state_dict(shared["more"][name])
        self._generators = own.get("generators")
        if self._world.rank == 0:
            print(f"topkube: resumed at step {self.step} from {loaded.place.name}", flush=True)

    def _restore_generators(self) -> None:
        """Once the loader's iterator stands: making it draws a random number, which the run before had drawn
        already."""
        if self._generators is not None:
            set_generators(self._generators)
            self._generators = None
