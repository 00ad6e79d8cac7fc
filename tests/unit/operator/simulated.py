"""A cluster in memory that carries plans out: one job, its pods, kubelets, nodes, and other people's objects.

It does what the API server, kubelets and the garbage collector would do, one step at a time, and notes every violation
of a promise: nothing foreign is touched, no pod is made before its attempt is in the status, names are made once.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube.launch import contract
from topkube_operator import attempts, reconcile
from topkube_operator.observed import Child, Container, Observed, Pod, Policy, Report, Trouble, written
from topkube_operator.plans import Plan

START = datetime(2026, 1, 1, tzinfo=UTC)
GRACE = timedelta(seconds=30)
NODES = ("node-a", "node-b", "node-c", "node-d")
RANK_FAILED = {"pod": "train-worker-1-1", "rank": 3, "reason": "Error", "exitCode": 3, "message": "rank 3 failed"}


class Crash(Exception):
    """The operator is killed here."""


def pod_attempt(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


def job(**spec: Any) -> dict[str, Any]:
    """A stored TrainingJob."""
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "train", "namespace": "team", "uid": "uid-1", "generation": 1},
        "spec": {"workers": 2, "slotsPerWorker": 2, "template": {"spec": {"containers": [container]}}, **spec},
    }


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it: mappings are merged, null removes."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


class Simulated:
    """`job` is what is stored. `crash_after`: the operator dies after so many writes."""

    def __init__(self, stored: dict[str, Any], policy: Policy | None = None) -> None:
        self.job: dict[str, Any] | None = copy.deepcopy(stored)
        self.now = START
        self.pods: dict[str, Pod] = {}
        self.children: dict[tuple[str, str], Child] = {}
        self.foreign: set[tuple[str, str]] = set()
        self.lost: set[str] = set()
        self.gone: dict[str, datetime] = {}
        self.last: dict[str, Pod] = {}
        self.report: Report | None = None
        self.troubles: dict[tuple[str, str], Trouble] = {}
        self.logs: dict[str, str] = {}
        self.policy = policy or Policy(seed=b"s" * 32)
        self.violations: list[str] = []
        self.events: list[str] = []
        self.crash_after: int | None = None
        self.resumes = 0
        self.node_cache = False
        self._uids = itertools.count(1)

    # The operator.

    def observed(self) -> Observed:
        return Observed(
            tuple(self.pods.values()),
            dict(self.children),
            dict(self.troubles),
            frozenset(self.lost),
            self.report,
            dict(self.gone),
            dict(self.last),
            dict(self.logs),
            self.policy,
            self.node_cache,
        )

    def plan(self) -> Plan:
        assert self.job is not None
        return reconcile.plan(self.job, self.observed(), self.now)

    def reconcile(self, rounds: int = 12) -> Plan:
        """What the controller does with one key; gives the last plan."""
        for _ in range(rounds):
            if self.job is None:
                return Plan()
            plan = self.plan()
            if plan.logs:
                self.logs |= {request.pod: f"the log of {request.pod}" for request in plan.logs}
                continue
            if plan.idle:
                return plan
            try:
                if not self.carry_out(plan):
                    return plan
            except Crash:
                self.report, self.troubles, self.logs, self.gone, self.last = None, {}, {}, {}, {}
                self.crash_after = None
        self.violations.append(f"no rest after {rounds} rounds: {plan}")
        return plan

    def carry_out(self, plan: Plan) -> bool:
        """Gives whether all could be made."""
        assert self.job is not None
        if plan.status:
            self._write()
            status = merged(self.job.get("status"), plan.status)
            before = (self.job.get("status") or {}).get("attempt", 0)
            if isinstance(before, int) and status.get("attempt", 0) < before:
                self.violations.append(f"attempt {status.get('attempt')} after {before}")
            self.job["status"] = status
            self.events += [event.reason for event in plan.events]
        for deletion in plan.delete:
            self._write()
            self.delete(deletion.kind, deletion.name, deletion.uid)
        self.troubles = {}
        for stage in plan.apply:
            for manifest in stage:
                self._write()
                self.apply(manifest)
            if self.troubles:
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
        assert [one["uid"] for one in metadata["ownerReferences"]] == [self.job["metadata"]["uid"]]
        if (kind, name) in self.foreign:
            self.troubles[kind, name] = Trouble("ForeignObject", "somebody else's")
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
        self.children[kind, name] = Child.from_object(kind, content)

    def _make_pod(self, manifest: dict[str, Any], name: str, uid: str) -> None:
        assert self.job is not None
        if name in self.pods:
            return
        stored = self.job.get("status") or {}
        manifest["metadata"] |= {"uid": uid, "creationTimestamp": written(self.now)}
        pod = Pod.from_object(manifest)
        if pod.attempt != stored.get("attempt"):
            self.violations.append(f"{name} made while the status says attempt {stored.get('attempt')}")
        if stored.get("phase") in ("Succeeded", "Failed", "Suspended"):
            self.violations.append(f"{name} made in phase {stored.get('phase')}")
        launchers = [one for one in self.pods.values() if attempts.launches(one, one.attempt) and one.active]
        if attempts.launches(pod, pod.attempt) and any(one.deletion is None for one in launchers):
            self.violations.append(f"{name} beside {[one.name for one in launchers]}")
        if attempts.launches(pod, pod.attempt):
            self._check_expected(manifest, name)
        self.pods[name] = pod

    def _check_expected(self, manifest: dict[str, Any], name: str) -> None:
        """A launcher waits for the workers in its plan: all must be there, and able to come."""
        container = next(one for one in manifest["spec"]["containers"] if one["name"] == "launcher")
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
            elif worker.attempt < pod_attempt(name) and (pod.over or pod.deletion or pod.node in self.lost):
                self.violations.append(f"{name} waits for {worker.pod}, which will not come")

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
                    self.change(name, deletion=self.now + GRACE)
                else:
                    self.remove(name)
        elif (kind, name) in self.children and self.children[kind, name].uid == uid:
            del self.children[kind, name]

    # The nodes.

    def change(self, name: str, **changes: Any) -> None:
        self.pods[name] = dataclasses.replace(self.pods[name], **changes)

    def remove(self, name: str) -> None:
        self.last[name] = self.pods.pop(name)
        self.gone[name] = self.now

    def schedule(self) -> None:
        """Gives every pod a node that is not lost."""
        free = [node for node in NODES if node not in self.lost]
        for name, pod in self.pods.items():
            if not pod.node and free:
                self.change(name, node=free[len(name) % len(free)])

    def run(self) -> None:
        """Kubelets start what is scheduled and take away what is deleted."""
        for name, pod in list(self.pods.items()):
            if pod.node in self.lost or not pod.node:
                continue
            if pod.deletion is not None:
                self.remove(name)
            elif pod.phase == "Pending":
                started = {one: Container(started=self.now) for one in self.containers(pod)}
                self.change(name, phase="Running", ready=True, address="10.0.0.1", containers=started)

    def containers(self, pod: Pod) -> list[str]:
        beside = ["launcher"] if pod.role == "worker" and pod.workers else []
        return [pod.main, *beside]

    def end(self, name: str, code: int, container: str = "", **more: Any) -> None:
        """A container of a running pod ends."""
        pod = self.pods[name]
        container = container or pod.main
        if pod.phase != "Running" or pod.node in self.lost:
            return
        before = pod.containers[container]
        if before.exit_code is not None:
            return
        ended = dataclasses.replace(before, exit_code=code, ended=self.now, **more)
        containers = {**pod.containers, container: ended}
        codes = [one.exit_code for one in containers.values()]
        phase = "Running" if None in codes else ("Succeeded" if not any(codes) else "Failed")
        self.change(name, containers=containers, phase=phase, ready=phase == "Running")

    def launcher(self) -> Pod | None:
        stored = (self.job or {}).get("status") or {}
        return next((pod for pod in self.pods.values() if attempts.launches(pod, stored.get("attempt", 0))), None)

    def end_launcher(self, code: int, failure: dict[str, Any] | None = None) -> None:
        pod = self.launcher()
        if pod is not None and pod.phase == "Running":
            ending = contract.Ending.model_validate(
                {
                    "attempt": pod.attempt,
                    "state": "Failed" if code else "Succeeded",
                    "exitCode": code,
                    "firstFailure": failure,
                }
            )
            self.end(pod.name, code, "launcher", ended_message=ending.message())

    def say(self, state: str, missing: tuple[int, ...] = ()) -> None:
        """The launcher of the current attempt answers the operator."""
        pod = self.launcher()
        if pod is not None and pod.phase == "Running" and pod.launching.exit_code is None and pod.node not in self.lost:
            self.report = Report(pod.attempt, state, pod.workers - len(missing), missing, self.now)

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # The job's owner.

    def status(self) -> dict[str, Any]:
        return (self.job or {}).get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        return next((one for one in self.status().get("conditions", []) if one["type"] == kind), {})

    def edit(self, **spec: Any) -> None:
        if self.job is not None:
            self.job["spec"] = {**self.job["spec"], **spec}
            self.job["metadata"]["generation"] += 1

    def policy_edit(self, **policy: Any) -> None:
        if self.job is not None:
            self.edit(runPolicy={**self.job["spec"].get("runPolicy", {}), **policy})

    def to_running(self) -> None:
        """Until ranks run."""
        self.reconcile()
        self.schedule()
        self.run()
        self.reconcile()
        self.say("Running")
        self.reconcile()


def running(**spec: Any) -> Simulated:
    """A job whose ranks run."""
    world = Simulated(job(**spec))
    world.to_running()
    assert world.status()["phase"] == "Running", world.status()
    return world
