"""Processes as Linux sees them: who descends from whom, and how none of them is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def dies_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
    """To be called in a child (Popen's `preexec_fn`): it gets signal `number` when `parent` (default: this process)
    ends."""
    parent = os.getpid() if parent is None else parent

    def set_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(128 + number)

    return set_signal


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that `descendants` still finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None, but: frozenset[int] = frozenset()) -> list[int]:
    """Living processes below `root` (default: this process), parents first; those in `but` and below are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (name, which may hold anything) state ppid …
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, frontier = list[int](), [os.getpid() if root is None else root]
    while frontier:
        frontier = [pid for parent in frontier for pid in children.get(parent, []) if pid not in but]
        found += frontier
    return found


def children(parent: int) -> list[int]:
    """Living direct children of `parent`."""
    try:
        listed = [(task / "children").read_text().split() for task in Path(f"/proc/{parent}/task").iterdir()]
    except OSError:
        return []
    return [int(pid) for pids in listed for pid in pids]


def parent_of(pid: int) -> int:
    """0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(but: frozenset[int] = frozenset(), seconds: float = 5.0) -> list[int]:
    """Kills everything below this process; returns what could not be killed (stuck in the kernel). A process can fork
    while we
    look, hence the loop."""
    end = time.monotonic() + seconds
    while (left := descendants(but=but)) and time.monotonic() < end:
        signal_all(left, signal.SIGKILL)
        reap_orphans(but)
        time.sleep(0.01)
    return left


def reap_orphans(but: frozenset[int] = frozenset()) -> None:
    """Takes the exit codes of ended orphans that this process adopted. `but` are its own children, which others wait
    for."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in but:
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    os.waitpid(int(entry.name), os.WNOHANG)
