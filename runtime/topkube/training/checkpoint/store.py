"""Checkpoints in a directory that all ranks share. A checkpoint is written to a temporary folder and published by a
rename, so that there is always a complete checkpoint.

`DIRECTORY/step-00000500.run-00002/` holds `shared.pt` (model, optimizer, sampler: rank 0's), `rank-00000.pt` for every
rank (its residuals and random generators) and `checkpoint.json`, which is written last (`format/manifest.py`). The
number of the run comes from its claim (`run_claim.py`), so no run overwrites the checkpoints of another. If a
checkpoint is damaged, the previous checkpoint is loaded.

A save has three stages, all in threads beside training. Rank 0 makes the folder, every rank writes its files, and rank
0 publishes the checkpoint; each stage begins when all ranks have agreed that the previous one is done. Ranks agree only
at the ends of steps, so that the order of collectives is the same on all ranks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from topkube.errors import CheckpointError, StorageError
from topkube.files import sync_directory
from topkube.training.checkpoint.format.encoding import encode
from topkube.training.checkpoint.format.manifest import NAME, SHARED_FILE, Manifest, name_rank_file
from topkube.training.checkpoint.format.state_file import FileDigest, Tally, write_new_text
from topkube.training.checkpoint.host_copies import HostCopies
from topkube.training.checkpoint.published import PublishedCheckpoint, list_published, name_unfinished
from topkube.training.checkpoint.reader import CheckpointReader, LoadedCheckpoint
from topkube.training.checkpoint.retention import Retention
from topkube.training.checkpoint.run_claim import Claim
from topkube.training.checkpoint.save import Save, await_files
from topkube.training.checkpoint.stages import Stages
from topkube.world import World


class CheckpointStore:
    """The checkpoints in a directory. All ranks call every method together. A failure on one rank raises an error on
    all ranks."""

    def __init__(self, directory: Path, keep: int, world: World, job: str = "", attempt: int = 1) -> None:
        self.directory = directory
        self._world, self._job, self._attempt = world, job, attempt
        self._stages = Stages(world)
        self._lead = world.rank == 0
        self._claim: Claim | None = None
        self._run = 0
        self._retention = Retention(directory, keep)
        self._reader = CheckpointReader(directory, world, self._stages, self._retention)
        self._copies = HostCopies()
        self._save: Save | None = None
        self._hung: Future[Any] | None = None
        """This rank's part of a save that was given up, because the storage did not answer."""
        self._copy = world.rank, world.size
        """The number of the residual copy in the current save, and the number of copies in the world."""

    def claim(self) -> None:
        """Claim the directory: from now on this run writes to it, and no earlier run does. Raises CheckpointError, also
        if not all ranks see the same directory."""
        what = f"the checkpoint directory {self.directory} cannot be used"

        def take() -> None:
            if self._lead:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._claim = Claim.make(self.directory, self._job, self._attempt)

        self._stages.run(take, what)
        own = self._claim or Claim(self.directory, 0, 0.0)
        run, made_at = self._stages.gather([own.run, own.time])[0]
        self._run = int(run)
        self._stages.run(Claim(self.directory, self._run, float(made_at)).await_sight, what)

    def run_on_all_ranks(self, stage: Callable[[], None], what: str) -> None:
        """Run a stage on every rank. Raises CheckpointError on all ranks if it fails on one: "`what`: why"."""
        self._stages.run(stage, what)

    # ---- reading

    def load(
        self, copy: int, copies: int, check: Callable[[LoadedCheckpoint], None] = lambda loaded: None
    ) -> LoadedCheckpoint | None:
        """Return the newest complete checkpoint; None if there is no checkpoint. If the world or the number of copies
        has changed, `own` holds residuals that are redistributed for copy number `copy` of `copies`, and no random
        generators. `check` raises Damaged for invalid contents.

        Warns of each damaged checkpoint. Raises CheckpointError if all checkpoints are damaged, if a checkpoint cannot
        be read at the moment, or if a newer TopKube wrote the newest checkpoint.
        """
        return self._reader.read_newest(copy, copies, check)

    # ---- writing

    @property
    def is_saving(self) -> bool:
        """True while a save is in progress."""
        return self._save is not None

    @property
    def is_stage_done(self) -> bool:
        """True if a save is in progress and this rank has finished its part of the stage. When that is true on all
        ranks, all ranks call `advance`."""
        return self._save is not None and self._save.work.done()

    def begin(self, step: int, shared: Callable[[], dict[str, Any]], own: dict[str, Any]) -> bool:
        """Begin to save `step`. No other save may be in progress. `shared` is called on rank 0; the tensors of `own`
        must be copies already. Return True if the result of `shared` is copied, so that training may change it. If host
        memory has no room for the copies, return False: `finish` must follow at once. Earlier checkpoints stay until
        the new checkpoint is published. Raises CheckpointError if a state cannot be saved, with the path of its key,
        and StorageError if an earlier save still hangs (training may continue): nothing is written then."""
        assert self._save is None, "one save at a time"
        states: dict[str, Any] = {}
        copied, problem = True, None

        def prepare() -> bool:
            if self._hung is not None and not self._hung.done():
                raise StorageError(
                    "the write of an earlier checkpoint still hangs",
                    cause="the storage does not answer",
                    next_step="check the storage; training continues",
                )
            self._hung = None
            states[name_rank_file(self._world.rank)] = encode(own)
            if not self._lead:
                return True
            states[SHARED_FILE], is_copied = self._copies.encode(shared())
            return is_copied

        try:
            copied = prepare()
        except Exception as error:
            problem = error
        rows = self._stages.report(problem, self._describe_failure(step), [copied])
        residuals = own.get("residuals", {})
        self._copy = residuals.get("copy", self._world.rank), residuals.get("copies", self._world.size)
        folder = self.directory / name_unfinished(step, self._run)
        self._save = Save.begin(step, folder, states, (lambda tally: self._open(folder, tally)) if self._lead else None)
        return bool(rows.all())

    def advance(self) -> int | None:
        """Start the next stage of the save, after all ranks have finished the current stage. Return its step if it is
        now published, else None. If a rank has failed, the save is over: raises StorageError if the storage failed
        (training may continue), else CheckpointError, also if a later run has claimed the directory."""
        save = self._save
        assert save is not None, "there is a save in progress"
        try:
            if save.stage == "writing":
                manifest = self._build_manifest(save)
                save.publish((lambda: self._publish(save, manifest)) if self._lead else None)
                return None
            self._stages.report(save.work.exception(), self._describe_failure(save.step))
        except CheckpointError:
            self._save = None
            self._remove(save.folder)
            raise
        if save.stage == "opening":
            save.write(lambda: self._sweep(save.folder))
            return None
        self._save = None
        return save.step

    def finish(self) -> int | None:
        """Wait for the save in progress, if there is one, and return its step when it is published. Raises as `advance`
        does, and StorageError if no rank writes anything for the deadline of collectives."""
        published_step = None
        while self._save is not None:
            self._wait(self._save)
            published_step = self.advance()
        return published_step

    def save(self, step: int, shared: Callable[[], dict[str, Any]], own: dict[str, Any]) -> None:
        """Publish a checkpoint of `step`, and wait for it. Raises as `begin` and `finish` do."""
        self.begin(step, shared, own)
        self.finish()

    def abandon(self, seconds: float = 5.0) -> None:
        """Give up the save in progress, on this rank only: its program ends with an error. Waits for the end of its
        thread for at most `seconds`."""
        if self._save is not None:
            self._save.tally.cancelled = True
            wait([self._save.work], seconds)

    def _describe_failure(self, step: int) -> str:
        return f"the checkpoint of step {step} could not be written to {self.directory}"

    def _build_manifest(self, save: Save) -> Manifest:
        """Return the manifest of the files that all ranks have written. Raises as `advance` does if a rank has
        failed."""
        problem, own = save.work.exception(), save.written.get(name_rank_file(self._world.rank), FileDigest(0, 0))
        numbers = (own.bytes, own.digest >> 32, own.digest & 0xFFFFFFFF, *self._copy)
        rows = self._stages.report(problem, self._describe_failure(save.step), numbers).astype(int).tolist()
        files = {name_rank_file(rank): FileDigest(row[0], row[1] << 32 | row[2]) for rank, row in enumerate(rows)}
        if self._lead:
            files[SHARED_FILE] = save.written[SHARED_FILE]
        return Manifest(self._world.node_ranks, files, tuple(row[3] for row in rows), rows[0][4])

    def _open(self, folder: Path, tally: Tally) -> None:
        """Make the folder of a save, on rank 0 in the thread of the save."""
        assert self._claim is not None, "claim() comes first"
        self._claim.check()
        shutil.rmtree(folder, ignore_errors=True)
        tally.count(1)
        folder.mkdir()

    def _sweep(self, current: Path) -> None:
        """Remove what earlier saves have left, on rank 0 in the thread of the save."""
        if self._lead:
            self._retention.sweep(self._run, current)

    def _publish(self, save: Save, manifest: Manifest) -> None:
        """Publish the checkpoint, on rank 0 in the thread of the save."""
        assert self._claim is not None
        await_files(save.folder, manifest.files)
        write_new_text(save.folder / NAME, manifest.format_text(save.step, self._job, self._attempt, time.time()))
        sync_directory(save.folder)
        self._claim.check()
        run, step = self._run, save.step
        earlier = [other.again for other in list_published(self.directory) if (other.run, other.step) == (run, step)]
        checkpoint = PublishedCheckpoint(run, step, 1 + max(earlier, default=-1))
        save.folder.rename(self.directory / checkpoint.name)
        sync_directory(self.directory)
        self._retention.note_written(checkpoint)
        self._retention.apply(lambda: save.tally.count(1))

    def _wait(self, save: Save) -> None:
        """Wait until the stage is done on all ranks. Raises StorageError on all ranks if no rank writes anything for
        the deadline of collectives."""
        if self._stages.wait(save.work, save.tally):
            return
        self._save, self._hung = None, save.work
        save.tally.cancelled = True
        failure = StorageError(
            f"{self._describe_failure(save.step)}: nothing was written for {self._world.deadline_seconds:g} s",
            cause="the storage does not answer",
            next_step="check the storage, or raise TOPKUBE_DEADLINE_SECONDS",
        )
        failure.is_of_others = save.work.done()
        raise failure

    def _remove(self, folder: Path) -> None:
        if self._lead:
            shutil.rmtree(folder, ignore_errors=True)  # an unfinished checkpoint would fill the disk
