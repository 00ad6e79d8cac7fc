"""A group of processes in a cgroup, which starts, lists and kills them.

The kernel gives the number of an ended process to a new process, so a number alone does not identify a process of the
cluster. But a process stays in its cgroup, and all that a daemon or a pod starts is in the same cgroup. So after an
interrupted run, the cgroup lists every process of the cluster and no other process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@cache
def list_hierarchies() -> tuple[Path, ...]:
    """Return the mounted cgroup hierarchies, the freezer's first (v1), or the unified hierarchy (v2)."""
    if (ROOT / "cgroup.controllers").exists():
        return (ROOT,)
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    directories = sorted({Path(directory) for _, directory, kind, *_ in mounts if kind == "cgroup"})
    if (ROOT / "freezer") not in directories:
        raise RuntimeError(
            "no cgroup hierarchy with the freezer is mounted. Next: run on a machine with cgroups, as root"
        )
    return (ROOT / "freezer", *(hierarchy for hierarchy in directories if hierarchy != ROOT / "freezer"))


@dataclass(frozen=True)
class Group:
    """The cgroup `path` (relative, e.g. 'topkube0/node1') in every hierarchy."""

    path: str

    def __truediv__(self, name: str) -> Group:
        return Group(f"{self.path}/{name}")

    @property
    def directory(self) -> Path:
        """The folder that lists the members; under v1, in the freezer's hierarchy."""
        return list_hierarchies()[0] / self.path

    def make(self) -> None:
        """Create the group and the groups above it. Under v2, the groups above delegate every controller."""
        for hierarchy in list_hierarchies():
            parent = hierarchy
            for part in Path(self.path).parts:
                control = parent / "cgroup.subtree_control"
                if control.exists() and (parent / "cgroup.controllers").exists():
                    for controller in (parent / "cgroup.controllers").read_text().split():
                        control.write_text(f"+{controller}")
                child = parent / part
                child.mkdir(exist_ok=True)
                if hierarchy.name == "cpuset":  # a new cpuset is empty and takes no process
                    for file in ("cpuset.cpus", "cpuset.mems"):
                        if not (child / file).read_text().strip():
                            (child / file).write_text((parent / file).read_text())
                parent = child

    def list_subgroups(self) -> Iterator[Group]:
        """Yield this group and all groups below it, deepest first."""
        for folder, _, _ in os.walk(self.directory, topdown=False):
            yield Group(str(Path(folder).relative_to(list_hierarchies()[0])))

    def list_processes(self) -> set[int]:
        """Return the process ids of the group and of all groups below it."""
        numbers: set[int] = set()
        for group in self.list_subgroups():
            try:
                numbers |= {int(line) for line in (group.directory / "cgroup.procs").read_text().split()}
            except OSError:  # removed meanwhile
                continue
        return numbers

    def freeze(self) -> None:
        self._set_frozen("FROZEN", "1")

    def thaw(self) -> None:
        self._set_frozen("THAWED", "0")

    def _set_frozen(self, v1: str, v2: str) -> None:
        for file, word in (("freezer.state", v1), ("cgroup.freeze", v2)):
            if (self.directory / file).exists():
                (self.directory / file).write_text(word)

    def kill(self, seconds: float = 60.0) -> None:
        """Send SIGKILL to every process of the group. They are frozen first, so that no process sees the end of
        another."""
        deadline = time.monotonic() + seconds
        while self.list_processes():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"processes {sorted(self.list_processes())} of cgroup {self.path} outlive SIGKILL for {seconds} s"
                )
            self.freeze()
            for process in self.list_processes():
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.thaw()
            reap_started()
            time.sleep(0.02)

    def remove(self, seconds: float = 60.0) -> None:
        """Kill the processes of the group, and remove the group and its subgroups from every hierarchy."""
        self.kill(seconds)
        deadline = time.monotonic() + seconds
        for hierarchy in list_hierarchies():
            for folder, _, _ in os.walk(hierarchy / self.path, topdown=False):
                while True:
                    try:
                        Path(folder).rmdir()
                    except FileNotFoundError:
                        pass
                    except OSError:  # the last process has not ended yet
                        if time.monotonic() > deadline:
                            raise
                        reap_started()
                        time.sleep(0.02)
                        continue
                    break


def reap_started() -> None:
    """Wait for killed processes that this process started. Until then, their cgroup cannot be removed."""
    from localkube.daemons import started

    for process in started:
        process.poll()
