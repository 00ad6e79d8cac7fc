"""An API server in memory that holds one job, its pods and other children, and other people's objects.

It records every violation of a promise: no foreign object changes, no pod is created before its attempt is in the
status, and every launcher finds its workers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from simulated_job import read_attempt

from topkube.launch import contract
from topkube.timestamps import format_timestamp
from topkube_operator.model import names
from topkube_operator.model.observed import Child, Pod, Trouble

START = datetime(2026, 1, 1, tzinfo=UTC)
GRACE = timedelta(seconds=30)


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Return the result of a merge patch (RFC 7386): mappings are merged, null removes."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result


class SimulatedApiServer:
    """The stored objects. `job` is the stored job."""

    def __init__(self, stored: dict[str, Any]) -> None:
        self.job: dict[str, Any] | None = copy.deepcopy(stored)
        self.now = START
        self.pods: dict[str, Pod] = {}
        self.children: dict[tuple[str, str], Child] = {}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        """Objects of the whole cluster, by kind and name."""
        self.foreign: set[tuple[str, str]] = set()
        self.freed: set[str] = set()
        """Deleted pods that only a finalizer keeps."""
        self.removed_at: dict[str, datetime] = {}
        self.last_seen: dict[str, Pod] = {}
        self.manifests: dict[str, dict[str, Any]] = {}
        """The last manifest of each name that was applied."""
        self.troubles: dict[tuple[str, str], Trouble] = {}
        """Writes that were refused."""
        self.lost: set[str] = set()
        """Nodes that the control plane has lost contact with."""
        self.avoided: dict[str, set[str]] = {}
        """The nodes that each pod may not use."""
        self.violations: list[str] = []
        self._uids = itertools.count(1)

    def change(self, name: str, **changes: Any) -> None:
        self.pods[name] = dataclasses.replace(self.pods[name], **changes)

    def remove(self, name: str) -> None:
        self.freed.discard(name)
        self.last_seen[name] = self.pods.pop(name)
        self.removed_at[name] = self.now

    def apply(self, manifest: dict[str, Any]) -> None:
        assert self.job is not None
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = metadata["name"]
        assert len(name) <= 63, name
        assert [reference["uid"] for reference in metadata["ownerReferences"]] == [self.job["metadata"]["uid"]]
        if (kind, name) in self.foreign:
            self.troubles[kind, name] = Trouble("ForeignObject", "belongs to something else")
            return
        uid = f"uid-of-{name}-{next(self._uids)}"
        if kind == "Pod":
            self._create_pod(manifest, name, uid)
            return
        content = copy.deepcopy(manifest)
        if kind == "Service":
            content["spec"].setdefault("clusterIP", f"10.96.0.{next(self._uids) % 250}")
            stored_service = self.children.get((kind, name))
            if stored_service is not None:
                content["spec"]["clusterIP"] = stored_service.content["clusterIP"]
        content["metadata"]["uid"] = uid
        self.manifests[name] = manifest
        self.children[kind, name] = Child.from_object(kind, content)

    def put_child(self, child: Child) -> None:
        """Store a changed child under a new version."""
        self.children[child.kind, child.name] = dataclasses.replace(child, version=str(next(self._uids)))

    def _create_pod(self, manifest: dict[str, Any], name: str, uid: str) -> None:
        assert self.job is not None
        if name in self.pods:
            return
        stored = self.job.get("status") or {}
        manifest["metadata"] |= {"uid": uid, "creationTimestamp": format_timestamp(self.now)}
        pod = Pod.from_object(manifest)
        self.manifests[name] = manifest
        if pod.attempt != stored.get("attempt"):
            self.violations.append(f"{name} made while the status has attempt {stored.get('attempt')}")
        if stored.get("phase") in ("Succeeded", "Failed", "Suspended"):
            self.violations.append(f"{name} made in phase {stored.get('phase')}")
        launchers = [launcher for launcher in self.pods.values() if launcher.has_launcher and launcher.is_active]
        if pod.has_launcher and any(launcher.deletion is None for launcher in launchers):
            self.violations.append(f"{name} beside {[launcher.name for launcher in launchers]}")
        if pod.has_launcher:
            self._check_expected(manifest, name)
        self.pods[name] = pod
        text = manifest["metadata"]["annotations"].get(names.AVOIDED_NODES)
        self.avoided[name] = set(text.split(",") if text else ())

    def _check_expected(self, manifest: dict[str, Any], name: str) -> None:
        """Check that all workers in the launcher's plan exist and can call it."""
        container = next(item for item in manifest["spec"]["containers"] if item["name"] == "launcher")
        text = next(entry["value"] for entry in container["env"] if entry["name"] == contract.PLAN_VARIABLE)
        expected = contract.LaunchPlan.read(text).workers
        if [worker.index for worker in expected] != list(range(len(expected))):
            self.violations.append(f"{name} waits for {expected}")
        for worker in expected:
            pod = self.pods.get(worker.pod)
            if worker.pod == name:
                continue
            if pod is None or (pod.index, pod.attempt) != (worker.index, worker.attempt):
                self.violations.append(f"{name} waits for {worker.pod}, which does not exist")
            elif worker.attempt < read_attempt(name) and (pod.has_ended or pod.deletion or pod.node in self.lost):
                self.violations.append(f"{name} waits for {worker.pod}, which will not call")

    def delete(self, kind: str, name: str, uid: str) -> None:
        if (kind, name) in self.foreign:
            self.violations.append(f"deleted the foreign {kind} {name}")
        if kind == "TrainingJob":
            assert self.job is not None
            assert uid == self.job["metadata"]["uid"]
            self.job, self.pods, self.children = None, {}, {}
        elif kind == "Pod":
            pod = self.pods.get(name)
            if pod is not None and pod.uid == uid and pod.deletion is None:
                if pod.node:
                    self.change(name, deletion=self.now + GRACE, deletion_grace=GRACE.seconds)
                else:
                    self.change(name, deletion=self.now)
                    self._finish_deletion(name)
        elif (kind, name) in self.children and self.children[kind, name].uid == uid:
            del self.children[kind, name]

    def release(self, name: str, uid: str) -> None:
        """Remove our finalizer from a pod."""
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return
        self.change(name, finalizers=())
        if name in self.freed:
            self._finish_deletion(name)

    def _finish_deletion(self, name: str) -> None:
        """Remove a deleted pod that has ended, unless a finalizer keeps it."""
        if self.pods[name].finalizers:
            self.freed.add(name)
        else:
            self.remove(name)

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
