"""Which PodGroup the cluster has. A gang scheduler may be installed after the operator: it is looked for again when a
job asks for a gang and there is none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from topkube_operator.cluster import ApiError, Cluster
from topkube_operator.observed import Gang, Policy

_log = logging.getLogger(__name__)
_GANGS: dict[Gang, tuple[str, str]] = {
    "volcano": ("scheduling.volcano.sh", "v1beta1"),
    "scheduler-plugins": ("scheduling.x-k8s.io", "v1alpha1"),
}
_PAUSE = 2.0
"""Between two questions to the API server."""


def known_gang(cluster: Cluster) -> Gang | None:
    """Which PodGroup the cluster has; the kind is then known to `cluster`."""
    for gang, (group, version) in _GANGS.items():
        if cluster.knows(group, version, "podgroups"):
            cluster.learn("PodGroup", f"{group}/{version}", "podgroups")
            return gang
    return None


def asked_for(job: Mapping[str, Any]) -> bool:
    """Whether a stored job, valid or not, asks for a PodGroup."""
    spec = job.get("spec")
    run = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    policy = run.get("schedulingPolicy") if isinstance(run, Mapping) else None
    return isinstance(policy, Mapping) and any(policy.get(name) is not None for name in ("queue", "minAvailable"))


class Gangs:
    """The policy for jobs, with the gang in it. `found` is called once, when there is one, and returns when all its
    PodGroups have been listed."""

    def __init__(self, cluster: Cluster, policy: Policy, found: Callable[[], None]) -> None:
        self._cluster, self._policy, self._found = cluster, policy, found
        self._asked = float("-inf")
        self._lock = threading.Lock()

    def policy(self, job: Mapping[str, Any]) -> Policy:
        if self._policy.gang is None and asked_for(job):
            with self._lock:
                self._look()
        return self._policy

    def _look(self) -> None:
        if self._policy.gang is not None or time.monotonic() < self._asked + _PAUSE:
            return
        self._asked = time.monotonic()
        try:
            gang = known_gang(self._cluster)
            if gang is not None:
                self._found()
                self._policy = replace(self._policy, gang=gang)
                _log.info("the cluster has PodGroups now: %s", gang)
        except ApiError as error:
            _log.warning("it is not known whether the cluster has PodGroups: %s", error)
