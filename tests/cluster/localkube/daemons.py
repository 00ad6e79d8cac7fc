"""A long-running program in a cgroup of its own, with a log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from localkube.cgroups import Group

started: list[subprocess.Popen[bytes]] = []  # by this process, which must wait for them when they end


def run(
    *command: str | Path, stdin: str | bytes | None = None, check: bool = True, env: dict[str, str] | None = None
) -> str:
    """Run a command to its end and return its output. Raises RuntimeError with the output if it fails."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([str(part) for part in command], input=data, capture_output=True, env=env)
    if check and done.returncode:
        words = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise RuntimeError(f"`{shlex.join(map(str, command))}` ended with {done.returncode}: {words[-2000:]}")
    return done.stdout.decode(errors="replace")


def wait_until(condition: Callable[[], object], what: str, seconds: float = 300.0, interval: float = 0.1) -> None:
    """Return as soon as `condition` returns a true result. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(interval)


@dataclass(frozen=True)
class Daemon:
    """A program that runs `command` in the cgroup `group` and appends its output to `log`.

    `inside` returns a prefix of the command that enters the program's namespaces. It is called at each start.
    """

    name: str
    group: Group
    log: Path
    command: Sequence[str | Path]
    inside: Callable[[], Sequence[str]] = tuple

    def start(self) -> None:
        self.group.make()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        join = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group.directory)]
        with self.log.open("ab") as log:
            line = [*join, *self.inside(), *(str(part) for part in self.command)]
            started.append(
                subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
                )
            )

    def is_alive(self) -> bool:
        return bool(self.group.list_processes())

    def kill(self) -> None:
        self.group.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    def terminate(self, seconds: float = 10.0) -> None:
        """Send SIGTERM, and SIGKILL to the processes that still run after `seconds`."""
        for process in self.group.list_processes():
            try:
                os.kill(process, signal.SIGTERM)
            except ProcessLookupError:
                continue
        try:
            wait_until(lambda: not self.is_alive(), f"{self.name} to end", seconds)
        except TimeoutError:
            self.kill()

    def read_log_tail(self, lines: int = 15) -> str:
        if not self.log.exists():
            return f"{self.name} left no log"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
