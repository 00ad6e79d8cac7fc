"""From the store through `reconcile.plan` to the cluster: threads that take jobs from the queue and carry plans out.

The status goes first, guarded by the version of the object that the plan was made for. Answers go into the store, so
that the next plan, made at once, sees them; a job is done when its plan is empty.
"""

from __future__ import annotations

import contextlib
import http
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from topkube.job import KIND
from topkube_operator import reconcile
from topkube_operator.cluster import ApiError, Cluster
from topkube_operator.failures import LOG_TAIL_BYTES, LOG_TAIL_LINES
from topkube_operator.metrics import OperatorMetrics
from topkube_operator.observed import Child, Policy, Report, Trouble
from topkube_operator.plans import Deletion, Plan
from topkube_operator.queue import Key, WorkQueue
from topkube_operator.recorder import Recorder
from topkube_operator.store import Store, controller

_log = logging.getLogger(__name__)
WORKERS, CALLS = 8, 24
_ROUNDS = 12
_SOON, _PROGRESS = 1.0, 15.0
_LONGEST_PAUSE = 60.0
_LOOK_AGAIN = 0.5


@dataclass
class _Memory:
    """What is remembered of one job, by UID. All of it may be lost at any time."""

    report: Report | None = None
    troubles: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    patched: float = float("-inf")
    failures: int = 0
    again: float = 0.0
    """Before this time nothing is made: the last try failed."""


class Controller:
    """Reconciles jobs while `acting` says so, by the admin's `policy` for each."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        queue: WorkQueue,
        recorder: Recorder,
        metrics: OperatorMetrics,
        policy: Callable[[Mapping[str, Any]], Policy],
        acting: Callable[[], bool],
    ) -> None:
        self._cluster, self._store, self._queue = cluster, store, queue
        self._recorder, self._metrics, self._policy, self._acting = recorder, metrics, policy, acting
        self._memories: dict[str, _Memory] = {}
        self._uids: dict[Key, str] = {}
        self._passed: set[Key] = set()
        """Jobs that came while this replica might not write."""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._calls = ThreadPoolExecutor(CALLS, "call")
        self._threads = [
            threading.Thread(target=self._work, name=f"reconcile-{index}", daemon=True) for index in range(WORKERS)
        ]
        self._threads.append(threading.Thread(target=self._bring_back, name="bring-back", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._queue.close()
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5)
        self._calls.shutdown(wait=False, cancel_futures=True)

    def hear(self, key: Key, uid: str, report: Report) -> None:
        """Takes what a launcher said; wakes its job where that is news."""
        memory = self._memory(key, uid)
        before, memory.report = memory.report, report
        if before is None or _said(before) != _said(report):
            self._queue.add(key)

    def woken(self, keys: Iterable[Key]) -> None:
        """There is news for these jobs."""
        for key in keys:
            self._queue.add(key)

    def everything(self) -> None:
        """Looks at all jobs: this replica has begun to lead."""
        with self._lock:
            self._memories.clear()
        for job in self._store.jobs():
            self._queue.add((job["metadata"]["namespace"], job["metadata"]["name"]))

    def _memory(self, key: Key, uid: str) -> _Memory:
        with self._lock:
            before = self._uids.get(key)
            if before is not None and before != uid:
                self._memories.pop(before, None)
            self._uids[key] = uid
            return self._memories.setdefault(uid, _Memory())

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._memories.pop(self._uids.pop(key, ""), None)

    def _work(self) -> None:
        while (key := self._queue.get()) is not None:
            begun, outcome = time.monotonic(), "error"
            try:
                outcome = "changed" if self.reconcile(key) else "unchanged"
            except ApiError as error:
                if error.reason == "NotLeading":
                    self._pass(key)
                else:
                    _log.warning("%s/%s: %s", *key, error)
                    self._queue.add_after(key, self._backoff(key))
            except Exception:
                _log.exception("%s/%s: the reconcile failed", *key)
                self._queue.add_after(key, self._backoff(key))
            finally:
                self._queue.done(key)
                self._metrics.reconciled(time.monotonic() - begun, outcome)

    def _pass(self, key: Key) -> None:
        with self._lock:
            self._passed.add(key)

    def _bring_back(self) -> None:
        """Takes up what was passed over, once this replica may write: it leads and has listed everything, or a renewal
        of its Lease that was late has come. No event would."""
        while not self._stopped.wait(_LOOK_AGAIN):
            if self._passed and self._acting():
                with self._lock:
                    keys, self._passed = self._passed, set()
                self.woken(keys)

    def _backoff(self, key: Key) -> float:
        job = self._store.job(key)
        if job is None:
            return 1.0
        memory = self._memory(key, job["metadata"]["uid"])
        memory.failures += 1
        return float(min(0.5 * 2.0 ** min(memory.failures, 10), _LONGEST_PAUSE))

    def reconcile(self, key: Key) -> bool:
        """Brings one job to where it should be; gives whether anything was written."""
        wrote = False
        if self._acting():
            self._sweep(key)
        for _ in range(_ROUNDS):
            job = self._store.job(key)
            if job is None:
                self._forget(key)
                return wrote
            if not self._acting():
                self._pass(key)
                return wrote
            memory = self._memory(key, job["metadata"]["uid"])
            observed = self._store.observe(
                job["metadata"]["uid"], self._policy(job), memory.report, memory.troubles, memory.logs, job
            )
            plan = reconcile.plan(job, observed, datetime.now(UTC))
            if plan.logs:
                self._read_logs(key, plan, memory)
                continue
            go_on, done = self._carry_out(key, job, plan, memory)
            wrote = wrote or done
            if plan.requeue is not None:
                self._queue.add_after(key, plan.requeue)
            if not go_on:
                return wrote
        self._queue.add_after(key, 1.0)
        return wrote

    def _sweep(self, key: Key) -> None:
        """Removes pods that are being deleted and in which nothing runs. Kubelets do that, at once or, where one (1.20)
        has missed the end of a container or waits for a volume of a Secret that is gone, after a minute or two."""
        now = datetime.now(UTC)
        for pod in self._store.left_behind(key):
            assert pod.overdue is not None
            left = (pod.overdue - now).total_seconds()
            if left > 0:
                self._queue.add_after(key, left)
                continue
            with contextlib.suppress(ApiError):  # it is gone by now, or we are told of it again
                self._cluster.delete("Pod", key[0], pod.name, pod.uid, ended=True)

    def _read_logs(self, key: Key, plan: Plan, memory: _Memory) -> None:
        for request in plan.logs:
            text = self._cluster.log_tail(key[0], request.pod, request.container, LOG_TAIL_LINES, LOG_TAIL_BYTES)
            memory.logs[request.pod] = text

    def _carry_out(self, key: Key, job: dict[str, Any], plan: Plan, memory: _Memory) -> tuple[bool, bool]:
        """Gives whether to plan again, and whether anything was written."""
        now = time.monotonic()
        waiting = memory.again - now
        apply = plan.apply if waiting <= 0 else ()
        if plan.apply and not apply:
            self._queue.add_after(key, waiting)
        patch = plan.status
        if patch and plan.urgency != "now" and not plan.delete and not apply:
            due = memory.patched + (_SOON if plan.urgency == "soon" else _PROGRESS)
            if now < due:
                self._queue.add_after(key, due - now)
                patch = {}
        if patch:
            written = self._write_status(key, job, patch)
            if written is None:
                return True, False
            memory.patched = now
            if written:
                self._tell(job, plan)
            else:  # the CRD is older than this operator and drops what it does not know: no use in trying again
                patch = {}
        if plan.delete:
            self._each(lambda deletion: self._delete(key, deletion), plan.delete)
        if apply:
            memory.logs.clear()
            self._make(key, job, apply, memory)
        return bool(patch or plan.delete or apply), bool(patch or plan.delete or apply)

    def _tell(self, job: dict[str, Any], plan: Plan) -> None:
        self._recorder.record(job["metadata"], plan.events)
        if plan.phase and plan.status.get("phase") == plan.phase:
            self._metrics.entered(plan.phase)
        if plan.restarted:
            self._metrics.restarted(plan.restarted)
        if plan.started is not None:
            self._metrics.started(plan.started)

    def _write_status(self, key: Key, job: dict[str, Any], patch: Any) -> bool | None:
        """Whether the patch changed anything; None where it could not be written, because the job is another."""
        metadata = job["metadata"]
        guard = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        try:
            answer = self._cluster.patch(KIND, *key, {"metadata": guard, "status": dict(patch)}, subresource="status")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                self._store.remove_job(key, metadata["uid"])
                return None
            if error.status != http.HTTPStatus.CONFLICT:
                raise
            self._read_again(key, metadata["uid"])
            return None
        self._store.put_job(answer)
        return bool(answer["metadata"]["resourceVersion"] != metadata["resourceVersion"])

    def _read_again(self, key: Key, uid: str) -> None:
        """After a conflict: the object has changed, or is another one by now."""
        try:
            answer = self._cluster.get(KIND, *key)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            self._store.remove_job(key, uid)
            return
        if answer["metadata"]["uid"] != uid:
            self._store.remove_job(key, uid)
        self._store.put_job(answer)

    def _delete(self, key: Key, deletion: Deletion) -> None:
        name = (key[0], deletion.name)
        try:
            answer = self._cluster.delete(deletion.kind, *name, deletion.uid)
        except ApiError as error:
            if error.status not in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT):
                raise
            answer = {}
        if deletion.kind == KIND:
            self._store.remove_job(key, deletion.uid)
        elif answer.get("kind") == deletion.kind and answer["metadata"].get("deletionTimestamp"):
            self._store.put(deletion.kind, answer)
        else:
            self._store.remove(deletion.kind, name, deletion.uid)

    def _make(
        self, key: Key, job: dict[str, Any], stages: tuple[tuple[dict[str, Any], ...], ...], memory: _Memory
    ) -> None:
        """Makes all of a stage before the next; what cannot be made is remembered, and tried again later."""
        uid, troubles = job["metadata"]["uid"], dict[tuple[str, str], Trouble]()
        for stage in stages:
            for manifest, trouble in zip(
                stage, self._each(lambda one: self._make_one(one, key[1], uid), stage), strict=True
            ):
                if trouble is not None:
                    troubles[manifest["kind"], manifest["metadata"]["name"]] = trouble
            if troubles:
                break
        memory.troubles = troubles
        if not troubles:
            memory.failures, memory.again = 0, 0.0
        elif all(trouble.reason == "Terminating" for trouble in troubles.values()):
            memory.again = time.monotonic() + 1.0
        else:
            memory.again = time.monotonic() + self._backoff(key)

    def _make_one(self, manifest: dict[str, Any], job: str, uid: str) -> Trouble | None:
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = (metadata["namespace"], metadata["name"])
        try:
            known = None if kind == "Pod" else self._store.child(kind, name, uid)
            if known is not None:
                self._store.put(kind, self._change(known, manifest))
                return None
            self._store.put(kind, self._cluster.create(manifest))
            return None
        except ApiError as error:
            if error.status == http.HTTPStatus.CONFLICT and error.reason == "AlreadyExists":
                return self._taken(kind, name, job, uid)
            if error.status in (400, 403, 404, 409, 422):
                return Trouble("Refused", error.what)
            raise

    def _change(self, known: Child, manifest: dict[str, Any]) -> dict[str, Any]:
        """A child of ours as it should be. Tokens of pods that are gone go: apply would leave what create has made."""
        if known.kind != "Secret":
            return self._cluster.apply(manifest)
        stale: dict[str, None] = {item: None for item in known.content if item not in manifest["data"]}
        patch = {"metadata": {"uid": known.uid}, "data": {**stale, **manifest["data"]}}
        return self._cluster.patch("Secret", manifest["metadata"]["namespace"], known.name, patch)

    def _taken(self, kind: str, name: tuple[str, str], job: str, uid: str) -> Trouble | None:
        """An object of this name exists: ours, made by a call whose answer was lost, or somebody else's."""
        try:
            found = self._cluster.get(kind, *name)
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return Trouble("Terminating", "an object of this name is just being deleted")
            raise
        owner = controller(found)
        if owner is not None and owner[1] == uid:
            self._store.put(kind, found)
            return None
        if found["metadata"].get("deletionTimestamp") or (owner is not None and owner[0] == job):
            return Trouble("Terminating", "an object of this name, left by an earlier job, is being deleted")
        return Trouble("ForeignObject", "exists and does not belong to this job: delete it, or rename the job")

    def _each(self, call: Callable[[Any], Any], things: tuple[Any, ...]) -> list[Any]:
        if len(things) == 1:
            return [call(things[0])]
        return list(self._calls.map(call, things))


def _said(report: Report) -> tuple[Any, ...]:
    return report.attempt, report.state, report.joined, report.missing, report.progress, report.cache


__all__ = ["Controller"]
