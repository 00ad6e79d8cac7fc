"""A gang scheduler that is installed after the operator is found when a job asks for it."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import job

from topkube_operator import gangs
from topkube_operator.cluster import ApiError
from topkube_operator.observed import Policy

ASKING = job(runPolicy={"schedulingPolicy": {"minAvailable": 2}})


class Discovery:
    """What of an API server is asked here."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.asked = 0
        self.broken = False
        self.learnt: list[tuple[str, str, str]] = []

    def knows(self, group: str, version: str, plural: str) -> bool:
        self.asked += 1
        if self.broken:
            raise ApiError(500, "etcd is slow")
        return f"{group}/{version}/{plural}" in self.groups

    def learn(self, *kind: str) -> None:
        self.learnt.append(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "gang"),
    [("scheduling.volcano.sh/v1beta1", "volcano"), ("scheduling.x-k8s.io/v1alpha1", "scheduler-plugins")],
)
def test_it_is_looked_for_while_jobs_ask_for_it_and_followed_once(
    monkeypatch: pytest.MonkeyPatch, group: str, gang: str
) -> None:
    cluster, followed = Discovery(), list[str]()
    found = gangs.Gangs(cluster, Policy(), lambda: followed.append("PodGroup"))  # type: ignore[arg-type]
    assert found.policy(job()).gang is None
    assert cluster.asked == 0, "a job that asks for none costs no question"
    assert found.policy(ASKING).gang is None
    asked = cluster.asked
    cluster.groups.add(f"{group}/podgroups")
    assert found.policy(ASKING).gang is None
    assert cluster.asked == asked, "not with every look at every job"
    monkeypatch.setattr(gangs, "_PAUSE", 0.0)
    cluster.broken = True
    assert found.policy(ASKING).gang is None
    cluster.broken = False
    assert found.policy(ASKING).gang == found.policy(job()).gang == gang
    assert (followed, cluster.learnt) == (["PodGroup"], [("PodGroup", group, "podgroups")])


@pytest.mark.parametrize("policy", [None, "x", {}, {"schedulingPolicy": "x"}, {"schedulingPolicy": {"queue": None}}])
def test_nonsense_asks_for_nothing(policy: Any) -> None:
    assert not gangs.asked_for(job(runPolicy=policy))
    assert not gangs.asked_for({"spec": policy})
