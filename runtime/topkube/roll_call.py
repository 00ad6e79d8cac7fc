"""Who was absent when a collective's deadline passed, in a form that what watches over the ranks can read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RollCall:
    """What rank `rank` found out as it gave up on collective number `collective` (`what`), after waiting for
    `waited_seconds`: `missing` are the ranks that never came to it, empty where all did. `time` is Unix time."""

    rank: int
    what: str
    collective: int
    missing: list[int]
    waited_seconds: float
    time: float

    def write(self, directory: Path) -> None:
        """Leaves rank-N.roll-call.json in one piece. An error is on its way already: another does not replace it."""
        path = _path(directory, self.rank)
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")
            part.replace(path)

    @classmethod
    def read(cls, directory: Path, rank: int, since: float = 0.0) -> RollCall | None:
        """The rank's last roll call after `since` (Unix time), None where there was none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = cls(**json.loads(_path(directory, rank).read_text(encoding="utf-8")))
            return found if found.time >= since else None
        return None


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.roll-call.json"
