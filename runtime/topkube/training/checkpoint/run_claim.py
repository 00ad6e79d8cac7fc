"""The claim of a run on a directory of checkpoints: only the run that claimed it last may write to it.

A worker whose node was lost may still run and write hours later. Every run therefore claims the directory when it
starts, under the next free number, and checks before each publication that no later run has claimed it. Locks of file
systems that nodes share are unreliable, so a claim is a directory that is renamed into place, which succeeds for only
one run. The names of a run's files contain its number, so two runs never write to the same file.

The number is one more than the highest claim and the highest run that has published a checkpoint: claims are hidden,
and `cp -r old/* new/` does not copy them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.errors import CheckpointError
from topkube.files import create_folder, sync_directory
from topkube.training.checkpoint.format.state_file import wait_until_seen, write_new_text
from topkube.training.checkpoint.published import find_last_run

_NAME = re.compile(r"\.run-(\d+)")
_KEPT = 16
"""The number of claims that are kept, so that a late attempt can see later claims."""


@dataclass(frozen=True)
class Claim:
    """The claim of a run on `directory`. `run` is the number of the run, from 1; later runs have higher numbers. `time`
    is the Unix time of the claim."""

    directory: Path
    run: int
    time: float

    @classmethod
    def make(cls, directory: Path, job: str, attempt: int) -> Claim:
        """Return the next claim. Raises CheckpointError if a later attempt of the same job has claimed the directory,
        and OSError if the directory cannot be written."""
        while True:
            claims = _list_claims(directory)
            for path in claims.values():
                about = _read_claim(path)
                if about.get("job") == job and about.get("attempt", 0) > attempt:
                    raise CheckpointError(
                        f"attempt {about['attempt']} of this job uses {directory}, and this is attempt {attempt}",
                        cause="this attempt was given up while it started, for example because its node was lost",
                        next_step="nothing: the later attempt continues; for a run by hand unset TOPKUBE_ATTEMPT",
                    )
            claim = cls(directory, max([*claims, find_last_run(directory)]) + 1, time.time())
            about = {"job": job, "attempt": attempt, "host": socket.gethostname(), "time": claim.time}
            try:
                with create_folder(claim._path) as part:
                    part.mkdir()
                    write_new_text(part / "claim.json", json.dumps(about))
            except FileExistsError:
                continue  # another run was faster
            sync_directory(directory)
            for old in sorted(claims)[: -(_KEPT - 1)]:
                shutil.rmtree(claims[old], ignore_errors=True)
            return claim

    @property
    def _path(self) -> Path:
        return self.directory / f".run-{self.run:05d}"

    def await_sight(self) -> None:
        """Wait until this rank sees the claim that another rank has made. Raises CheckpointError after
        state_file.SEEN_WITHIN_SECONDS: the directory is another one on this rank's node."""
        if not wait_until_seen(lambda: _read_claim(self._path).get("time") == self.time, self.directory):
            raise CheckpointError(
                f"{socket.gethostname()} does not see what rank 0 has written to {self.directory}",
                cause="the directory is not the same on all nodes: each node has a disk of its own there",
                next_step="use storage that all nodes share (a ReadWriteMany volume)",
            )

    def check(self) -> None:
        """Raise CheckpointError if a later run has claimed the directory."""
        claims = _list_claims(self.directory)
        latest = max(claims, default=self.run)
        if latest > self.run:
            about = _read_claim(claims[latest])
            raise CheckpointError(
                f"attempt {about.get('attempt', '?')} of {about.get('job') or 'a run'} has taken over {self.directory}"
                f" (on {about.get('host', 'another host')}); nothing was written",
                cause="this run was given up, for example because its node was unreachable, or two runs use the same"
                " directory",
                next_step="nothing, if the later attempt continues; otherwise use a separate directory for each run",
            )


def _list_claims(directory: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in directory.glob(".run-*") if (match := _NAME.fullmatch(path.name))}


def _read_claim(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((path / "claim.json").read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
    return {}
