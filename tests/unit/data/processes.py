"""Child processes that may be killed, and volumes that may fill up, turn read-only or vanish."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def fork(run: Callable[[], object]) -> int:
    """Call `run` in a fork of this process; return its process id. The exit code is 0, or 1 after an exception."""
    process = os.fork()
    if process:
        return process
    try:
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait_for_end(process: int) -> int:
    """Wait for the fork. Return its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run_on_volume(script: str, *arguments: object) -> str:
    """Run a function of volumes.py in its own mount namespace; return its output. Skip the test if the kernel does not
    allow that."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: util-linux is not installed")
    spaces = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    tried = subprocess.run([*spaces, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"the kernel allows no mounts here: {tried.stderr.strip()}")
    command = [*spaces, sys.executable, str(HERE / "volumes.py"), script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr
