"""`topkube run` for a local job: `python -m topkube.sdk.local_run PID STARTED …`. It ends its ranks when the process
that started the job is gone, also if that process was killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from topkube.cli.entry import run_app
from topkube.launch.host.processes import ProcessIdentity

_CHECK_SECONDS = 1.0


def build_command(arguments: list[str]) -> list[str]:
    """Return the command of `topkube run` with these arguments for a job of this process."""
    owner = ProcessIdentity.find(os.getpid())
    return [sys.executable, "-P", "-m", __name__, str(owner.pid), str(owner.started), *arguments]


def main(arguments: list[str]) -> int:
    """Run `topkube run` with the arguments after the owner's two numbers. Return its exit code."""
    owner = ProcessIdentity(int(arguments[0]), int(arguments[1]))
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    return run_app(["run", *arguments[2:]])


def _end_with(owner: ProcessIdentity) -> None:
    """Wait until `owner` has ended. Then ask this process to end: its ranks save a checkpoint first."""
    while owner.is_alive():
        time.sleep(_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
