"""The operator's children of a job, as the tests of objects and pods look at them."""

from __future__ import annotations

from typing import Any

from simulated import job

from topkube.job import TrainingJob
from topkube_operator import pods
from topkube_operator.observed import Policy

SEED = b"s" * 32
POLICY = Policy(seed=SEED, operator_namespace="topkube-system")


def stored(**spec: Any) -> TrainingJob:
    return TrainingJob.from_cluster(job(**spec))


def worker(made: TrainingJob, index: int = 0, policy: Policy = POLICY) -> tuple[dict[str, Any], dict[str, Any]]:
    """A worker's pod, and the container that trains."""
    pod = pods.worker(made, "uid-1", index, 1, "10.0.0.9", policy)
    return pod, next(one for one in pod["spec"]["containers"] if one["name"] == "worker")


def launcher(made: TrainingJob) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = pods.launcher(made, "uid-1", 2, [(0, 1), (1, 2)], POLICY)
    return pod, next(one for one in pod["spec"]["containers"] if one["name"] == "launcher")


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
