"""The checkpoints of a run: their contents, saves that advance with the steps, and the resumption of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from topkube.data import DistributedSampler
from topkube.errors import CheckpointError, StorageError
from topkube.settings import Settings
from topkube.training.batches.generators import read_generators
from topkube.training.checkpoint import CheckpointStore, LoadedCheckpoint
from topkube.training.checkpoint.resumption import (
    Stateful,
    check_contents,
    check_optimizer,
    list_optimizer_names,
    load_all_or_none,
)
from topkube.training.checkpoint.skipped_passes import SkippedPasses
from topkube.training.checkpoint.stages import Stages
from topkube.training.distributed import DistributedOptimizer
from topkube.training.reporting.warning import warn
from topkube.world import World

Position = tuple[int, int]
"""The finished steps and the finished passes over the data: (step, epoch)."""
_MOST_ACCUMULATED = 256
"""If an optimizer makes no step for so many batches, its gradients are not those of an accumulation."""
Resumed = tuple[Position, dict[str, Any] | None, bool]
"""What a run continues from: the position, the states of this rank's random generators (None if another world saved
the checkpoint), and `RunCheckpoints.is_in_pass` when it was saved."""
_LONG_WAIT_SECONDS = 1.0
"""A longer wait for the previous checkpoint is reported."""


class RunCheckpoints:
    """The checkpoints of a run in the directory of `settings`. All ranks call every method but `abandon` together.
    `is_in_pass` is True while the script is in a pass over the data, which has its iterator."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        model: torch.nn.Module,
        optimizer: DistributedOptimizer,
        sampler: DistributedSampler | None,
        more: Mapping[str, Any],
    ) -> None:
        assert settings.checkpoint_directory is not None
        self._world, self._directory = world, settings.checkpoint_directory
        self._model, self._optimizer, self._sampler, self._more = model, optimizer, sampler, more
        self._others = {name: item for name, item in more.items() if isinstance(item, DistributedOptimizer)}
        """Further optimizers, such as that of a GAN's discriminator."""
        self._optimizers = [optimizer, *self._others.values()]
        self._steps_asked = [other.turns.steps_asked for other in self._optimizers]
        self._batches_since = [0] * len(self._optimizers)
        """The batches since the last step of each optimizer."""
        job = settings.job_uid or settings.job_name
        self._store = CheckpointStore(Path(self._directory), settings.checkpoint_keep, world, job, settings.attempt)
        self.is_in_pass = False
        self.skipped_passes = SkippedPasses(optimizer.inner, more)
        self.failed = 0
        """The number of checkpoints of this run that could not be written."""
        self.saved: Position = (0, 0)
        """The position of the newest checkpoint."""
        self._begun: Position = (0, 0)
        """The position of the last save that was begun."""
        self._every, self._is_due = settings.checkpoint_every, False
        self._failure_reported = self._wait_reported = False

    @property
    def is_stage_done(self) -> bool:
        """True if this rank has finished the current stage of a save."""
        return self._store.is_stage_done

    @property
    def awaits_step(self) -> bool:
        """True if gradients accumulate for a later step: a checkpoint does not contain gradients. No step will
        use those that a batch leaves after its step, such as a generator's loss leaves in the discriminator."""
        return any(
            optimizer.accumulating or (0 < batches < _MOST_ACCUMULATED and optimizer.awaits_step)
            for optimizer, batches in zip(self._optimizers, self._batches_since, strict=True)
        )

    def resume(self) -> Resumed | None:
        """Claim the directory and load the newest checkpoint. Return what the run continues from; None if there is no
        checkpoint. Raises CheckpointError if it does not fit."""
        self._store.claim()
        loaded = self._store.load(*self._optimizer.residual_copy, check_contents)
        return None if loaded is None else self._load(loaded)

    def abandon(self) -> None:
        """Stop a save that is under way: the run ends with an error."""
        self._store.abandon()

    def end_step(self, position: Position, stop: bool, is_stage_done: bool) -> bool:
        """Save a checkpoint at the end of a step if it is due: every `checkpoint_every` steps, and before the run stops
        (`stop`). `is_stage_done` is True if all ranks have finished the current stage of a save. Return True if the run
        must end now, because its last save has ended."""
        if is_stage_done:
            self.advance()
        self._is_due = self._is_due or stop or position[0] % self._every == 0
        before, self._steps_asked = self._steps_asked, [optimizer.turns.steps_asked for optimizer in self._optimizers]
        for number, steps_asked in enumerate(before):
            is_stepped = self._steps_asked[number] != steps_asked
            self._batches_since[number] = 0 if is_stepped else self._batches_since[number] + 1
        if self._is_due and not Stages(self._world).gather([self.awaits_step]).any():
            self.begin(position)
            self._is_due = False
        must_end = stop and not self._is_due
        if must_end:
            self.finish()
        return must_end

    def advance(self) -> None:
        """Begin the next stage of a save, after all ranks have finished the current stage."""
        if self._store.is_saving:
            self._run_stage(self._store.advance)

    def begin(self, position: Position) -> None:
        """Begin to save a checkpoint of `position`, after the previous save has ended."""
        self._run_stage(lambda: self._wait_for_save(position[0]))
        self._run_stage(lambda: self._begin(position))

    def finish(self) -> None:
        """Wait until the current save is published. A failure is counted and reported."""
        self._run_stage(self._store.finish)

    def save(self, position: Position) -> None:
        """Save a checkpoint of `position` and wait until it is published. Raises StorageError if the storage
        fails."""
        self.finish()
        if self._begin(position) is None:
            self._store.finish()
        self.saved = self._begun

    def _wait_for_save(self, step: int) -> int | None:
        """Wait for the previous save: there is never more than one. If the disk is too slow, rank 0 reports the
        wait."""
        start = time.perf_counter()
        published = self._store.finish()
        waited = time.perf_counter() - start
        if waited > _LONG_WAIT_SECONDS and not self._wait_reported and self._world.rank == 0:
            self._wait_reported = True
            warn(
                f"training waited {waited:.1f} s at step {step} for the checkpoint of step {self._begun[0]}: the"
                " storage is slower than the steps between two checkpoints. Next: raise spec.checkpoint.everySteps"
                " (TOPKUBE_CHECKPOINT_EVERY), or use faster storage"
            )
        return published

    def _run_stage(self, stage: Callable[[], int | None]) -> None:
        """Run a stage of a save. A disk that is full for some time does not end training: the failure is counted, and
        reported once, by rank 0 and by the ranks that have the reason."""
        try:
            if stage() is not None:
                self.saved = self._begun
                if self._failure_reported and self._world.rank == 0:
                    print(
                        f"topkube: the checkpoint of step {self.saved[0]} is written: checkpoints work again",
                        file=sys.stderr,
                        flush=True,
                    )
                self._failure_reported = False
        except StorageError as error:
            self.failed += 1
            if not self._failure_reported and (self._world.rank == 0 or not error.is_of_others):
                warn(f"training continues without this checkpoint: {error}")
            self._failure_reported = True

    def _begin(self, position: Position) -> int | None:
        """Copy the state of the last step and begin to write it. Return the step if it is published already, because
        there was no memory for a copy."""
        with contextlib.ExitStack() as stack:  # the weights, and masters, are those that all nodes agree on
            for optimizer in self._optimizers:
                stack.enter_context(optimizer.consensus())
            return self._begin_in_consensus(position)

    def _begin_in_consensus(self, position: Position) -> int | None:
        """Begin the save of `_begin`, while the parameters hold the weights to save."""
        optimizer = self._optimizer.state_dict()
        others = {name: other.state_dict() for name, other in self._others.items()}
        taken = gather_own_samples(self._world, self._sampler) if self._sampler is not None else []
        own = {
            "residuals": optimizer["topkube"].pop("residuals"),
            "others": {name: state["topkube"].pop("residuals") for name, state in others.items()},
            "generators": read_generators(),
        }
        (step, epoch), is_in_pass = position, self.is_in_pass

        def collect_shared_state() -> dict[str, Any]:
            return {
                "step": step,
                "epoch": epoch,
                "is_in_pass": is_in_pass,
                "model": self._model.state_dict(),
                "optimizer": optimizer,
                "optimizer_names": list_optimizer_names(self._optimizer),
                "sampler": self._sampler.state_dict(taken) if self._sampler is not None else None,
                "more": {name: others.get(name) or item.state_dict() for name, item in self._more.items()},
            }

        self._begun = position
        return None if self._store.begin(step, collect_shared_state, own) else self._store.finish()

    def _load(self, loaded: LoadedCheckpoint) -> Resumed:
        """Load all states or none: if a checkpoint does not fit, model and optimizer stay as they were, on all
        ranks."""
        directory = self._directory
        shared, own = loaded.shared, loaded.own
        state = {**shared["optimizer"], "topkube": {**shared["optimizer"]["topkube"], "residuals": own["residuals"]}}
        pairs: list[tuple[Stateful, Any]] = [(self._model, shared["model"]), (self._optimizer, state)]
        if self._sampler is not None and shared["sampler"] is not None:
            pairs.append((self._sampler, shared["sampler"]))
        for name, item in self._more.items():
            if name in shared["more"]:
                pairs.append((item, self._complete(name, shared["more"][name], own.get("others", {}))))

        def load() -> None:
            check_optimizer(loaded, self._optimizer, directory)
            for item, its_state in pairs:
                try:
                    item.load_state_dict(its_state)
                except Exception as error:
                    raise CheckpointError(
                        f"the checkpoint {loaded.name} in {directory} belongs to another model or optimizer:"
                        f" {type(item).__name__}: {error}",
                        cause="the script changed, or another job writes to this directory",
                        next_step="use another directory for this run (spec.checkpoint.path), or the script that"
                        " wrote the checkpoint",
                    ) from error

        with load_all_or_none([item for item, _ in pairs]):
            self._store.run_on_all_ranks(load, f"the checkpoint {loaded.name} in {directory} cannot be resumed from")
        for optimizer in self._optimizers:
            optimizer.restore_node_weights()
        self.saved = self._begun = shared["step"], shared["epoch"]
        if self._world.rank == 0:
            for name in self._more.keys() - shared["more"].keys():
                warn(f"the checkpoint {loaded.name} contains no state of {name}, which starts from the beginning")
            print(f"topkube: resumed at step {self.saved[0]} from {loaded.name}", flush=True)
        return self.saved, own.get("generators"), shared.get("is_in_pass", True)

    def _complete(self, name: str, state: Any, others: Mapping[str, Any]) -> Any:
        """Return the state of an object of `more`, with this rank's residuals in `others` if it is an optimizer. Raises
        CheckpointError if the nodes' own weights cannot be restored."""
        optimizer = self._others.get(name)
        if optimizer is None:
            return state
        residuals = others.get(name)
        if residuals is not None and (residuals["copy"], residuals["copies"]) == optimizer.residual_copy:
            return {**state, "topkube": {**state["topkube"], "residuals": residuals}}
        if optimizer.guard is not None:
            raise CheckpointError(
                f"the state of {name} was saved with other nodes or ranks, or by an older version of TopKube",
                cause="only the first optimizer's own weights of nodes can be divided among other nodes",
                next_step=f"resume with the nodes and ranks of before, or give {name} an algorithm without weights of"
                " nodes, such as int8",
            )
        if self._world.rank == 0:
            warn(f"what {name} had not sent yet is lost: the checkpoint was saved with other nodes or ranks")
        return state


def gather_own_samples(world: World, sampler: DistributedSampler) -> list[int]:
    """Return the `own_samples` of the samplers of all ranks, in rank order. A collective."""
    counts: list[int] = Stages(world).gather([float(sampler.own_samples)]).astype(int).reshape(-1).tolist()
    return counts
