"""The lines of `topkube doctor` about this machine: processor, memory, shared memory, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from topkube.cli.doctor.check import Check, report_ok
from topkube.processors import count_cores
from topkube.telemetry.bar import format_bytes

_LEAST_MEMORY, _LEAST_DISK = 2 << 30, 1 << 30
_LEAST_SHARED = 64 << 20


def check_processor() -> Iterator[Check]:
    """Report the processor, its cores and the vector extensions that the kernels can use."""
    info = Path("/proc/cpuinfo").read_text()
    flags = next((line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    vector_flags = [
        flag for flag in ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16") if flag in flags
    ]
    yield report_ok(
        "processor", f"{model}, {count_cores()} cores; {' '.join(vector_flags) or 'no vector extensions known'}"
    )


def check_memory() -> Iterator[Check]:
    """Report the memory that is available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, total = 1024 * kilobytes["MemAvailable"], 1024 * kilobytes["MemTotal"]
    state: Literal["ok", "warn"] = "ok" if free > _LEAST_MEMORY else "warn"
    step = "" if state == "ok" else "close other programs, or train with fewer ranks"
    yield Check("memory", state, f"{format_bytes(free)} of {format_bytes(total)} available", step)


def check_shared_memory() -> Iterator[Check]:
    """Report the free space of /dev/shm, through which the ranks of a node share memory."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield Check("/dev/shm", "fail", "not writable: ranks of one node cannot share memory", "mount a tmpfs there")
        return
    usage = shutil.disk_usage(shared)
    if usage.free <= _LEAST_SHARED:
        text = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free: large shared windows end in SIGBUS"
        yield Check("/dev/shm", "warn", text, "docker run --shm-size=1g, or a memory-backed emptyDir at /dev/shm")
        return
    yield report_ok("/dev/shm", f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free, writable")


def check_disk() -> Iterator[Check]:
    """Report the free space at the working directory."""
    directory = Path.cwd()
    free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK):
        yield Check(
            "disk",
            "warn",
            f"{directory} is not writable: runs/ cannot be created",
            "use --run-directory, or another directory",
        )
    elif free < _LEAST_DISK:
        yield Check("disk", "warn", f"{format_bytes(free)} free at {directory}", "make room for logs and checkpoints")
    else:
        yield report_ok("disk", f"{format_bytes(free)} free at {directory}")
