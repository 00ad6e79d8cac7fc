"""The newest complete checkpoint of a directory, read on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.errors import CheckpointError, StorageError
from topkube.training.checkpoint.format.manifest import NAME, SHARED_FILE, name_rank_file, read_manifest
from topkube.training.checkpoint.format.state_file import Damaged, Tally, read_state
from topkube.training.checkpoint.published import PublishedCheckpoint, list_published
from topkube.training.checkpoint.residual_shares import compute_shares, recut
from topkube.training.checkpoint.retention import Retention
from topkube.training.checkpoint.save import run_in_thread
from topkube.training.checkpoint.stages import CheckpointSkipped, Stages
from topkube.training.reporting.warning import warn
from topkube.world import World


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read. `shared` is the same on all ranks; `own` holds this rank's "residuals" and, in the
    world that wrote them, random "generators"."""

    checkpoint: PublishedCheckpoint
    shared: dict[str, Any]
    own: dict[str, Any]

    @property
    def name(self) -> str:
        return self.checkpoint.name


class CheckpointReader:
    """Reads the checkpoints in `directory`. Damaged and complete checkpoints are noted in `retention`."""

    def __init__(self, directory: Path, world: World, stages: Stages, retention: Retention) -> None:
        self._directory, self._world, self._stages, self._retention = directory, world, stages, retention

    def read_newest(self, copy: int, copies: int, check: Callable[[LoadedCheckpoint], None]) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is complete and that `check` accepts; None if there is no checkpoint. All
        ranks call this together (see `CheckpointStore.load`)."""
        checkpoints = sorted(list_published(self._directory), reverse=True) if self._world.rank == 0 else []
        count = int(self._stages.gather([len(checkpoints)])[0, 0])
        for number in range(count):
            numbers = [0, 0, 0]
            if self._world.rank == 0:
                numbers = [checkpoints[number].run, checkpoints[number].step, checkpoints[number].again]
            checkpoint = PublishedCheckpoint(*(int(value) for value in self._stages.gather(numbers)[0]))
            try:
                loaded = self._read_on_all_ranks(checkpoint, copy, copies, check)
            except CheckpointSkipped as skip:
                self._retention.damaged.add(checkpoint)
                if skip.reason:
                    warn(f"{skip.reason}; going back to the previous checkpoint")
                continue
            self._retention.proven.add(checkpoint)
            return loaded
        if count:
            raise CheckpointError(
                f"none of the {count} checkpoints in {self._directory} can be read",
                cause="the files were changed or truncated after they were written",
                next_step="restore one of them, or empty the directory to train from the start",
            )
        return None

    def _read_on_all_ranks(
        self, checkpoint: PublishedCheckpoint, copy: int, copies: int, check: Callable[[LoadedCheckpoint], None]
    ) -> LoadedCheckpoint:
        """Return the checkpoint that all ranks have read. It may take hours: thousands of ranks may share storage that
        reads less per second than one of them could. Raises StorageError if no rank reads anything for the deadline of
        collectives, and as `Stages.report` does."""
        tally, what = Tally(), f"the checkpoint {self._directory / checkpoint.name} cannot be read"

        def read() -> LoadedCheckpoint:
            loaded = self._read(checkpoint, copy, copies, tally)
            check(loaded)
            return loaded

        work = run_in_thread(read)
        if not self._stages.wait(work, tally):
            tally.cancelled = True
            raise StorageError(
                f"{what}: nothing was read for {self._world.deadline_seconds:g} s",
                cause="the storage does not answer",
                next_step="check the storage, or raise TOPKUBE_DEADLINE_SECONDS",
            )
        self._stages.report(work.exception(), what)
        return work.result()

    def _read(self, checkpoint: PublishedCheckpoint, copy: int, copies: int, tally: Tally) -> LoadedCheckpoint:
        path = self._directory / checkpoint.name
        manifest = read_manifest(path)

        def read_file(name: str) -> dict[str, Any]:
            if name not in manifest.files:
                raise Damaged(f"{path / NAME} lists no file {name}")
            return read_state(path / name, manifest.files[name], tally)

        def read_residuals(rank: int) -> dict[str, Any]:
            state = read_file(name_rank_file(rank)).get("residuals")
            if not isinstance(state, dict) or not {"copy", "copies", "pieces"} <= state.keys():
                raise Damaged(f"{path / name_rank_file(rank)} holds no residuals")
            return state

        old_copies, own = manifest.number_of_copies, dict[str, Any]()
        if self._world.node_ranks == manifest.node_ranks:
            own = read_file(name_rank_file(self._world.rank))
            if old_copies in (None, copies):
                return LoadedCheckpoint(checkpoint, read_file(SHARED_FILE), own)
        old_copy_numbers = range(1) if old_copies is None else compute_shares(old_copies, copy, copies)
        saved = (read_residuals(rank) for old_copy in old_copy_numbers for rank in manifest.list_ranks(old_copy))
        return LoadedCheckpoint(checkpoint, read_file(SHARED_FILE), {**own, "residuals": recut(saved, copy, copies)})
