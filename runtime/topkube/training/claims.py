"""Which run may write to a directory of checkpoints: the one that claimed it last.

A worker whose node was lost may still be alive somewhere and go on writing, hours later. Every run claims the directory
when it starts, under the next free number, and looks before each publication whether somebody came after it. File
systems that nodes share lock unreliably, so nothing is locked: a claim is a directory that is renamed into place, which
succeeds for one only, and what a run writes carries its number, so that two runs cannot meet in one name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.errors import CheckpointError
from topkube.training.storage import sync_directory, write_text

_NAME = re.compile(r"\.run-(\d+)")
_KEPT = 16
"""Claims kept: what a late attempt must see to know that it is late."""


@dataclass(frozen=True)
class Claim:
    """`run` is the number of this run on `directory`, from 1; later runs have higher ones."""

    directory: Path
    run: int

    @classmethod
    def make(cls, directory: Path, job: str, attempt: int) -> Claim:
        """The next claim. Raises CheckpointError where a later attempt of the same job has claimed the directory, and
        OSError where it cannot be written."""
        aside = directory / f".claim-{socket.gethostname()}-{os.getpid()}.tmp"
        while True:
            claims = _claims(directory)
            for path in claims.values():
                about = _about(path)
                if about.get("job") == job and about.get("attempt", 0) > attempt:
                    raise CheckpointError(
                        f"attempt {about['attempt']} of this job works with {directory}, this is attempt {attempt}",
                        cause="this attempt was given up while it started, for example because its node was lost",
                        next_step="nothing, the later attempt goes on; for a run by hand unset TOPKUBE_ATTEMPT",
                    )
            claim = cls(directory, max(claims, default=0) + 1)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            about = {"job": job, "attempt": attempt, "host": socket.gethostname(), "time": time.time()}
            write_text(aside / "claim.json", json.dumps(about))
            try:
                aside.rename(directory / f".run-{claim.run:05d}")
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another run was faster
            sync_directory(directory)
            for old in sorted(claims)[: -(_KEPT - 1)]:
                shutil.rmtree(claims[old], ignore_errors=True)
            return claim

    def check(self) -> None:
        """Raises CheckpointError where a later run has claimed the directory."""
        claims = _claims(self.directory)
        latest = max(claims, default=self.run)
        if latest > self.run:
            about = _about(claims[latest])
            raise CheckpointError(
                f"attempt {about.get('attempt', '?')} of {about.get('job') or 'a run'} has taken over {self.directory}"
                f" (on {about.get('host', 'another host')}); nothing was written",
                cause="this run was given up, for example because its node was out of reach, or two runs share the"
                " directory",
                next_step="nothing, where the later attempt goes on; else give each run a directory of its own",
            )


def _claims(directory: Path) -> dict[int, Path]:
    return {int(found[1]): path for path in directory.glob(".run-*") if (found := _NAME.fullmatch(path.name))}


def _about(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((path / "claim.json").read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
    return {}
