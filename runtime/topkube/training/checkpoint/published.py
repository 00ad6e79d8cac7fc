"""Published checkpoints, by their names in the directory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"step-(\d+)\.run-(\d+)(?:\.(\d+))?")
_DAMAGED = "damaged-"


@dataclass(frozen=True, order=True)
class PublishedCheckpoint:
    """A published checkpoint. A later run sorts after an earlier run, whatever the step, because a run that was given
    up may have continued for some time. `again` counts further checkpoints of the same step and run, from 1."""

    run: int
    step: int
    again: int = 0

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.run-{self.run:05d}" + (f".{self.again}" if self.again else "")

    @property
    def set_aside_name(self) -> str:
        """The name of a damaged checkpoint, which is kept for a person to examine."""
        return _DAMAGED + self.name

    @property
    def hidden_name(self) -> str:
        """The name of a checkpoint that is being removed."""
        return f".{self.name}.tmp"


def name_unfinished(step: int, run: int) -> str:
    """Return the name of the folder in which `run` writes its checkpoint of `step`."""
    return f".step-{step:08d}.run-{run:05d}.tmp"


def list_published(directory: Path) -> list[PublishedCheckpoint]:
    """Return the published checkpoints of `directory`, in no order."""
    return _parse_names(path.name for path in directory.glob("step-*"))


def find_last_run(directory: Path) -> int:
    """Return the highest run that has left a checkpoint in `directory`, damaged ones included; 0 if there is none."""
    set_aside = (path.name.removeprefix(_DAMAGED) for path in directory.glob(f"{_DAMAGED}step-*"))
    return max((checkpoint.run for checkpoint in [*list_published(directory), *_parse_names(set_aside)]), default=0)


def list_unfinished(directory: Path, run: int) -> list[Path]:
    """Return the folders of saves and removals that `run` and earlier runs did not finish."""
    folders = []
    for path in directory.glob(".step-*.tmp"):
        checkpoints = _parse_names([path.name.removeprefix(".").removesuffix(".tmp")])
        if checkpoints and checkpoints[0].run <= run:
            folders.append(path)
    return folders


def _parse_names(names: Iterable[str]) -> list[PublishedCheckpoint]:
    matches = (_NAME.fullmatch(name) for name in names)
    return [PublishedCheckpoint(int(match[2]), int(match[1]), int(match[3] or 0)) for match in matches if match]
