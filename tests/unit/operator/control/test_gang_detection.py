"""A gang scheduler that is installed after the operator is detected when a job asks for a gang."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_job import build_job

from topkube_operator.control import gang_detection
from topkube_operator.model import stored_job
from topkube_operator.model.observed import Policy
from topkube_operator.watch.api_connection import ApiError

GANG_JOB = build_job(runPolicy={"schedulingPolicy": {"minAvailable": 2}})


class Discovery:
    """The part of an API server that gang detection calls."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.queries = 0
        self.broken = False
        self.registered_kinds: list[tuple[str, str, str]] = []

    def serves(self, group: str, version: str, plural: str) -> bool:
        self.queries += 1
        if self.broken:
            raise ApiError(500, "etcd is slow")
        return f"{group}/{version}/{plural}" in self.groups

    def register_kind(self, *kind: str) -> None:
        self.registered_kinds.append(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "gang"),
    [("scheduling.volcano.sh/v1beta1", "volcano"), ("scheduling.x-k8s.io/v1alpha1", "scheduler-plugins")],
)
def test_a_gang_scheduler_is_looked_for_while_jobs_ask_for_it_and_watched_once(
    monkeypatch: pytest.MonkeyPatch, group: str, gang: str
) -> None:
    cluster, watched_kinds = Discovery(), list[str]()
    detector = gang_detection.GangDetector(cluster, Policy(), watched_kinds.append)  # type: ignore[arg-type]
    assert detector.find_policy(build_job()).gang is None
    assert cluster.queries == 0, "a job without a gang causes no query"
    assert detector.find_policy(GANG_JOB).gang is None
    queries = cluster.queries
    cluster.groups.add(f"{group}/podgroups")
    assert detector.find_policy(GANG_JOB).gang is None
    assert cluster.queries == queries, "the operator does not query for every job"
    monkeypatch.setattr(gang_detection, "_PAUSE", 0.0)
    cluster.broken = True
    assert detector.find_policy(GANG_JOB).gang is None
    cluster.broken = False
    assert detector.find_policy(GANG_JOB).gang == detector.find_policy(build_job()).gang == gang
    assert (watched_kinds, cluster.registered_kinds) == (["PodGroup"], [("PodGroup", group, "podgroups")])


@pytest.mark.parametrize("policy", [None, "x", {}, {"schedulingPolicy": "x"}, {"schedulingPolicy": {"queue": None}}])
def test_an_invalid_policy_asks_for_nothing(policy: Any) -> None:
    assert not stored_job.asks_for_pod_group(build_job(runPolicy=policy))
    assert not stored_job.asks_for_pod_group({"spec": policy})


def test_kueue_that_is_installed_later_is_detected_when_a_job_has_a_queue() -> None:
    cluster, watched_kinds = Discovery(), list[str]()
    detector = gang_detection.GangDetector(cluster, Policy(), watched_kinds.append)  # type: ignore[arg-type]
    in_queue = build_job()
    in_queue["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    assert detector.find_policy(build_job()).workloads == ""
    assert cluster.queries == 0
    cluster.groups |= {"kueue.x-k8s.io/v1beta1/workloads", "kueue.x-k8s.io/v1beta2/workloads"}
    assert detector.find_policy(in_queue).workloads == "kueue.x-k8s.io/v1beta2"
    assert watched_kinds == ["Workload"]
    assert ("ResourceFlavor", "kueue.x-k8s.io/v1beta2", "resourceflavors") in cluster.registered_kinds
    in_queue["metadata"]["labels"] |= {"kueue.x-k8s.io/pod-group-name": "mine"}
    assert not stored_job.asks_for_workload(in_queue)


def test_a_kueue_that_no_longer_serves_the_detected_version_is_detected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kueue was upgraded while the operator ran. Jobs in its queues waited until the operator was started again."""
    monkeypatch.setattr(gang_detection, "_PAUSE", 0.0)
    cluster, watched_kinds, refused = Discovery(), list[str](), set[str]()
    policy = Policy(workloads="kueue.x-k8s.io/v1beta1")
    detector = gang_detection.GangDetector(cluster, policy, watched_kinds.append, refused.__contains__)  # type: ignore[arg-type]
    in_queue = build_job()
    in_queue["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    cluster.groups = {"kueue.x-k8s.io/v1beta2/workloads"}
    assert detector.find_policy(in_queue).workloads == "kueue.x-k8s.io/v1beta1"
    assert cluster.queries == 0, "the watch works"
    refused.add("Workload")
    assert detector.find_policy(in_queue).workloads == "kueue.x-k8s.io/v1beta2"
    assert ("Workload", "kueue.x-k8s.io/v1beta2", "workloads") in cluster.registered_kinds
    assert watched_kinds == [], "the watcher continues with the new version"
    cluster.groups.clear()
    assert detector.find_policy(in_queue).workloads, "without Kueue, jobs in its queues wait"
