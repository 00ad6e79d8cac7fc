"""The process beside a worker's ranks that fills the pod's cache and shows the dataset's files (`data/companion.py`).

It is a separate process, so that the ranks continue if it fails. The ranks then read the missing samples from the
remote store.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topkube.environment import copy_environment
from topkube.launch.host.processes import prepare_to_die_with_parent
from topkube.settings import Settings

_RESTART_SECONDS = 10.0
"""The shortest time between two starts of the process."""
_END_SECONDS = 3.0
"""The time that the process has to end after SIGTERM."""
_ANSWER_SECONDS = 2.0
"""The longest wait for the last report of an attempt."""
_FIRST_ANSWER_SECONDS = 10.0
"""The longest time from the start of the process to its first report: on a busy node, the start takes some seconds."""
_NICENESS = 5
"""The process runs at a lower priority than the ranks."""
REPORT_FILE, _REQUEST_FILE = "dataset.json", "dataset.asked"


class DatasetProcess:
    """The dataset process of a worker, from `start_if_needed` to `end`. It is started again if it has died. `share` is
    (i, n) for worker i of n; `say` prints a line."""

    def __init__(self, settings: Settings, share: tuple[int, int], directory: Path, say: Callable[[str], None]) -> None:
        self._say, self._job_uid = say, settings.job_uid
        self._is_wanted = bool(settings.dataset_uri and settings.dataset_view)
        self._report = directory / REPORT_FILE
        # -P: modules in the working directory, such as the job's source, must not replace those of the companion.
        self._command = [sys.executable, "-P", "-m", "topkube.data.companion", "--share", f"{share[0]}/{share[1]}"]
        self._request_file = directory / _REQUEST_FILE
        self._command += ["--runs", str(directory), "--report", str(self._report), "--asked", str(self._request_file)]
        self._process: subprocess.Popen[bytes] | None = None
        self._start_time = float("-inf")
        self._request: tuple[str, float] | None = None

    def start_if_needed(self) -> None:
        """Start the process if it does not run and the job has a dataset."""
        now = time.monotonic()
        if not self._is_wanted or (self._process is not None and self._process.poll() is None):
            return
        if now - self._start_time < _RESTART_SECONDS:
            return
        self._start_time = now
        set_death_signal = prepare_to_die_with_parent(signal.SIGKILL)

        def prepare() -> None:
            set_death_signal()
            os.nice(_NICENESS)

        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=prepare,
                env={**copy_environment(), "TOPKUBE_JOB_UID": self._job_uid},
            )
        except OSError as error:
            self._say(f"{self._command[0]} cannot be run: {error.strerror}")

    def list_pids(self) -> frozenset[int]:
        """Return the process ids that do not belong to ranks."""
        return frozenset() if self._process is None else frozenset([self._process.pid])

    def read_report(self) -> dict[str, Any]:
        """Return the last report of the process; empty if there is none."""
        try:
            report = json.loads(self._report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def has_final_report(self) -> bool:
        """Return True if the report is younger than the end of the attempt. The first call asks for a report. Without
        an answer, the method returns True after `_ANSWER_SECONDS`; or if the process has never reported,
        `_FIRST_ANSWER_SECONDS` after its start at the earliest."""
        if self._process is None or self._process.poll() is not None:
            return True
        if self._request is None:
            self._request = (uuid.uuid4().hex, time.monotonic())
            with contextlib.suppress(OSError):
                self._request_file.write_text(self._request[0], encoding="utf-8")
        token, since = self._request
        report, deadline = self.read_report(), since + _ANSWER_SECONDS
        if not report:
            deadline = max(deadline, self._start_time + _FIRST_ANSWER_SECONDS)
        if report.get("asked") != token and time.monotonic() < deadline:
            return False
        self._request = None
        return True

    def end(self) -> None:
        """End the process, if it runs: with SIGTERM, and after a few seconds with SIGKILL."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
