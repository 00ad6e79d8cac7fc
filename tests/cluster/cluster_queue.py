"""A simulated Kueue on a real API server. A ClusterQueue admits Workloads while it has room, and evicts Workloads of
lower priority. A PodGroup counts the pods of one group, as Kueue's integration of plain pods does.

Both act when a test asks them to, and fail if the job's controller breaks a rule of the protocol: pods run only with
quota, and quota is given back after the pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import kueue_crds
import kueue_protocol
import pytest
from target import wait_for

from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_MANAGED = "kueue.x-k8s.io/managed"
_GROUP_LABEL, _TOTAL = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
_ROLE, _RETRIABLE = "kueue.x-k8s.io/role-hash", "kueue.x-k8s.io/retriable-in-group"
_MERGE = "application/merge-patch+json"


@contextmanager
def serve_kueue_kinds(cluster: ApiClient, version: str) -> Iterator[None]:
    """Serve Kueue's kinds in one version. Skip the test on a cluster on which Kueue is installed."""
    definitions = kueue_crds.build_definitions(version)
    for definition in definitions:
        _remove_leftover(cluster, definition)
    try:
        for definition in definitions:
            cluster.call("POST", _CRDS, definition)
        for definition in definitions:
            names = definition["spec"]["names"]
            cluster.register_kind(names["kind"], f"{kueue_crds.GROUP}/{version}", names["plural"])
            wait_for(lambda plural=names["plural"]: _is_served(cluster, version, plural), f"the kind {names['kind']}")
        yield
    finally:
        for definition in definitions:
            _remove_leftover(cluster, definition)


def _remove_leftover(cluster: ApiClient, definition: Mapping[str, Any]) -> None:
    """Remove a definition that these tests created, in this run or in a run that was killed."""
    path = f"{_CRDS}/{definition['metadata']['name']}"
    stored = _read(cluster, path)
    if not stored:
        return
    if stored["metadata"].get("annotations") != definition["metadata"]["annotations"]:
        pytest.skip("Kueue is installed on this cluster, and these tests simulate it. Next: use another cluster")
    with suppress(ApiError):
        cluster.call("DELETE", path)
    wait_for(lambda: not _read(cluster, path), f"{path} to be gone", 120)


def _is_served(cluster: ApiClient, version: str, plural: str) -> bool:
    try:
        return cluster.serves(kueue_crds.GROUP, version, plural)
    except ApiError:
        return False


def _read(cluster: ApiClient, path: str) -> dict[str, Any]:
    """Return an object; empty if there is none."""
    try:
        return cluster.call("GET", path)
    except ApiError as error:
        if error.status != 404:
            raise
        return {}


class _KueuePart:
    """A part of Kueue that acts when a test asks it to."""

    def reconcile(self) -> None:
        raise NotImplementedError

    def act_until(self, condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
        """Act as Kueue until `condition` returns a true result. Return the result. `what` names the condition."""

        def act_and_check() -> Any:
            self.reconcile()
            return condition()

        return wait_for(act_and_check, what, seconds)


class ClusterQueue(_KueuePart):
    """The Workloads of one namespace share a quota of `room` pods. The oldest Workload of the highest priority is
    first."""

    def __init__(self, cluster: ApiClient, namespace: str, version: str, *, room: int, flavor: str) -> None:
        self.cluster, self.namespace, self.room, self.flavor = cluster, namespace, room, flavor
        self._path = f"/apis/{kueue_crds.GROUP}/{version}/namespaces/{namespace}/workloads"
        self.evictions: list[str] = []

    def find_workload(self, job: str) -> dict[str, Any]:
        """Return the Workload of a job; empty if there is none."""
        return next((entry for entry in self._list() if entry["metadata"]["ownerReferences"][0]["name"] == job), {})

    def read_condition(self, job: str, kind: str) -> tuple[str, str]:
        """Return the status and the reason of a condition of a job's Workload."""
        condition = kueue_protocol.find_condition(self.find_workload(job), kind)
        return condition.get("status", ""), condition.get("reason", "")

    def holds_quota(self, job: str) -> bool:
        workload = self.find_workload(job)
        return bool(workload) and kueue_protocol.holds_quota(workload)

    def evict(self, job: str, reason: str) -> None:
        """Ask a job to return its quota."""
        self._change(job, lambda workload: kueue_protocol.build_evicted_status(workload, reason, datetime.now(UTC)))

    def end_pause(self, job: str) -> None:
        """Queue an evicted job again."""
        self._change(job, lambda workload: kueue_protocol.build_requeued_status(workload, datetime.now(UTC)))

    def _change(self, job: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Write a new status. If the operator writes at the same moment, read the Workload again and repeat."""
        wait_for(
            lambda: self._write(workload := self.find_workload(job), change(workload)),
            f"the Workload of {job} to change",
        )

    def set_active(self, job: str, active: bool) -> None:
        """Set `spec.active`, as an administrator does."""
        path = f"{self._path}/{self.find_workload(job)['metadata']['name']}"
        self.cluster.call("PATCH", path, {"spec": {"active": active}}, content=_MERGE)

    def reconcile(self) -> None:
        """Check all rules, and take the next step with each Workload."""
        workloads, now = self._list(), datetime.now(UTC)
        self._check_pods(workloads)
        used = sum(kueue_protocol.count_pods(entry) for entry in workloads if kueue_protocol.holds_quota(entry))
        assert used <= self.room, "a Workload took quota that it was not given"
        for entry in workloads:
            self._follow_activity(entry, now)
        waiting = [entry for entry in workloads if kueue_protocol.may_be_admitted(entry)]
        for entry in sorted(waiting, key=_compute_turn):
            needed = kueue_protocol.count_pods(entry)
            if used + needed > self.room:
                self._make_room(entry, workloads, now)
                return
            used += needed
            self._write(entry, kueue_protocol.build_admitted_status(entry, {"pods": self.flavor}, now))

    def _make_room(self, entry: Mapping[str, Any], workloads: list[dict[str, Any]], now: datetime) -> None:
        """Evict a Workload of lower priority, and write to `entry` why it waits."""
        holders = [other for other in workloads if kueue_protocol.holds_quota(other)]
        is_clearing = any(kueue_protocol.has_true_condition(other, "Evicted") for other in holders)
        lower = [other for other in holders if _read_priority(other) < _read_priority(entry)]
        if lower and not is_clearing:
            evicted = max(lower, key=_compute_turn)
            self.evictions.append(evicted["metadata"]["name"])
            self._write(evicted, kueue_protocol.build_evicted_status(evicted, "Preempted", now))
        message = "couldn't assign flavors to pod set launcher: insufficient unused quota for pods"
        if kueue_protocol.find_condition(entry, "QuotaReserved").get("message") != message:
            self._write(entry, kueue_protocol.build_refused_status(entry, message, now))

    def _follow_activity(self, entry: dict[str, Any], now: datetime) -> None:
        is_evicted = kueue_protocol.has_true_condition(entry, "Evicted")
        if entry["spec"].get("active") is False:
            if kueue_protocol.holds_quota(entry) and not is_evicted:
                self._write(entry, kueue_protocol.build_evicted_status(entry, "Deactivated", now))
        elif kueue_protocol.find_condition(entry, "Requeued").get("reason") == "Deactivated":
            self._write(entry, kueue_protocol.set_conditions(entry["status"], now, Requeued=(True, "Reactivated")))

    def _check_pods(self, workloads: list[dict[str, Any]]) -> None:
        """Fail if pods run without quota. `workloads` was read before the pods, and only this object admits."""
        pods, _ = self.cluster.list("Pod", self.namespace, "topkube.dev/job-name")
        for entry in workloads:
            admission = (entry.get("status") or {}).get("admission")
            is_reserved = kueue_protocol.has_true_condition(entry, "QuotaReserved")
            assert not is_reserved or admission, "Kueue's webhook refuses reserved quota without an admission"
            if kueue_protocol.holds_quota(entry):
                continue
            job = entry["metadata"]["ownerReferences"][0]["uid"]
            active = [pod["metadata"]["name"] for pod in pods if _read_owner_uid(pod) == job and _is_active(pod)]
            assert not active, f"{active} run, and {entry['metadata']['name']} has no quota: {entry.get('status')}"

    def _list(self) -> list[dict[str, Any]]:
        return list(self.cluster.call("GET", self._path)["items"])

    def _write(self, workload: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
        """Write Kueue's part of the status, with all conditions. Return False if the Workload has changed.

        Kueue writes by a merge patch or by server-side apply. API servers of 1.20 take the conditions of a custom
        resource for one field, so that an apply would remove the conditions of the job's controller.
        """
        kueue_part = {name: status[name] for name in ("admission", "admissionChecks", "conditions") if status.get(name)}
        body = {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": kueue_part}
        path = f"{self._path}/{workload['metadata']['name']}/status"
        try:
            self.cluster.call("PATCH", path, body, query={"fieldManager": "kueue"}, content=_MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return False
        return True


class PodGroup(_KueuePart):
    """The pods of one group, and its quota. The first complete set of pods decides how many pods each role has."""

    def __init__(self, cluster: ApiClient, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.roles: Counter[str] = Counter()
        self.holds_quota = False

    def reconcile(self) -> None:
        """Check all rules, and take the next step with the group."""
        pods, _ = self.cluster.list("Pod", self.namespace, f"{_GROUP_LABEL}={self.name}")
        for pod in pods:
            assert pod["metadata"]["labels"][QUEUE_LABEL], "Kueue manages pods with a queue"
            if not pod["metadata"].get("deletionTimestamp") and _MANAGED not in _read_finalizers(pod):
                self._set_finalizers(pod, [*_read_finalizers(pod), _MANAGED])
        if not pods:
            return
        totals = {pod["metadata"]["annotations"][_TOTAL] for pod in pods}
        assert len(totals) == 1, f"pods of one group count it differently: {totals}"
        total = int(totals.pop())
        runnable = [pod for pod in pods if pod["status"].get("phase") != "Failed"]
        replaced = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        roles = Counter(pod["metadata"]["annotations"][_ROLE] for pod in runnable)
        if not self.roles and len(runnable) == total:
            self.roles, self.holds_quota = roles, True
        if self.roles:
            assert roles <= self.roles, f"Kueue deletes pods beyond the group: {roles}, not {self.roles}"
        if self._has_finished(pods, total):
            self.holds_quota = False
            replaced = pods
        elif len(runnable) + len(replaced) <= total:
            replaced = []
        for pod in replaced:
            if _MANAGED in _read_finalizers(pod):
                self._set_finalizers(pod, [name for name in _read_finalizers(pod) if name != _MANAGED])

    def _has_finished(self, pods: list[dict[str, Any]], total: int) -> bool:
        succeeded = sum(pod["status"].get("phase") == "Succeeded" for pod in pods)
        is_active = any(_is_active(pod) for pod in pods)
        makes_no_more = any(pod["metadata"]["annotations"].get(_RETRIABLE) == "false" for pod in pods)
        return succeeded == total or (makes_no_more and not is_active)

    def _set_finalizers(self, pod: Mapping[str, Any], finalizers: list[str]) -> None:
        metadata = {"resourceVersion": pod["metadata"]["resourceVersion"], "finalizers": finalizers}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        try:
            self.cluster.call("PATCH", path, {"metadata": metadata}, content=_MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _read_priority(workload: Mapping[str, Any]) -> int:
    return int(workload["spec"].get("priority") or 0)


def _compute_turn(workload: Mapping[str, Any]) -> tuple[int, str, str]:
    metadata = workload["metadata"]
    return -_read_priority(workload), metadata["creationTimestamp"], metadata["name"]


def _read_owner_uid(pod: Mapping[str, Any]) -> str:
    return next((str(owner["uid"]) for owner in pod["metadata"].get("ownerReferences") or ()), "")


def _is_active(pod: Mapping[str, Any]) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _read_finalizers(pod: Mapping[str, Any]) -> list[str]:
    return list(pod["metadata"].get("finalizers") or ())
