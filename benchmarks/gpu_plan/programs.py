"""Programs that run until they end, or are killed with all their children when their time is over."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress


def run_group(
    command: list[str], seconds: float, environment: dict[str, str] | None = None, capture: bool = False
) -> tuple[int | None, str]:
    """Run a command in a process group of its own. Return its exit status, None if it ran too long, and its output if
    `capture` is set. Kill the whole group at the end: a profiler's children outlive the profiler."""
    output = subprocess.PIPE if capture else None
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT if capture else None, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=max(seconds, 0))
        return process.returncode, (text or b"").decode(errors="replace")
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
