"""A training run: batches in step on all ranks, progress reports, and checkpoints from which a restart resumes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from topkube.data import DistributedSampler
from topkube.errors import TrainingError
from topkube.mpi_exit import finalize_at_exit
from topkube.settings import Settings
from topkube.training.batches.generators import set_generators
from topkube.training.batches.samples import Samples, has_own_order
from topkube.training.batches.uneven_batches import Sums
from topkube.training.checkpoint.format.weights_file import write_weights
from topkube.training.checkpoint.stages import Stages
from topkube.training.checkpoint.stop_signal import StopSignal
from topkube.training.distributed import DistributedOptimizer
from topkube.training.ranks import communication_thread
from topkube.training.reporting.batch_loss import BatchLoss
from topkube.training.reporting.warning import warn
from topkube.training.run_checkpoints import RunCheckpoints, gather_own_samples
from topkube.training.run_reports import RunReports
from topkube.world import current


def checkpointing(
    model: torch.nn.Module,
    optimizer: DistributedOptimizer,
    sampler: DistributedSampler | None = None,
    *,
    settings: Settings | None = None,
    **more: Any,
) -> Run:
    """Return the context manager of a training run. On entry it resumes from the newest checkpoint, if there is one.
    Inside, `run.progress` yields batches and saves checkpoints: every spec.checkpoint.everySteps steps, on SIGTERM (all
    ranks after the same step; the process then ends with exit code 143) and at the end, also by `sys.exit()` on all
    ranks. Without a checkpoint directory it only reports progress.

    With `sampler`, a run can resume in the middle of an epoch. `more` holds further objects with `state_dict` and
    `load_state_dict`, by name: `scheduler=scheduler`. Raises CheckpointError, and TrainingError for a plain torch
    optimizer, or if checkpoints are to be saved of an optimizer with its own `world=`.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise TrainingError(
            f"checkpointing got a {type(optimizer).__name__}",
            next_step="wrap the optimizer first: topkube.DistributedOptimizer(optimizer, model.named_parameters())",
        )
    settings = settings or Settings.from_environment()
    if settings.checkpoint_directory and optimizer.turns.world is not current():
        raise TrainingError(
            "checkpoints cannot be saved of an optimizer with its own world=",
            cause="ranks outside that world would count other samples and stop after other steps",
            next_step="save the state_dict() of model and optimizer on every rank, and unset spec.checkpoint"
            " (TOPKUBE_CHECKPOINT_DIRECTORY)",
        )
    return Run(model, optimizer, sampler, settings, more)


class Run:
    """A training run, as `checkpointing` returns it. `step` is the number of finished batches, `epoch` the number of
    finished passes over the data."""

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
        self._model, self._optimizer, self._sampler = model, optimizer, sampler
        self._world, self._process = current(), os.getpid()
        self._checkpoints: RunCheckpoints | None = None
        if settings.checkpoint_directory:
            self._checkpoints = RunCheckpoints(self._world, settings, model, optimizer, sampler, more)
        self._stop_signal = StopSignal()
        self._generators: dict[str, Any] | None = None
        """The states of the random generators in the checkpoint, until the first pass over the data has begun."""
        self._was_in_pass = False
        """True if the checkpoint was saved in a pass over the data."""
        self._passes_asked = 0
        """The number of passes over the data that the calls of `progress` have asked for so far."""
        self._resumed: dict[str, Any] | None = None
        """The sampler's state in the checkpoint, if it is in the middle of an epoch. A script's own
        `sampler.set_epoch`, of epochs that are finished, loses the sampler's position."""
        self._epochs_planned = 0
        """The number of epochs of `epochs`."""
        self._is_pass_begun = False
        """True if the script has asked for a pass in the current turn of `epochs`."""
        self._has_warned = False
        """True if a call of `save` has printed a warning."""
        self._has_warned_of_order = False
        self._is_counted = True
        """False while the script works with a batch that does not count as finished yet."""
        self._asked_too_little = False
        """True if a run has resumed, and the script has not asked for so many passes that one was left."""
        self._total: int | None = None
        self._loss = BatchLoss(model)
        self._announced: Future[Sums] | None = None
        """The agreement of all ranks on the current batch."""
        self._reports = RunReports(self._world, settings, optimizer)

    # ---- the context

    def __enter__(self) -> Run:
        self._loss.watch()
        try:
            if self._checkpoints is not None:
                if (resumed := self._checkpoints.resume()) is not None:
                    (self.step, self.epoch), self._generators, self._was_in_pass = resumed
                    if self._sampler is not None and self._sampler.position:
                        self._resumed = self._sampler.state_dict()
                self._stop_signal.watch()
            self._reports.open()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            return  # a fork of the script ends alone
        is_end = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            if is_end:
                self._finish_batch()
            if self._checkpoints is not None and not is_end:
                self._checkpoints.abandon()
            elif self._checkpoints is not None:
                self._checkpoints.finish()
                if self._checkpoints.saved != (self.step, self.epoch) and not self._optimizer.accumulating:
                    self.save()
            if kind is None and self._asked_too_little:
                raise TrainingError(
                    f"the run resumed in epoch {self.epoch}, but the script asked for {self._passes_asked} passes over"
                    " the data, so it has trained nothing",
                    cause="`run.progress` counts passes from the start of the run, not from the checkpoint",
                    next_step="write the loop as `for epoch in run.epochs(...):`, which begins where the checkpoint"
                    " ends, or use run.progress(loader, epochs=...)",
                )
        finally:
            self._detach()

    def _detach(self) -> None:
        """Undo what the run attached to the model, the world and the process. Nothing keeps the run alive then."""
        self._loss.unwatch()
        self._stop_signal.unwatch()
        self._reports.close()

    # ---- batches

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs of a run of `count` epochs: from 0 on, or after a resume from the epoch on
        that the checkpoint has not finished. In the loop over them, call `progress` once, for one pass.

        What follows it in the loop, such as `scheduler.step()`, runs once per epoch, also if the checkpoint was saved
        at the last batch of an epoch: save your own (`run.save()`) at the end of the loop's body. If the script leaves
        an epoch early, the rest of its samples are left out. Raises TrainingError if the script asks for no batches.
        """
        self._epochs_planned = count
        while (epoch := self.epoch) < count:
            self._passes_asked, self._is_pass_begun = epoch, False
            yield epoch
            self._finish_batch()
            if not self._is_pass_begun:
                raise TrainingError(
                    f"the loop over run.epochs() asked for no batches in epoch {epoch}",
                    cause="it reads the loader itself, without run.progress",
                    next_step="write `for batch in run.progress(loader):` inside the loop",
                )
            if self.epoch == epoch:
                self._end_epoch()

    def progress(
        self,
        loader: Iterable[Any],
        total: int | None = None,
        epochs: int | None = None,
        samples: Samples = None,
        device: torch.device | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of `loader`: `epochs` passes over it (one by default), or as many batches as `total` steps
        need.

        All ranks end together. Uneven batches count by their samples (see `DistributedOptimizer.join`). Batches that a
        checkpoint already covers are skipped, also if a script calls this once per epoch: in a loop over `epochs`, or
        over numbers that begin with 0 after a resume too. A batch counts as finished when the next one is drawn, or
        after a step of the optimizer if the script leaves the loop or saves. `samples`, a number or a function of the
        batch, is the number of samples in a batch. With `device` (`topkube.device()`), the tensors of the next batch
        are copied to that GPU while it computes the current step.

        Raises TrainingError if the number of samples is needed and not certain, and if a loop over numbers that begin
        with 0 changes the learning rate, or the state of an object of `checkpointing`, in epochs that are finished.
        """
        self._finish_batch()
        self._is_pass_begun = True
        passes = epochs if epochs is not None else 1 if total is None else sys.maxsize
        self._passes_asked = min(self._passes_asked + passes, sys.maxsize)
        self._asked_too_little = total is None and (
            self._passes_asked < self.epoch or (self._passes_asked == self.epoch and self._resumed is not None)
        )
        if self._checkpoints is not None:
            if self.epoch >= self._passes_asked:
                self._checkpoints.skipped_passes.note()
            else:
                self._checkpoints.skipped_passes.check()
            self._warn_of_order(loader)
        self._reports.begin_loop()
        try:
            while self.epoch < self._passes_asked and (total is None or self.step < total):
                if self._sampler is not None:
                    self._sampler.set_epoch(self.epoch)
                    if self._resumed is not None:
                        self._sampler.load_state_dict(self._resumed)
                        self._resumed = None
                    elif self._sampler.position:
                        self._sampler.begin_iterator(gather_own_samples(self._world, self._sampler))
                self._total = total if total is not None else self._count_expected_steps(loader)
                before, resumed = self.step, self._sampler is not None and self._sampler.position > 0
                yield from self._iterate_pass(loader, total, samples, device)
                if self.step == before and not resumed:
                    raise TrainingError(
                        "the loader returned no batch on any rank", next_step="check the dataset's length"
                    )
            communication_thread.run(lambda: None)  # waits until the communication thread has written its records
            if self._checkpoints is not None:
                self._checkpoints.finish()
                self._note_checkpoints()
        finally:  # must not wait: an abandoned loop is closed when the interpreter ends
            self._reports.write_alone()
            self._passes_asked = min(self._passes_asked, self.epoch)

    def _iterate_pass(
        self, loader: Iterable[Any], total: int | None, samples: Samples, device: torch.device | None
    ) -> Iterator[Any]:
        batches = self._optimizer.turns
        if self._generators is not None:
            set_generators(self._generators)
            if self._was_in_pass:  # the seed of the loader's workers is drawn next: another one after each resume
                torch.default_generator.manual_seed(int(torch.randint(1 << 62, ())) + self.step)
        for batch in batches.iterate(
            loader, self._list_announced, self._note_announced, self._begin_pass, samples, device
        ):
            self._is_counted = False
            yield batch
            if not self._is_counted:
                self._end_step()
            if total is not None and self.step >= total:
                self._note_announced(batches.announce(0, *self._list_announced()))
                batches.end()
                return
        self._end_epoch()

    def _begin_pass(self) -> None:
        """Note that the loader's iterator exists. Creating it draws a random number, the seed of the loader's workers.
        If the checkpoint was saved in a pass, the earlier run had drawn it before: the generators are restored now."""
        if self._generators is not None and self._was_in_pass:
            set_generators(self._generators)
        self._generators = None
        if self._checkpoints is not None:
            self._checkpoints.is_in_pass = True

    def _end_epoch(self) -> None:
        self.epoch += 1
        if self._checkpoints is not None:
            self._checkpoints.is_in_pass = False
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)

    def _list_announced(self) -> tuple[float, ...]:
        """Return the numbers that accompany the announcement of a batch: 1 if the run must stop, 1 if this rank has
        finished the current stage of a save, and the numbers of the previous step."""
        stage_done = self._checkpoints is not None and self._checkpoints.is_stage_done
        return (float(self._stop_signal.has_come), float(stage_done), *self._reports.numbers)

    def _note_announced(self, sums: Future[Sums]) -> None:
        self._announced = sums
        self._reports.write_after(sums)

    def _finish_batch(self) -> None:
        """Count the batch that the script left, or with which it still works, if the optimizer has made or skipped a
        step with it. Otherwise its update would be in the weights, and the batch be trained again after a resume."""
        if not self._is_counted and self._optimizer.turns.was_stepped:
            self._end_step()

    def _end_step(self) -> None:
        assert self._announced is not None
        self._is_counted = True
        self._optimizer.turns.forget_replay()
        sums = self._announced.result()  # the samples, then the numbers of `_list_announced`
        samples, stop, stage_done = int(sums[0]), bool(sums[1]), sums[2] == self._world.size
        self.step += 1
        newest, failed = self._newest_checkpoint, self.failed_checkpoints
        self._reports.end_step(self.step, self._total, self.epoch, samples, self._loss.take(), newest, failed)
        if self._sampler is not None:
            self._sampler.advance(self._optimizer.turns.drawn, self._optimizer.turns.own_drawn)
        if self._checkpoints is not None:
            must_end = self._checkpoints.end_step((self.step, self.epoch), stop, stage_done)
            self._note_checkpoints()
            if must_end:
                finalize_at_exit()
                raise SystemExit(128 + signal.SIGTERM)

    def _warn_of_order(self, loader: Iterable[Any]) -> None:
        """Print a warning, once, if a run that resumes in the middle of an epoch cannot know which samples are left."""
        if self._sampler is None or self._has_warned_of_order or not has_own_order(loader):
            return
        self._has_warned_of_order = True
        if self._world.rank == 0:
            warn(
                "the loader may yield samples in another order than that of its sampler (a batch sampler of your own,"
                " or in_order=False): a run that resumes in the middle of an epoch trains some of its samples twice,"
                " and others not at all. Next: let the DataLoader make the batches in order, or call run.save() at the"
                " end of each epoch and set spec.checkpoint.everySteps to whole epochs"
            )

    def _count_expected_steps(self, loader: Any) -> int | None:
        """Return the number of steps of the run: the finished steps, the rest of this pass, and the passes after it;
        None if the loader has no length."""
        try:
            rest_of_pass = whole_pass = len(loader)
            if self._sampler is not None and self._sampler.position:
                # The loader's length depends on the sampler's position: at the start, it is that of a whole pass.
                with self._sampler.at_start():
                    whole_pass = len(loader)
        except TypeError:
            return None
        return self.step + rest_of_pass + whole_pass * (max(self._passes_asked, self._epochs_planned) - self.epoch - 1)

    # ---- loss

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Note the loss of this rank's batch for the progress report, and return it:
        `run.loss(criterion(...)).backward()`. A model whose output is its loss, as a single number, needs no call."""
        self._loss.note(value)
        return value

    # ---- checkpoints

    @property
    def failed_checkpoints(self) -> int:
        """The number of checkpoints of this run that could not be written."""
        return self._checkpoints.failed if self._checkpoints is not None else 0

    @property
    def _newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint; None if there is no checkpoint."""
        return (self._checkpoints.saved[0] or None) if self._checkpoints is not None else None

    def _note_checkpoints(self) -> None:
        """Update the record of the last step, which is not written yet."""
        self._reports.note_checkpoints(self._newest_checkpoint, self.failed_checkpoints)

    def save(self) -> None:
        """Save a checkpoint of the last step and wait until it is published. All ranks call this together. Raises
        StorageError if the storage fails; the previous checkpoint still exists then. Without a checkpoint directory,
        nothing is saved, and the first call prints a warning."""
        self._finish_batch()
        if self._checkpoints is None:
            if self._world.rank == 0 and not self._has_warned:
                warn(
                    "run.save() saved nothing: this run has no directory for checkpoints. Next: set spec.checkpoint, or"
                    " pass --checkpoint-every to topkube run (TOPKUBE_CHECKPOINT_DIRECTORY)"
                )
            self._has_warned = True
            return
        if self._checkpoints.awaits_step and self._world.rank == 0 and not self._has_warned:
            warn(
                f"the checkpoint of step {self.step} does not contain the gradients that wait for a step of the"
                " optimizer, so a run that resumes from it differs. Next: call run.save() after optimizer.step()"
            )
            self._has_warned = True
        self._checkpoints.save((self.step, self.epoch))
        self._note_checkpoints()

    def save_weights(self, path: Path | str) -> None:
        """Write the model's weights to a safetensors file, which replaces an earlier file at `path` as a whole. All
        ranks call this together, between two steps; rank 0 writes. With error feedback in the weights (onebit), these
        are the weights that all nodes agree on.

        Raises StorageError on all ranks if the file cannot be written, and CheckpointError if safetensors is not
        installed or does not support the model."""

        def write() -> None:
            if self._world.rank == 0:
                write_weights(self._model, Path(path), self.step)

        with self._optimizer.consensus():
            Stages(self._world).run(write, f"the weights cannot be written to {path}")
