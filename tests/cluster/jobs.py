"""TrainingJobs for tests. Their ranks use NumPy only: they start in a second."""

from __future__ import annotations

from typing import Any

from localkube.images import RUNTIME

# Ranks that meet in an all-reduce, step after step, until told: argv is the number of steps and seconds per step.
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
# Rank 1 of the first attempt says something and ends with 7; the others wait for it in an all-reduce.
FAILS = """
import sys, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1:
    print("this is why", flush=True)
    sys.exit(7)
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""
# The same, in the first attempt alone.
FAILS_ONCE = """
import os, sys, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1 and os.environ["TOPKUBE_ATTEMPT"] == "1":
    sys.exit(7)
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""


def job(name: str, command: list[str], *, workers: int = 2, slots: int = 1, **spec: Any) -> dict[str, Any]:
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


def steps(count: int = 5, pause: float = 0.01) -> list[str]:
    return ["python", "-c", STEPS, str(count), str(pause)]


def endless() -> list[str]:
    return steps(100_000, 0.05)


def ends_in_attempt(attempt: int, count: int, pause: float) -> list[str]:
    """Train without end before `attempt`, and then for a number of steps."""
    script = f'[ "$TOPKUBE_ATTEMPT" -lt {attempt} ] && set -- 100000; exec python -c "$0" "$1" {pause}'
    return ["sh", "-c", script, STEPS, str(count)]


def fails() -> list[str]:
    return ["python", "-c", FAILS]


def fails_once() -> list[str]:
    return ["python", "-c", FAILS_ONCE]
