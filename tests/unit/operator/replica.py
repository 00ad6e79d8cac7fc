"""A replica of the operator with its threads and queue, on an API server in memory. tests/cluster has a real server."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from simulated_api_server import apply_merge_patch
from simulated_job import build_job

from topkube.job import KIND
from topkube_operator.control.controller import Controller
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.control.plan_executor import ControlContext
from topkube_operator.model import names
from topkube_operator.model.observed import Policy
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import WorkQueue

KEY = ("team", "train")
LAUNCHER_POD = "train-launcher-1-uid-o"
"""The first launcher pod of the job `train`. Its name ends in the first letters of the job's UID, uid-of-train."""
Manifest = dict[str, Any]


class ReplicaServer:
    """An API server that creates, reads and patches. It refuses writes while `acting` is false, as `Cluster` does."""

    def __init__(self) -> None:
        self.acting, self.objects, self.lock = True, dict[tuple[str, ...], Manifest](), threading.Lock()
        self.before_create: Callable[[Manifest], None] = lambda manifest: None
        self.change_back: Callable[[Manifest], bool] = lambda item: False
        """Changes a child that was just written, as a policy engine does. Returns True if it has changed the child."""
        self.written: list[tuple[str, str]] = []
        """Kind and name of all objects that were created or applied."""
        self.claims_read: list[tuple[str, str]] = []
        self._numbers = itertools.count(1)

    def store(self, item: Manifest) -> Manifest:
        """Store an object under a new resource version. Return a copy."""
        item = copy.deepcopy(item)
        number, metadata = next(self._numbers), item["metadata"]
        metadata.update(uid=metadata.get("uid") or f"uid-{number}", resourceVersion=str(number))
        if item["kind"] == "Service":
            item["spec"].setdefault("clusterIP", "10.96.0.9")
        self.objects[item["kind"], metadata["namespace"], metadata["name"]] = item
        return copy.deepcopy(item)

    def create(self, manifest: Manifest) -> Manifest:
        self.before_create(manifest)
        with self.lock:
            self._check_leading()
            metadata = manifest["metadata"]
            if (manifest["kind"], metadata["namespace"], metadata["name"]) in self.objects:
                raise ApiError(409, "exists", "AlreadyExists")
            return self._store_child(manifest)

    def apply(self, manifest: Manifest) -> Manifest:
        with self.lock:
            self._check_leading()
            metadata = manifest["metadata"]
            return self._store_child(
                apply_merge_patch(self.objects[manifest["kind"], metadata["namespace"], metadata["name"]], manifest)
            )

    def _store_child(self, manifest: Manifest) -> Manifest:
        """Store a child. Return it with the changes of the policy engine."""
        self.written.append((manifest["kind"], manifest["metadata"]["name"]))
        item = self.store(manifest)
        if self.change_back(item):
            item["metadata"]["managedFields"] = [{"manager": "topkube-operator"}, {"manager": "kyverno"}]
            item = self.store(item)
        return item

    def get(self, *name: str) -> Manifest:
        with self.lock:
            if name not in self.objects:
                raise ApiError(404, "not found")
            return copy.deepcopy(self.objects[name])

    def patch(self, kind: str, namespace: str, name: str, patch: Manifest, subresource: str = "") -> Manifest:
        with self.lock:
            self._check_leading()
            before = self.objects[kind, namespace, name]
            patch["metadata"].pop("resourceVersion", None)
            return self.store(apply_merge_patch(before, patch))

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> Manifest:
        with self.lock:
            self._check_leading()
            item = self.objects[kind, namespace, name]
            assert item["metadata"]["uid"] == uid
            if ended and not item["metadata"].get("finalizers"):
                del self.objects[kind, namespace, name]
            return item

    def read_log_tail(self, *_: object) -> str:
        return ""

    def remove_finalizer(self, namespace: str, pod: str, uid: str) -> Manifest:
        with self.lock:
            self._check_leading()
            if ("Pod", namespace, pod) not in self.objects:
                raise ApiError(404, "not found")
            pod_object = self.objects["Pod", namespace, pod]
            assert pod_object["metadata"]["uid"] == uid
            pod_object["metadata"]["finalizers"] = [
                finalizer for finalizer in pod_object["metadata"].get("finalizers") or () if finalizer != names.ENDING
            ]
            return self.store(pod_object)

    def end_pod_group(self, namespace: str, pod: str, uid: str) -> Manifest:
        return self.patch("Pod", namespace, pod, {"metadata": {"annotations": {names.KUEUE_RETRIABLE: "false"}}})

    def read_claim(self, namespace: str, name: str) -> Manifest | None:
        self.claims_read.append((namespace, name))
        return {"spec": {"accessModes": ["ReadWriteOnce"]}}

    def list_names(self, kind: str) -> set[str]:
        with self.lock:
            return {name for item_kind, _, name in self.objects if item_kind == kind}

    def _check_leading(self) -> None:
        if not self.acting:
            raise ApiError(0, "this replica does not lead", "NotLeading")


class RecordedEvents:
    """Records Events in place of the cluster."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.events: list[tuple[str, str, str]] = []
        """(namespace, reason, message)."""

    def record(self, metadata: Manifest, events: Any) -> None:
        self.reasons += [event.reason for event in events]
        self.events += [(metadata["namespace"], event.reason, event.message) for event in events]


class Replica:
    """A replica of the operator: its controller runs, with the server, the watch cache and the work queue."""

    def __init__(self) -> None:
        self.server, self.cache, self.queue = ReplicaServer(), WatchCache(), WorkQueue()
        server: Any = self.server
        self.recorded = RecordedEvents()
        recorder: Any = self.recorded
        context = ControlContext(server, self.cache, self.queue, recorder, OperatorMetrics(self.cache.list_jobs))
        self.controller = Controller(context, lambda _: Policy(seed=b"s" * 32), lambda: self.server.acting)
        self.controller.start()

    def create_job(self, name: str = "train", **spec: Any) -> None:
        """Create a job and report it to the operator once, as kopf does."""
        new_job = build_job(**spec)
        new_job["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
        self.cache.put_job(self.server.store(new_job))
        self.queue.add(("team", name))

    def is_idle(self) -> bool:
        return self.queue.measure_oldest_wait() == 0

    def find_condition(self, kind: str) -> Manifest:
        status = self.server.get(KIND, *KEY).get("status") or {}
        return next((condition for condition in status.get("conditions") or () if condition["type"] == kind), {})


def wait_until(holds: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)
