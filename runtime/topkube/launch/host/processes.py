"""The processes of Linux: descendants, signals, and the removal of ended orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def prepare_to_die_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
    """Return a function for a child process to call (Popen's `preexec_fn`): it makes the kernel send the child signal
    `number` when `parent` (default: this process) ends."""
    parent = os.getpid() if parent is None else parent

    def set_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent has ended already
            os._exit(128 + number)

    return set_signal


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, so that `list_descendants` still finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def list_descendants(root: int | None = None, but: frozenset[int] = frozenset()) -> list[int]:
    """Return the living processes below `root` (default: this process), parents first, without those in `but` and their
    descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (name, which may hold anything) state ppid …
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in ("Z", "X"):
                    children.setdefault(int(parent), []).append(int(entry.name))
    pids, frontier = list[int](), [os.getpid() if root is None else root]
    while frontier:
        frontier = [pid for parent in frontier for pid in children.get(parent, []) if pid not in but]
        pids += frontier
    return pids


def list_children(parent: int) -> list[int]:
    """Return the living direct children of `parent`."""
    try:
        listed = [(task / "children").read_text().split() for task in Path(f"/proc/{parent}/task").iterdir()]
    except OSError:
        return []
    return [int(pid) for pids in listed for pid in pids]


def find_parent(pid: int) -> int:
    """Return the parent's process id; 0 if there is no process `pid`."""
    try:
        return int(_read_stat(pid)[1])
    except OSError:
        return 0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, by its id and the time of its start (clock ticks since the boot). Another process may get the same id
    later, but not with the same time."""

    pid: int
    started: int

    @classmethod
    def find(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a living process. Raises OSError if there is none."""
        return cls(pid, int(_read_stat(pid)[19]))

    def is_alive(self) -> bool:
        """Return True if the process runs."""
        try:
            fields = _read_stat(self.pid)
        except OSError:
            return False
        return fields[0] not in ("Z", "X") and int(fields[19]) == self.started


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may hold anything: the state, the parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to all processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(but: frozenset[int] = frozenset(), seconds: float = 5.0) -> list[int]:
    """Kill every process below this process, except `but`. Return the processes that could not be killed, because they
    wait in the kernel. The function repeats, because a process may fork meanwhile."""
    end = time.monotonic() + seconds
    while (survivors := list_descendants(but=but)) and time.monotonic() < end:
        signal_all(survivors, signal.SIGKILL)
        reap_orphans(but)
        time.sleep(0.01)
    return survivors


def reap_orphans(but: frozenset[int] = frozenset()) -> None:
    """Collect the exit codes of orphans that this process has adopted, except `but`: its own children, for which other
    code waits."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in but:
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    os.waitpid(int(entry.name), os.WNOHANG)
