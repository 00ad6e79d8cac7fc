"""The removal of old checkpoints.

A checkpoint is removed only if there are `keep` newer checkpoints that this run has written, or has read completely; or
twice as many that look whole, because runs that are preempted after every save would otherwise fill the disk. Damaged
checkpoints are kept under another name. Checkpoints that this version cannot read stay as they are.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from topkube.training.checkpoint.format.manifest import has_all_files, is_manifest_readable
from topkube.training.checkpoint.published import PublishedCheckpoint, list_published, list_unfinished
from topkube.training.reporting.warning import warn


class Retention:
    """The checkpoints that a run keeps: `proven` holds those that it has written or read, `damaged` those that are
    damaged. Rank 0 uses it."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.proven: set[PublishedCheckpoint] = set()
        self.damaged: set[PublishedCheckpoint] = set()
        self._directory, self._keep = directory, keep
        self._written: set[PublishedCheckpoint] = set()
        self._reported: set[PublishedCheckpoint] = set()
        self._whole: dict[PublishedCheckpoint, bool] = {}
        """If checkpoints of earlier runs looked whole when this run examined them."""

    def note_written(self, checkpoint: PublishedCheckpoint) -> None:
        """Note a checkpoint that this run has published."""
        self._written.add(checkpoint)
        self.proven.add(checkpoint)

    def apply(self, note_progress: Callable[[], None] = lambda: None) -> None:
        """Rename damaged checkpoints and remove superseded checkpoints. If that fails, print a warning. Calls
        `note_progress` after each file that is removed."""
        checkpoints = list_published(self._directory)
        for checkpoint in self.damaged.intersection(checkpoints):
            self._set_aside(checkpoint)
        self.proven.intersection_update(checkpoints)
        others = sorted(set(checkpoints) - self.damaged)
        if not others:
            return
        oldest_kept = self._find_oldest_kept(others)
        for checkpoint in others:
            if checkpoint < oldest_kept and (checkpoint in self._written or self._can_read(checkpoint)):
                self._remove(checkpoint, note_progress)

    def _find_oldest_kept(self, checkpoints: Sequence[PublishedCheckpoint]) -> PublishedCheckpoint:
        """Return the checkpoint, of `checkpoints` from the oldest on, of which those before are superseded."""
        if len(self.proven) >= self._keep:
            return sorted(self.proven)[-self._keep]
        if len(checkpoints) > 2 * self._keep:
            whole = [checkpoint for checkpoint in checkpoints if self._looks_whole(checkpoint)]
            if len(whole) >= 2 * self._keep:
                return whole[-2 * self._keep]
        return checkpoints[0]

    def _looks_whole(self, checkpoint: PublishedCheckpoint) -> bool:
        if checkpoint not in self._whole:
            is_proven = checkpoint in self.proven
            self._whole[checkpoint] = is_proven or has_all_files(self._directory / checkpoint.name)
        return self._whole[checkpoint]

    def sweep(self, run: int, current: Path) -> None:
        """Remove the folders that unfinished saves and removals of `run` and earlier runs have left, except
        `current`."""
        for folder in list_unfinished(self._directory, run):
            if folder != current:
                shutil.rmtree(folder, ignore_errors=True)

    def _can_read(self, checkpoint: PublishedCheckpoint) -> bool:
        if checkpoint not in self._reported and not is_manifest_readable(self._directory / checkpoint.name):
            self._reported.add(checkpoint)
            warn(f"the old checkpoint {self._directory / checkpoint.name} stays: this version cannot read its manifest")
        return checkpoint not in self._reported

    def _set_aside(self, checkpoint: PublishedCheckpoint) -> None:
        path = self._directory / checkpoint.name
        try:
            path.rename(self._directory / checkpoint.set_aside_name)
        except OSError as error:
            if checkpoint not in self._reported:
                warn(f"the damaged checkpoint {path} cannot be renamed: {error.strerror}")
            self._reported.add(checkpoint)
            return
        self.damaged.discard(checkpoint)
        warn(f"the damaged checkpoint {path} is kept as {checkpoint.set_aside_name}; remove it when you do not need it")

    def _remove(self, checkpoint: PublishedCheckpoint, note_progress: Callable[[], None]) -> None:
        """Rename the checkpoint to a hidden name, then remove it: a published checkpoint without some of its
        files would look damaged."""
        path, hidden = self._directory / checkpoint.name, self._directory / checkpoint.hidden_name
        try:
            path.rename(hidden)
        except OSError as error:
            warn(f"the old checkpoint {path} cannot be removed: {error.strerror}")
            return
        with contextlib.suppress(OSError):
            for file in hidden.iterdir():
                file.unlink()
                note_progress()
        shutil.rmtree(hidden, ignore_errors=True)
