"""What a step frees stays in the heap of the process (topkube/heap.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from topkube.environment import copy_environment
from topkube.heap import count_kept_bytes

MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
STEP = """
import os
from pathlib import Path

import numpy as np
import topkube

def count_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

topkube.init()
before = count_resident_bytes()
arrays = [np.ones(1 << 17) for _ in range(48)]  # 1 MiB each
del arrays
print(count_resident_bytes() - before)
"""


def measure_kept_bytes(**variables: str) -> int:
    """Return how many bytes a process keeps of 48 MiB that it has freed."""
    malloc_variables = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in copy_environment().items() if not name.startswith(malloc_variables)}
    done = subprocess.run(
        [sys.executable, "-c", STEP], env=environment | variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_process_keeps_what_a_step_frees() -> None:
    assert measure_kept_bytes() > 40 * MEBIBYTE


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
    ids=lambda variables: next(iter(variables)),
)
def test_the_environment_decides_how_much_is_kept(variables: dict[str, str]) -> None:
    assert measure_kept_bytes(**variables) < 16 * MEBIBYTE


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(("gibibytes", "ranks", "kept"), [(8, 2, 256), (8, 1000, 64), (1, 1, 64), (64, 1, 1024)])
def test_ranks_share_a_sixteenth_of_what_the_cgroup_grants(
    tmp_path: Path, name: str, gibibytes: int, ranks: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, 512)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{gibibytes * GIBIBYTE}\n")
    assert count_kept_bytes(ranks, tmp_path) == kept * MEBIBYTE


@pytest.mark.parametrize("limit", [None, "max", "9223372036854771712"])
def test_without_a_limit_ranks_share_the_memory_of_the_machine(
    tmp_path: Path, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, 24)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
    assert count_kept_bytes(4, tmp_path) == 384 * MEBIBYTE


def set_memory(monkeypatch: pytest.MonkeyPatch, gibibytes: int) -> None:
    """Give the machine `gibibytes` of memory."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gibibytes * GIBIBYTE // 4096}.get)
