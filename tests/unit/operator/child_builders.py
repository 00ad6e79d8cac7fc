"""Builders of a job's children for the tests of objects and pods."""

from __future__ import annotations

from typing import Any

from simulated_job import build_job

from topkube.job import TrainingJob
from topkube_operator.children import pods
from topkube_operator.model.observed import Policy

SEED = b"s" * 32
POLICY = Policy(seed=SEED, operator_namespace="topkube-system")


def parse_job(**spec: Any) -> TrainingJob:
    return TrainingJob.from_cluster(build_job(**spec))


def build_worker(job: TrainingJob, index: int = 0, policy: Policy = POLICY) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a worker's pod, and the container that trains."""
    pod = pods.build_worker(job, "uid-1", index, 1, "10.0.0.9", policy)
    return pod, next(entry for entry in pod["spec"]["containers"] if entry["name"] == "worker")


def build_launcher(job: TrainingJob) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = pods.build_launcher(job, "uid-1", 2, [(0, 1), (1, 2)], POLICY)
    return pod, next(entry for entry in pod["spec"]["containers"] if entry["name"] == "launcher")


def read_environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return True if a label selector matches these labels."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
