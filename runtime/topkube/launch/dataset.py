"""The process beside a worker's ranks that fills the pod's cache and shows the dataset's files (`data/companion.py`).

It is a process of its own: whatever happens to it, the ranks go on, and read from the remote what is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from topkube.launch.processes import dies_with_parent
from topkube.settings import Settings

_AGAIN_SECONDS = 10.0
_END_SECONDS = 3.0
_TELL_SECONDS = 2.0
_NICENESS = 5
REPORT_FILE, _QUESTION_FILE = "dataset.json", "dataset.asked"


class DatasetProcess:
    """Runs from `look` to `end`; started again when it has died. `share=(i, n)`: this is worker i of n."""

    def __init__(self, settings: Settings, share: tuple[int, int], directory: Path) -> None:
        self._wanted = bool(settings.dataset_uri and settings.dataset_view)
        self._report = directory / REPORT_FILE
        self._command = [sys.executable, "-m", "topkube.data.companion", "--share", f"{share[0]}/{share[1]}"]
        self._question = directory / _QUESTION_FILE
        self._command += ["--runs", str(directory), "--report", str(self._report), "--asked", str(self._question)]
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = float("-inf")
        self._asked: tuple[str, float] | None = None

    def look(self) -> None:
        """Starts it where it does not run."""
        now = time.monotonic()
        if not self._wanted or (self._process is not None and self._process.poll() is None):
            return
        if now - self._begun < _AGAIN_SECONDS:
            return
        self._begun = now
        dying = dies_with_parent(signal.SIGKILL)

        def prepare() -> None:
            dying()
            os.nice(_NICENESS)

        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare
            )
        except OSError as error:
            print(f"topkube worker: {self._command[0]} cannot be run: {error.strerror}", flush=True)

    def pids(self) -> frozenset[int]:
        """What must not be taken for a rank's process."""
        return frozenset() if self._process is None else frozenset([self._process.pid])

    def said(self) -> dict[str, Any]:
        """What it last reported; empty where it has not."""
        try:
            found = json.loads(self._report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def told(self) -> bool:
        """Asks it what its cache holds now, when an attempt has ended; True once that is in its report, or it will not
        say."""
        if self._process is None or self._process.poll() is not None:
            return True
        if self._asked is None:
            self._asked = (uuid.uuid4().hex, time.monotonic())
            with contextlib.suppress(OSError):
                self._question.write_text(self._asked[0], encoding="utf-8")
        token, since = self._asked
        if self.said().get("asked") != token and time.monotonic() - since < _TELL_SECONDS:
            return False
        self._asked = None
        return True

    def end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
