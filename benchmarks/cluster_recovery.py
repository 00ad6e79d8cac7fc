"""Measure how fast a job recovers, and how fast a deleted job disappears, on a real Kubernetes.

    sudo make cluster NODES=3 && kubectl apply -f manifests/ && sudo .venv/bin/python benchmarks/cluster_recovery.py

char_gpt runs as a TrainingJob with 2 workers x 2 ranks on two nodes. It writes a checkpoint every 20 steps to a volume
claim that both nodes share. The benchmark sends SIGKILL, several times each, to all processes of a worker's pod, to one
rank, and to the launcher. It measures the time until the end of the first step of the next attempt, and the number of
repeated steps. One machine runs all nodes of this Kubernetes, so there is one clock. The benchmark also measures the
time from `kubectl delete` until no pod, Service, Secret or NetworkPolicy of the job is left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import kubernetes

from on_cluster import describe_measurement, find_running_cluster  # first: adds tests/cluster to sys.path

from jobs import build_job  # isort: skip
from target import Namespace, Target, create_shared_claim, wait_for  # isort: skip

from topkube.launch.rank import find_commands

RESULTS = Path(__file__).with_name("results") / "cluster-recovery.json"
EVERY_STEPS = 20
GOAL_SECONDS = 15.0
KILLED_PARTS = ("worker", "rank", "launcher")
MODEL = ["--steps", "1000000", "--layers", "2", "--width", "64", "--batch-size", "4"]
# Runs the example without a change of its file; rank 0 also prints when each step ends.
TIMED_SCRIPT = """
import os, sys, time
import topkube, topkube.examples.char_gpt as example

class Timed(topkube.DistributedOptimizer):
    def step(self, *arguments, **options):
        result = super().step(*arguments, **options)
        if topkube.rank() == 0:
            print("step-end", os.environ["TOPKUBE_ATTEMPT"], time.time(), flush=True)
        return result

topkube.DistributedOptimizer = Timed
example.main(sys.argv[1:])
"""


class RunningJob:
    """A job that trains in its own namespace, from the call of the constructor until `close`."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.namespace = Namespace(target, f"bench-{uuid.uuid4().hex[:6]}")
        metadata = kubernetes.client.V1ObjectMeta(name=self.namespace.name)
        target.core.create_namespace(kubernetes.client.V1Namespace(metadata=metadata))
        self.folder = folder / self.namespace.name
        create_shared_claim(self.namespace, self.folder, "checkpoints")
        checkpoint = {"claimName": "checkpoints", "everySteps": EVERY_STEPS, "keep": 2}
        command = ["python", "-c", TIMED_SCRIPT, *MODEL]
        # Kubernetes refuses pods until it has made the namespace's service account.
        wait_for(self._has_account, "the service account", 30)
        self.name = self.namespace.create(build_job("recovery", command, workers=2, slots=2, checkpoint=checkpoint))
        wait_for(lambda: len(self.list_step_ends(1)) > EVERY_STEPS + 5, "steps and a checkpoint", 180)

    def _has_account(self) -> bool:
        accounts = self.target.core.list_namespaced_service_account(self.namespace.name).items
        return any(account.metadata.name == "default" for account in accounts)

    def close(self) -> None:
        self.target.core.delete_namespace(self.namespace.name)
        self.target.core.delete_persistent_volume(self.namespace.name)

    def read_logs(self) -> str:
        pods = self.namespace.list_pods("worker")
        return "\n".join(self.namespace.read_log(pod.metadata.name) for pod in pods)

    def list_step_ends(self, attempt: int) -> list[float]:
        """Return when the steps of the attempt ended, in Unix time."""
        return [float(text) for text in re.findall(rf"step-end {attempt} ([\d.]+)", self.read_logs())]

    def kill(self, killed_part: str) -> float:
        """Send SIGKILL to the launcher, to worker 1, or to a rank of worker 1. Return the time. Worker 0 is left alone,
        because its log is needed."""
        role = "launcher" if killed_part == "launcher" else "worker"
        pod = self.namespace.list_pods(role)[-1]
        killed_at = time.time()
        if killed_part == "rank":
            os.kill(self._find_rank(pod), signal.SIGKILL)
        else:
            self.target.kill_container(pod, role)
        return killed_at

    def _find_rank(self, pod: Any) -> int:
        """Return the process id of a rank on this machine."""
        return find_commands(self.target.find_container(pod, "worker").list_processes())[0]


def measure_recovery(target: Target, folder: Path, killed_part: str) -> dict[str, float]:
    """Return the seconds from the kill to the end of the next step, and the number of lost steps."""
    run = RunningJob(target, folder)
    try:
        killed_at = run.kill(killed_part)
        wait_for(lambda: run.list_step_ends(2), "a step of the second attempt", 120)
        resumed = re.search(r"resumed at step (\d+)", run.read_logs())
        status = run.namespace.read_status(run.name)
        assert resumed is not None, run.read_logs()[-2000:]
        assert status["restarts"] + status["disruptions"] == 1, status
        return {
            "seconds": run.list_step_ends(2)[0] - killed_at,
            "steps_lost": len(run.list_step_ends(1)) - int(resumed[1]),
        }
    finally:
        run.close()


def measure_deletion(target: Target, folder: Path) -> float:
    """Return the seconds from deleting a running job until nothing of it is left."""
    run = RunningJob(target, folder)
    try:
        before = time.monotonic()
        run.namespace.delete(run.name)
        wait_for(lambda: not run.namespace.list_children(), "everything to be gone", 120)
        return time.monotonic() - before
    finally:
        run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the number of rounds of each measurement (%(default)s)")
    parser.add_argument(
        "--only",
        choices=[*KILLED_PARTS, "delete"],
        action="append",
        help="measure only these, and add the results to the file",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for the result (%(default)s)")
    args = parser.parse_args()
    target, cluster = find_running_cluster()
    folder = cluster.layout.state / "volumes"
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.only and args.json.exists() else {}
    result |= {
        "what": "char_gpt as a TrainingJob: from SIGKILL to the end of the next attempt's first step, seconds",
        **describe_measurement(target),
        "every_steps": EVERY_STEPS,
        "target_seconds": GOAL_SECONDS,
        "arguments": MODEL,
    }
    for killed_part in args.only or [*KILLED_PARTS, "delete"]:
        rounds: list[dict[str, float]] = []
        for _ in range(args.rounds):
            if killed_part == "delete":
                rounds.append({"seconds": measure_deletion(target, folder)})
            else:
                rounds.append(measure_recovery(target, folder, killed_part))
            print(killed_part, rounds[-1], flush=True)
        result[killed_part] = {
            "median_seconds": statistics.median(round_result["seconds"] for round_result in rounds),
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
