"""TrainingJobs for tests. Their ranks use only NumPy, so they start in a second."""

from __future__ import annotations

from typing import Any

from localkube.images import RUNTIME

# Ranks that call an all-reduce in each step. argv has the number of steps and the seconds of a step.
STEPS = """
import os, sys, time, numpy as np, topkube
topkube.init()
count, pause = int(sys.argv[1]), float(sys.argv[2])
for step in range(count):
    topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
    if step == 0:
        print(f"rank {topkube.rank()} of {topkube.size()} runs as {os.getpid()}", flush=True)
    time.sleep(pause)
print(f"rank {topkube.rank()} is done", flush=True)
"""
# Rank 1 prints a line and ends with 7; the other ranks wait for it in an all-reduce.
FAILS = """
import sys, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1:
    print("this is why", flush=True)
    sys.exit(7)
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""
# The same, but only in the first attempt.
FAILS_ONCE = """
import os, sys, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1 and os.environ["TOPKUBE_ATTEMPT"] == "1":
    sys.exit(7)
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""


def build_job(name: str, command: list[str], *, workers: int = 2, slots: int = 1, **spec: Any) -> dict[str, Any]:
    """Return a TrainingJob that runs `command`. `spec` holds more fields of its spec."""
    container = {"name": "worker", "image": RUNTIME.name, "command": command, "imagePullPolicy": "IfNotPresent"}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "workers": workers,
            "slotsPerWorker": slots,
            "template": {"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}},
            **spec,
        },
    }


def build_steps(count: int = 5, pause: float = 0.01) -> list[str]:
    """Return a command that makes `count` steps of `pause` seconds."""
    return ["python", "-c", STEPS, str(count), str(pause)]


def build_endless_steps() -> list[str]:
    return build_steps(100_000, 0.05)


def build_steps_that_end_in_attempt(attempt: int, count: int, pause: float) -> list[str]:
    """Return a command that trains without end before `attempt`, and then for `count` steps."""
    script = f'[ "$TOPKUBE_ATTEMPT" -lt {attempt} ] && set -- 100000; exec python -c "$0" "$1" {pause}'
    return ["sh", "-c", script, STEPS, str(count)]


def build_failing_ranks() -> list[str]:
    return ["python", "-c", FAILS]


def build_ranks_that_fail_once() -> list[str]:
    return ["python", "-c", FAILS_ONCE]
