"""The ranks that were missing when a collective's deadline passed, in a file that other processes can read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from topkube.files import write_json


@dataclass(frozen=True)
class RollCall:
    """The result of rank `rank`'s search for missing ranks, after it waited `waited_seconds` in collective number
    `collective` (`what`). `missing` holds the ranks that never entered it, and is empty if all did. `time` is Unix
    time."""

    rank: int
    what: str
    collective: int
    missing: list[int]
    waited_seconds: float
    time: float

    def write(self, directory: Path) -> None:
        """Write rank-N.roll-call.json atomically. Errors of the disk are ignored: the timeout is about to be raised."""
        with contextlib.suppress(OSError):
            write_json(_find_path(directory, self.rank), dataclasses.asdict(self))

    @classmethod
    def read(cls, directory: Path, rank: int, since: float = 0.0) -> RollCall | None:
        """Return the rank's last roll call after `since` (Unix time); None if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            roll_call = cls(**json.loads(_find_path(directory, rank).read_text(encoding="utf-8")))
            return roll_call if roll_call.time >= since else None
        return None


def _find_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.roll-call.json"
