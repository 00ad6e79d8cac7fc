"""What a step frees stays in the heap of the process (topkube/heap.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from topkube.heap import count_kept_bytes
from topkube.settings import copy_environment

GIBIBYTE = 1 << 30
STEPS = """
import resource
import numpy as np
import topkube

topkube.init()

def step():
    arrays = [np.ones(1 << 17) for _ in range(48)]  # 1 MiB each

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(**variables: str) -> int:
    """Return how many pages the kernel gives to a process in five steps that each need 48 MiB."""
    environment = {name: value for name, value in copy_environment().items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment | variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_step_gets_the_memory_that_the_last_step_freed() -> None:
    assert count_page_faults() < 500


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
    ids=lambda variables: next(iter(variables)),
)
def test_the_environment_decides_how_much_is_kept(variables: dict[str, str]) -> None:
    assert count_page_faults(**variables) > 10_000


def test_ranks_share_a_sixteenth_of_the_memory(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert count_kept_bytes(4, tmp_path) == min(machine // 64, GIBIBYTE)
    assert count_kept_bytes(1000, tmp_path) == machine // 16_000
    (tmp_path / "memory.max").write_text("max\n")
    assert count_kept_bytes(1000, tmp_path) == machine // 16_000


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_cgroup_limits_what_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{2 * GIBIBYTE}\n")
    assert count_kept_bytes(2, tmp_path) == GIBIBYTE // 16
