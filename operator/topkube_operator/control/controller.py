"""The controller's loop: threads take jobs from the work queue, plan, and let the plan executor carry the plan out.

A job is planned again after every write, because the answers are in the watch cache by then, until its plan is empty.
"""

from __future__ import annotations

import contextlib
import http
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from topkube.job import KIND
from topkube_operator.control.job_memory import JobMemory
from topkube_operator.control.plan_executor import PROGRESS_SECONDS, ControlContext, PlanExecutor
from topkube_operator.model.observed import LauncherReport, Observed, Policy
from topkube_operator.model.plan import Release
from topkube_operator.model.status import Event
from topkube_operator.planning import planner
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.work_queue import Key

_log = logging.getLogger(__name__)
WORKERS = 16
"""Threads that reconcile."""
_MAX_ROUNDS = 12
"""The most plans in a row for one job. After them, other jobs come first."""
_ORPHAN_PAUSE_SECONDS = 60.0
"""The least seconds until orphans are released again after a failure."""
_UNSERVED_SECONDS = 30.0
"""The pause before a job is looked at again whose namespace is not served."""
_CHECK_SECONDS = 0.5
"""How often a replica checks if it may take up postponed jobs, and if pods belong to no job."""
_OWNERLESS_AT_ONCE = 10
"""The most pods without a job that are released at each check."""


class Controller:
    """Reconciles jobs while `is_acting` returns True. `policy` returns the admin's policy for a stored job. `serves`
    returns False for a namespace whose jobs must wait, because their pods cannot be listed."""

    def __init__(
        self,
        context: ControlContext,
        policy: Callable[[Mapping[str, Any]], Policy],
        is_acting: Callable[[], bool],
        serves: Callable[[str], bool] = lambda namespace: True,
    ) -> None:
        self._cluster, self._cache, self._queue = context.cluster, context.cache, context.queue
        self._recorder, self._metrics = context.recorder, context.metrics
        self._policy, self._is_acting, self._serves = policy, is_acting, serves
        self._executor = PlanExecutor(context)
        self._memories: dict[str, JobMemory] = {}
        """The memory of each job, by the job's UID."""
        self._uids: dict[Key, str] = {}
        self._postponed: set[Key] = set()
        """Jobs that became due while this replica was not allowed to write."""
        self._ownerless_from = 0.0
        """The time (monotonic) from which finalizers of pods without a job may be removed."""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._reconcile_due_jobs, name=f"reconcile-{index}", daemon=True)
            for index in range(WORKERS)
        ]
        self._threads.append(threading.Thread(target=self._resume_postponed, name="resume-postponed", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._queue.close()
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5)
        self._executor.close()

    def receive_report(self, key: Key, uid: str, report: LauncherReport) -> None:
        """Store a launcher's report. Wake its job if the report differs from the last one: now, or if only the progress
        differs, when the status may be written again."""
        memory = self._find_memory(key, uid)
        before, memory.report = memory.report, report
        if before is None or _list_waking_fields(before) != _list_waking_fields(report):
            self._queue.add(key)
        elif (before.progress, before.cache) != (report.progress, report.cache):
            self._queue.add_after(key, max(0.0, memory.patched_at + PROGRESS_SECONDS - time.monotonic()))

    def wake(self, keys: Iterable[Key]) -> None:
        """Make jobs due whose observed state has changed."""
        for key in keys:
            self._queue.add(key)

    def wake_all(self) -> None:
        """Make all jobs due, because this replica has begun to lead."""
        with self._lock:
            self._memories.clear()
        for job in self._cache.list_jobs():
            self._queue.add((job["metadata"]["namespace"], job["metadata"]["name"]))

    def _find_memory(self, key: Key, uid: str) -> JobMemory:
        with self._lock:
            before = self._uids.get(key)
            if before is not None and before != uid:
                self._memories.pop(before, None)
            self._uids[key] = uid
            return self._memories.setdefault(uid, JobMemory())

    def _forget_job(self, key: Key) -> None:
        with self._lock:
            self._memories.pop(self._uids.pop(key, ""), None)

    def _reconcile_due_jobs(self) -> None:
        while (key := self._queue.get()) is not None:
            begun, outcome = time.monotonic(), "error"
            try:
                outcome = "changed" if self.reconcile(key) else "unchanged"
                self._end_failures(key)
            except ApiError as error:
                if error.reason == "NotLeading":
                    outcome = "unchanged"
                    self._postpone_job(key)
                else:
                    _log.warning("%s/%s: %s", *key, error)
                    if error.is_refusal:
                        self._report_refusal(key, error)
                    self._queue.add_after(key, max(self._back_off(key), error.wait * random.uniform(1.0, 1.2)))
            except Exception as error:
                _log.exception("%s/%s: the reconcile failed", *key)
                self._report_error(key, error)
                self._queue.add_after(key, self._back_off(key))
            finally:
                self._queue.done(key)
                self._metrics.observe_reconcile(time.monotonic() - begun, outcome)

    def _report_refusal(self, key: Key, error: ApiError) -> None:
        """Record an Event about a call that the API server refuses. Without it, a job whose pods may not be deleted
        would look suspended while it runs, and a job whose status may not be written would show nothing."""
        job = self._cache.find_job(key)
        if job is not None:
            message = f"the API server refuses a change that the operator needs: {error.what}. The operator tries again"
            self._recorder.record(job["metadata"], [Event("Warning", "CallRefused", message)])

    def _report_error(self, key: Key, error: Exception) -> None:
        """Record an Event about an error in the operator itself: without it, the job would have no status and no
        explanation. The recorder counts repeated Events."""
        job = self._cache.find_job(key)
        if job is not None:
            message = (
                f"the operator cannot work on this job: an error in the operator ({type(error).__name__}: {error}). "
                "It tries again. The operator's log contains the details"
            )
            self._recorder.record(job["metadata"], [Event("Warning", "OperatorError", message)])

    def _postpone_job(self, key: Key) -> None:
        with self._lock:
            self._postponed.add(key)

    def _resume_postponed(self) -> None:
        """Make postponed jobs due when this replica may write: it leads and has listed everything, or a late renewal of
        its Lease has succeeded. No event would wake these jobs. Release pods that belong to no job."""
        while not self._stopped.wait(_CHECK_SECONDS):
            if self._postponed and self._is_acting():
                with self._lock:
                    keys, self._postponed = self._postponed, set()
                self.wake(keys)
            self._release_ownerless_pods()

    def _release_ownerless_pods(self) -> None:
        """Remove our finalizer from pods that belong to no job, a few at a time: otherwise nothing would ever remove
        it, and neither the pods nor their namespace could be deleted."""
        ownerless_pods = self._cache.list_ownerless_pods()
        if not ownerless_pods or time.monotonic() < self._ownerless_from or not self._is_acting():
            return
        # At random: pods whose change a policy of their namespace refuses must not hold up the others.
        for (namespace, name), uid in random.sample(ownerless_pods, min(len(ownerless_pods), _OWNERLESS_AT_ONCE)):
            pause = _ORPHAN_PAUSE_SECONDS
            try:
                self._executor.children.release((namespace, name), [Release(name, uid)])
                continue
            except ApiError as error:
                pause = max(pause, error.wait)
                _log.warning(
                    "pod %s/%s, which belongs to no job, keeps its finalizer for now: %s", namespace, name, error
                )
            except Exception:
                _log.exception("pod %s/%s, which belongs to no job, keeps its finalizer for now", namespace, name)
            self._ownerless_from = max(self._ownerless_from, time.monotonic() + pause)

    def _back_off(self, key: Key) -> float:
        """Count a failure of the job. Return the seconds until the next try."""
        job = self._cache.find_job(key)
        return 1.0 if job is None else self._find_memory(key, job["metadata"]["uid"]).back_off()

    def _end_failures(self, key: Key) -> None:
        """Let the pauses of a job begin with the shortest again, after a reconcile without an error: in weeks, a job
        meets many errors that pass. Children that cannot be made keep their own pauses."""
        with self._lock:
            memory = self._memories.get(self._uids.get(key, ""))
        if memory is not None and not memory.troubles:
            memory.failures = 0

    def reconcile(self, key: Key) -> bool:
        """Bring one job to its wanted state. Return True if anything was written."""
        has_written = False
        if not self._serves(key[0]):
            self._queue.add_after(key, _UNSERVED_SECONDS)
            return False
        if self._is_acting():
            self._remove_stuck_pods(key)
        for round_number in range(_MAX_ROUNDS):
            job = self._cache.find_job(key)
            if job is None:
                self._forget_job(key)
                if not self._is_acting():
                    if self._cache.find_unreleased_pods(key, "") or self._cache.find_stuck_pods(key):
                        self._postpone_job(key)  # no event will wake this key again
                elif round_number:  # the job was deleted while we worked on it
                    self._remove_stuck_pods(key)
                return has_written
            if not self._is_acting():
                self._postpone_job(key)
                return has_written
            memory = self._find_memory(key, job["metadata"]["uid"])
            observed = self._observe_job(key, job, memory)
            plan = planner.plan(job, observed, datetime.now(UTC))
            if plan.logs:
                self._executor.read_logs(key, plan, memory)
                continue
            if plan.reads:
                self._executor.read_objects(plan, memory)
                continue
            plan_again, changed = self._executor.execute(key, job, plan, memory)
            has_written = has_written or changed
            if plan.requeue is not None:
                self._queue.add_after(key, plan.requeue)
            if not plan_again:
                return has_written
        self._queue.add_after(key, 1.0)
        return has_written

    def _observe_job(self, key: Key, job: dict[str, Any], memory: JobMemory) -> Observed:
        now = time.monotonic()
        paused = memory.contests.find_paused(now)
        seconds = memory.contests.compute_seconds_to_next_change(now)
        if seconds is not None:
            self._queue.add_after(key, seconds)
        troubles = {**memory.troubles, **memory.contests.list_troubles()}
        owner = Owner.of(job)
        observed = self._cache.observe(owner, self._policy(job), memory.report, troubles, memory.logs, job, paused)
        return replace(observed, objects=memory.list_known_objects(now))

    def _remove_stuck_pods(self, key: Key) -> None:
        """Remove pods that are being deleted and in which nothing runs.

        Kubelets do that at once, with exceptions: a kubelet of Kubernetes 1.20 that has missed the end of a container,
        or that waits for a volume of a removed Secret, takes a minute or two.
        """
        self._release_orphans(key)
        now = datetime.now(UTC)
        for pod in self._cache.find_stuck_pods(key):
            assert pod.removable_from is not None
            wait = (pod.removable_from - now).total_seconds()
            if wait > 0:
                self._queue.add_after(key, wait)
                continue
            with contextlib.suppress(ApiError):  # the pod is gone by now, or an event will wake this key again
                self._cluster.delete("Pod", key[0], pod.name, pod.uid, ended=True)

    def _release_orphans(self, key: Key) -> None:
        """Remove our finalizer from pods whose job is gone. Pods may be listed before their jobs are, so ask the API
        server for the job."""
        job = self._cache.find_job(key)
        orphans = self._cache.find_unreleased_pods(key, job["metadata"]["uid"] if job is not None else "")
        if not orphans:
            return
        try:
            uid = self._read_job_uid(key)
            for owner, pod in orphans:
                if owner.uid != uid:
                    self._executor.children.release(key, [Release(pod.name, pod.uid)])
        except ApiError as error:
            if error.reason == "NotLeading":
                self._postpone_job(key)
                return
            _log.warning("%s/%s: the pods of an earlier job keep their finalizers for now: %s", *key, error)
            self._queue.add_after(key, max(_ORPHAN_PAUSE_SECONDS, error.wait))

    def _read_job_uid(self, key: Key) -> str:
        """Return the UID of the job of this name; empty if there is none."""
        try:
            return str(self._cluster.get(KIND, *key)["metadata"]["uid"])
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            return ""


def _list_waking_fields(report: LauncherReport) -> tuple[Any, ...]:
    """Return the fields of a report that wake the job at once when they change. The progress of a running job changes
    with each report: a plan for each would take most of the operator's time, and write nothing."""
    failed_checkpoints = (report.progress or {}).get("failedCheckpoints")
    return report.attempt, report.state, report.joined, report.missing, failed_checkpoints


__all__ = ["Controller"]
