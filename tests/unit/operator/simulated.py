"""A cluster in memory that carries out plans: one job, its pods, kubelets, nodes, and other people's objects.

The simulation acts as the API server, the kubelets and the garbage collector, one step at a time, and records every
violation of a promise: no foreign object changes, no pod is made before its attempt is in the status, and every name is
used once.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube.launch import contract
from topkube.timestamps import format_timestamp
from topkube_operator.model import names
from topkube_operator.model.nodes import NodeFailure
from topkube_operator.model.observed import Child, Container, LauncherReport, Observed, Pod, Policy, Trouble
from topkube_operator.model.plan import Plan
from topkube_operator.planning import attempts, planner

START = datetime(2026, 1, 1, tzinfo=UTC)
GRACE = timedelta(seconds=30)
UID = "uid-1"
"""Of the job. The names of its pods end in it."""
NODES = ("node-a", "node-b", "node-c", "node-d")
RANK_FAILED = {"pod": "train-worker-1-1-uid-1", "rank": 3, "reason": "Error", "exitCode": 3, "message": "rank 3 failed"}


class Crash(Exception):
    """The operator was killed."""


def read_attempt(name: str) -> int:
    return int(name.removesuffix(f"-{UID}").rpartition("-")[2])


def build_job(**spec: Any) -> dict[str, Any]:
    """Return a stored TrainingJob."""
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "train", "namespace": "team", "uid": UID, "generation": 1},
        "spec": {"workers": 2, "slotsPerWorker": 2, "template": {"spec": {"containers": [container]}}, **spec},
    }


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the result of a merge patch (RFC 7386): mappings are merged, null removes."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


class Simulated:
    """A simulated cluster. `job` is the stored job. The operator dies after `crash_after` writes."""

    def __init__(self, stored: dict[str, Any], policy: Policy | None = None) -> None:
        self.job: dict[str, Any] | None = copy.deepcopy(stored)
        self.now = START
        self.pods: dict[str, Pod] = {}
        self.children: dict[tuple[str, str], Child] = {}
        self.foreign: set[tuple[str, str]] = set()
        self.freed: set[str] = set()
        """Deleted pods that only a finalizer keeps."""
        self.lost: set[str] = set()
        self.removed_at: dict[str, datetime] = {}
        self.last_seen: dict[str, Pod] = {}
        self.report: LauncherReport | None = None
        self.troubles: dict[tuple[str, str], Trouble] = {}
        self.paused: set[tuple[str, str]] = set()
        self.logs: dict[str, str] = {}
        self.policy = policy or Policy(seed=b"s" * 32)
        self.violations: list[str] = []
        self.events: list[str] = []
        self.crash_after: int | None = None
        self.resumes = 0
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        """Objects of the whole cluster, by kind and name."""
        self.known: dict[tuple[str, str], dict[str, Any]] = {}
        """The objects that the operator has read."""
        self.manifests: dict[str, dict[str, Any]] = {}
        """What was made last, by name."""
        self.node_cache = False
        self.node_faults: dict[str, str] = {}
        self.node_failures: tuple[NodeFailure, ...] = ()
        self.avoided: dict[str, set[str]] = {}
        """The nodes that each pod may not use."""
        self._uids = itertools.count(1)

    # The operator.

    def observe(self) -> Observed:
        return Observed(
            tuple(self.pods.values()),
            dict(self.children),
            dict(self.troubles),
            frozenset(self.paused),
            frozenset(self.lost),
            self.report,
            dict(self.removed_at),
            dict(self.last_seen),
            dict(self.logs),
            self.policy,
            dict(self.known),
            self.node_cache,
            nodes=len(NODES) - len(self.lost),
            node_faults=dict(self.node_faults),
            node_failures=self.node_failures,
        )

    def plan(self) -> Plan:
        assert self.job is not None
        return planner.plan(self.job, self.observe(), self.now)

    def reconcile(self, rounds: int = 12) -> Plan:
        """Reconcile as the controller does with one key. Return the last plan."""
        for _ in range(rounds):
            if self.job is None:
                return Plan()
            plan = self.plan()
            if plan.logs:
                self.logs |= {request.pod: f"the log of {request.pod}" for request in plan.logs}
                continue
            if plan.reads:
                self.known |= {
                    (read.kind, read.name): self.objects.get((read.kind, read.name), {}) for read in plan.reads
                }
                continue
            if plan.is_empty:
                return plan
            try:
                if not self.carry_out(plan):
                    return plan
            except Crash:
                self.report, self.troubles, self.logs, self.removed_at, self.last_seen = None, {}, {}, {}, {}
                self.crash_after = None
        self.violations.append(f"no rest after {rounds} rounds: {plan}")
        return plan

    def carry_out(self, plan: Plan) -> bool:
        """Carry out a plan. Return True if everything could be made."""
        assert self.job is not None
        if plan.status:
            self._write()
            status = merge_patch(self.job.get("status"), plan.status)
            before = (self.job.get("status") or {}).get("attempt", 0)
            if isinstance(before, int) and status.get("attempt", 0) < before:
                self.violations.append(f"attempt {status.get('attempt')} after {before}")
            self.job["status"] = status
            self.events += [event.reason for event in plan.events]
        for end in plan.end_groups:
            self._write()
            if end.name in self.pods:
                self.change(end.name, is_retriable=False)
        for release in plan.release:
            self._write()
            self.release(release.name, release.uid)
        for deletion in plan.delete:
            self._write()
            self.delete(deletion.kind, deletion.name, deletion.uid)
        for change in plan.patches:
            self._write()
            child = self.children[change.kind, change.name]
            assert (child.uid, child.version) == (change.uid, change.version)
            content = {**child.content, "status": merge_patch(child.content["status"], change.status)}
            self.put_child(dataclasses.replace(child, content=content))
        self.troubles = {key: trouble for key, trouble in self.troubles.items() if trouble.reason == "Contested"}
        for stage in plan.apply:
            for manifest in stage:
                self._write()
                self.apply(manifest)
            if any(trouble.reason != "Contested" for trouble in self.troubles.values()):
                return False
        return True

    def _write(self) -> None:
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                raise Crash

    # The API server.

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
            self._make_pod(manifest, name, uid)
            return
        content = copy.deepcopy(manifest)
        if kind == "Service":
            content["spec"].setdefault("clusterIP", f"10.96.0.{next(self._uids) % 250}")
            known = self.children.get((kind, name))
            if known is not None:
                content["spec"]["clusterIP"] = known.content["clusterIP"]
        content["metadata"]["uid"] = uid
        self.manifests[name] = manifest
        self.children[kind, name] = Child.from_object(kind, content)

    def put_child(self, child: Child) -> None:
        """Store a changed child under a new version."""
        self.children[child.kind, child.name] = dataclasses.replace(child, version=str(next(self._uids)))

    def _make_pod(self, manifest: dict[str, Any], name: str, uid: str) -> None:
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
        launchers = [
            launcher
            for launcher in self.pods.values()
            if attempts.is_launcher_pod(launcher, launcher.attempt) and launcher.is_active
        ]
        if attempts.is_launcher_pod(pod, pod.attempt) and any(launcher.deletion is None for launcher in launchers):
            self.violations.append(f"{name} beside {[launcher.name for launcher in launchers]}")
        if attempts.is_launcher_pod(pod, pod.attempt):
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

    # The nodes.

    def change(self, name: str, **changes: Any) -> None:
        self.pods[name] = dataclasses.replace(self.pods[name], **changes)

    def remove(self, name: str) -> None:
        self.freed.discard(name)
        self.last_seen[name] = self.pods.pop(name)
        self.removed_at[name] = self.now

    def schedule(self) -> None:
        """Assign every pod a node that is not lost, and that the pod may use."""
        for name, pod in self.pods.items():
            free = [node for node in NODES if node not in self.lost | self.avoided.get(name, set())]
            if not pod.node and free:
                self.change(
                    name,
                    node=free[len(name.removesuffix(f"-{UID}")) % len(free)],
                    scheduled=self.now,
                    scheduling_message="",
                )

    def run(self) -> None:
        """Act as the kubelets: start scheduled pods and remove deleted pods."""
        for name, pod in list(self.pods.items()):
            if pod.node in self.lost or not pod.node:
                continue
            if pod.deletion is not None:
                for container in pod.containers if pod.phase == "Running" and pod.finalizers else ():
                    self.end(name, 143, container)
                self._finish_deletion(name)
            elif pod.phase == "Pending":
                started = {container_name: Container(started=self.now) for container_name in self.list_containers(pod)}
                self.change(name, phase="Running", ready=True, address="10.0.0.1", containers=started)

    def list_containers(self, pod: Pod) -> list[str]:
        beside = ["launcher"] if pod.role == "worker" and pod.workers else []
        return [pod.main_container, *beside]

    def end(self, name: str, code: int, container: str = "", **more: Any) -> None:
        """End a container of a running pod."""
        pod = self.pods[name]
        container = container or pod.main_container
        if pod.phase != "Running" or pod.node in self.lost:
            return
        before = pod.containers[container]
        if before.exit_code is not None:
            return
        ended = dataclasses.replace(before, exit_code=code, ended=self.now, **more)
        containers = {**pod.containers, container: ended}
        codes = [item.exit_code for item in containers.values()]
        phase = "Running" if None in codes else ("Succeeded" if not any(codes) else "Failed")
        self.change(name, containers=containers, phase=phase, ready=phase == "Running")

    @property
    def launcher(self) -> Pod | None:
        stored = (self.job or {}).get("status") or {}
        return next(
            (pod for pod in self.pods.values() if attempts.is_launcher_pod(pod, stored.get("attempt", 0))), None
        )

    def end_launcher(self, code: int, failure: dict[str, Any] | None = None) -> None:
        pod = self.launcher
        if pod is not None and pod.phase == "Running":
            ending = contract.Ending.model_validate(
                {
                    "attempt": pod.attempt,
                    "state": "Failed" if code else "Succeeded",
                    "exitCode": code,
                    "firstFailure": failure,
                }
            )
            self.end(pod.name, code, "launcher", ended_message=ending.to_message())

    def report_state(self, state: str, missing: tuple[int, ...] = ()) -> None:
        """Let the launcher of the current attempt answer the operator."""
        pod = self.launcher
        if (
            pod is not None
            and pod.phase == "Running"
            and pod.launcher_container.exit_code is None
            and pod.node not in self.lost
        ):
            self.report = LauncherReport(pod.attempt, state, pod.workers - len(missing), missing, self.now)

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # The owner of the job.

    @property
    def status(self) -> dict[str, Any]:
        return (self.job or {}).get("status") or {}

    def find_condition(self, kind: str) -> dict[str, Any]:
        return next((condition for condition in self.status.get("conditions", []) if condition["type"] == kind), {})

    def edit(self, **spec: Any) -> None:
        if self.job is not None:
            self.job["spec"] = {**self.job["spec"], **spec}
            self.job["metadata"]["generation"] += 1

    def edit_policy(self, **policy: Any) -> None:
        if self.job is not None:
            self.edit(runPolicy={**self.job["spec"].get("runPolicy", {}), **policy})

    def start_ranks(self) -> None:
        """Reconcile until ranks run."""
        self.reconcile()
        self.schedule()
        self.run()
        self.reconcile()
        self.report_state("Running")
        self.reconcile()


def start_running_job(**spec: Any) -> Simulated:
    """Return a cluster with a job whose ranks run."""
    world = Simulated(build_job(**spec))
    world.start_ranks()
    assert world.status["phase"] == "Running", world.status
    return world
