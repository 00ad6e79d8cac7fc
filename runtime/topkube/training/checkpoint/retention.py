"""The removal of old checkpoints.

A checkpoint is removed only if there are `keep` newer checkpoints that this run has written, or has read completely.
Damaged checkpoints are kept under another name. Checkpoints that this version cannot read stay as they are.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from topkube.training.checkpoint.format.manifest import is_whole
from topkube.training.checkpoint.place import Place, list_published, list_unfinished


class Retention:
    """The checkpoints that a run keeps: `proven` holds those that it has written or read, `damaged` those that are
    damaged. Rank 0 uses it."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.proven: set[Place] = set()
        self.damaged: set[Place] = set()
        self._directory, self._keep = directory, keep
        self._written: set[Place] = set()
        self._left: set[Place] = set()

    def note_written(self, place: Place) -> None:
        """Note a checkpoint that this run has published."""
        self._written.add(place)
        self.proven.add(place)

    def apply(self) -> None:
        """Rename damaged checkpoints and remove superseded checkpoints. If that fails, print a warning."""
        places = list_published(self._directory)
        for place in self.damaged.intersection(places):
            self._set_aside(place)
        self.proven.intersection_update(places)
        kept = sorted(self.proven)[-self._keep :]
        if len(kept) < self._keep:
            return
        for place in sorted(set(places) - self.damaged):
            if place < kept[0] and (place in self._written or self._is_ours(place)):
                self._remove(place)

    def sweep(self, run: int, current: Path) -> None:
        """Remove the folders that unfinished saves and removals of `run` and earlier runs have left, except
        `current`."""
        for folder in list_unfinished(self._directory, run):
            if folder != current:
                shutil.rmtree(folder, ignore_errors=True)

    def _is_ours(self, place: Place) -> bool:
        if place not in self._left and not is_whole(self._directory / place.name):
            self._left.add(place)
            warn(f"the old checkpoint {self._directory / place.name} stays: this version cannot read its manifest")
        return place not in self._left

    def _set_aside(self, place: Place) -> None:
        path = self._directory / place.name
        try:
            path.rename(self._directory / place.set_aside)
        except OSError as error:
            if place not in self._left:
                warn(f"the damaged checkpoint {path} cannot be renamed: {error.strerror}")
            self._left.add(place)
            return
        self.damaged.discard(place)
        warn(f"the damaged checkpoint {path} is kept as {place.set_aside}; remove it when you do not need it")

    def _remove(self, place: Place) -> None:
        """Rename the checkpoint to a hidden name, then remove it: a half-removed checkpoint would look damaged."""
        path, hidden = self._directory / place.name, self._directory / place.hidden
        try:
            path.rename(hidden)
        except OSError as error:
            warn(f"the old checkpoint {path} cannot be removed: {error.strerror}")
            return
        shutil.rmtree(hidden, ignore_errors=True)


def warn(text: str) -> None:
    """Print a warning."""
    print(f"topkube: warning: {text}", file=sys.stderr, flush=True)
