"""Selection where memory is short: in processes of their own, with a limit on their address space."""

from __future__ import annotations

import subprocess
import sys

LIMITED = """
import resource
import numpy as np
from topkube import kernels

def limit(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))

large = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
small = large[:50_000].copy()
"""
AFTER_AN_ERROR = """
kernels.topk(small, 500)
limit(13)  # for the results, but not for the candidates too
try:
    kernels.topk(large, 1 << 20)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kernels.topk(small, 500)
    print("done")
"""
MANY_THREADS = """
limit(400)
indices, _ = kernels.topk(large, 1 << 20, threads=64)
print("done" if np.array_equal(indices, kernels.topk(large, 1 << 20, threads=1)[0]) else indices)
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", LIMITED + script], capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"status {done.returncode}: {done.stderr}"


def test_selection_goes_on_after_a_memory_error() -> None:
    assert run(AFTER_AN_ERROR) == "done"


def test_threads_share_the_room_for_candidates() -> None:
    assert run(MANY_THREADS) == "done"
