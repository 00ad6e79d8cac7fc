"""The detection of the PodGroups and Workloads that the cluster serves. A gang scheduler or Kueue may be installed
after the operator: the operator checks again when a job asks for a gang or a queue and none is known."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from topkube_operator.model import stored_job
from topkube_operator.model.observed import Gang, Policy
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

_log = logging.getLogger(__name__)
_GANGS: dict[Gang, tuple[str, str]] = {
    "volcano": ("scheduling.volcano.sh", "v1beta1"),
    "scheduler-plugins": ("scheduling.x-k8s.io", "v1alpha1"),
}
_KUEUE, _KUEUE_VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
"""The newest version first: a later Kueue stops serving the oldest."""
_KUEUE_KINDS = {
    "Workload": "workloads",
    "ResourceFlavor": "resourceflavors",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}
_PAUSE = 2.0
"""Minimum seconds between two checks."""


def detect_gang(cluster: ApiClient) -> Gang | None:
    """Return the PodGroup that the cluster serves, and register its kind with `cluster`; None if there is none."""
    for gang, (group, version) in _GANGS.items():
        if cluster.serves(group, version, "podgroups"):
            cluster.register_kind("PodGroup", f"{group}/{version}", "podgroups")
            return gang
    return None


def detect_workloads(cluster: ApiClient) -> str:
    """Return the API version of the Workloads that the cluster serves, and register Kueue's kinds with `cluster`; empty
    if it serves none."""
    for version in _KUEUE_VERSIONS:
        if cluster.serves(_KUEUE, version, "workloads"):
            for kind, plural in _KUEUE_KINDS.items():
                cluster.register_kind(kind, f"{_KUEUE}/{version}", plural)
            return f"{_KUEUE}/{version}"
    return ""


class GangDetector:
    """A detector that adds the cluster's gang and Workloads to the policy for jobs. It calls `on_detection` once with
    each kind that it detects; `on_detection` returns when all objects of the kind have been listed. `is_refused`
    returns True for a kind that the API server does not list any more: a later Kueue may serve only another version."""

    def __init__(
        self,
        cluster: ApiClient,
        policy: Policy,
        on_detection: Callable[[str], None],
        is_refused: Callable[[str], bool] = lambda kind: False,
    ) -> None:
        self._cluster, self._policy, self._on_detection = cluster, policy, on_detection
        self._is_refused = is_refused
        self._gang_checked_at = self._workloads_checked_at = float("-inf")
        self._lock = threading.Lock()

    def find_policy(self, job: Mapping[str, Any]) -> Policy:
        """Return the policy for `job`. Checks the cluster first if the job asks for a kind that is not known yet."""
        if self._policy.gang is None and stored_job.asks_for_pod_group(job):
            with self._lock:
                self._detect_gang()
        if self._lacks_workloads() and stored_job.asks_for_workload(job):
            with self._lock:
                self._detect_workloads()
        return self._policy

    def _detect_gang(self) -> None:
        if self._policy.gang is not None or time.monotonic() < self._gang_checked_at + _PAUSE:
            return
        self._gang_checked_at = time.monotonic()
        try:
            gang = detect_gang(self._cluster)
            if gang is not None:
                self._on_detection("PodGroup")
                self._policy = replace(self._policy, gang=gang)
                _log.info("the cluster serves PodGroups now: %s", gang)
        except ApiError as error:
            _log.warning("cannot determine if the cluster serves PodGroups: %s", error)

    def _lacks_workloads(self) -> bool:
        return not self._policy.workloads or self._is_refused("Workload")

    def _detect_workloads(self) -> None:
        if not self._lacks_workloads() or time.monotonic() < self._workloads_checked_at + _PAUSE:
            return
        self._workloads_checked_at = time.monotonic()
        try:
            version, known = detect_workloads(self._cluster), self._policy.workloads
            if version and not known:
                self._on_detection("Workload")
            if version and version != known:
                self._policy = replace(self._policy, workloads=version)
                _log.info("the cluster serves Workloads now: %s", version)
        except ApiError as error:
            _log.warning("cannot determine if the cluster serves Workloads: %s", error)
