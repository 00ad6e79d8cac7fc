"""The executor of plans: it writes a job's status. Then the child writer deletes and creates the job's children.

The status is written first, guarded by the version of the object that the plan was made for. Answers go into the watch
cache, so that the next plan, which follows at once, sees them.
"""

from __future__ import annotations

import contextlib
import http
import time
from dataclasses import dataclass
from typing import Any

from topkube.errors import JobError
from topkube.job import KIND, TrainingJob
from topkube_operator.control.call_pool import CallPool
from topkube_operator.control.child_writer import ChildWriter
from topkube_operator.control.event_recorder import EventRecorder
from topkube_operator.control.job_memory import JobMemory
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.model.plan import Plan
from topkube_operator.model.status import Event
from topkube_operator.planning import admission
from topkube_operator.planning.causes.pod_failures import LOG_TAIL_BYTES, LOG_TAIL_LINES
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import Key, WorkQueue

CALLS = 24
"""Calls to the API server at a time, of all jobs."""
_COUNTS_SECONDS, PROGRESS_SECONDS = 1.0, 15.0
"""Minimum seconds between two status writes that change only counts of pods, or only progress."""


@dataclass(frozen=True)
class ControlContext:
    """The parts of a replica that the controller and the plan executor share."""

    cluster: ApiClient
    cache: WatchCache
    queue: WorkQueue
    recorder: EventRecorder
    metrics: OperatorMetrics


class PlanExecutor:
    """Carries out plans for all jobs. Safe for many threads, if only one thread at a time works on each job."""

    def __init__(self, context: ControlContext) -> None:
        self._cluster, self._cache, self._queue = context.cluster, context.cache, context.queue
        self._recorder, self._metrics = context.recorder, context.metrics
        self._calls = CallPool(CALLS, context.queue.note_progress)
        self.children = ChildWriter(context.cluster, context.cache, self._calls)

    def close(self) -> None:
        """Begin no further call of a batch."""
        self._calls.close()

    def read_logs(self, key: Key, plan: Plan, memory: JobMemory) -> None:
        """Read the log tails that the planner needs into `memory`."""
        for request in plan.logs:
            text = self._cluster.read_log_tail(key[0], request.pod, request.container, LOG_TAIL_LINES, LOG_TAIL_BYTES)
            memory.logs[request.pod] = text

    def read_objects(self, plan: Plan, memory: JobMemory) -> None:
        """Read the objects that the planner needs into `memory`. An object that does not exist, or that the operator
        may not read, is empty."""
        for request in plan.reads:
            try:
                stored = self._cluster.get(request.kind, "", request.name)
            except ApiError as error:
                if error.status not in (http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND):
                    raise
                stored = {}
            memory.objects[request.kind, request.name] = (time.monotonic(), stored)

    def execute(self, key: Key, job: dict[str, Any], plan: Plan, memory: JobMemory) -> tuple[bool, bool]:
        """Carry out a plan. Return two flags: the job must be planned again; something was written. Raises ApiError."""
        now = time.monotonic()
        wait = memory.create_from - now
        apply = plan.apply if wait <= 0 else ()
        if plan.apply and not apply:
            self._queue.add_after(key, wait)
        patch = plan.status
        if patch and plan.urgency != "now" and not plan.delete and not apply:
            due = memory.patched_at + (_COUNTS_SECONDS if plan.urgency == "soon" else PROGRESS_SECONDS)
            if now < due:
                self._queue.add_after(key, due - now)
                patch = {}
        if patch:
            is_written = self._write_status(key, job, patch)
            if is_written is None:
                return True, False
            memory.patched_at = now
            if is_written:
                self._record_plan(job, plan)
            else:  # the CRD is older than this operator and drops unknown fields: another try would not help
                patch = {}
        if plan.end_groups:
            self.children.end_groups(key, plan.end_groups)
        if plan.delete:
            self.children.delete(key, plan.delete)
        if plan.patches:
            self.children.patch(key, plan.patches)
        if apply:
            memory.logs.clear()  # the failures that they explain are in the status by now
            self.children.apply(key, Owner.of(job), apply, memory)
        if plan.release:  # last: if the right to patch pods is missing, everything else is done
            self.children.release(key, plan.release)
        has_written = bool(patch or plan.release or plan.end_groups or plan.delete or plan.patches or apply)
        return has_written, has_written  # after each write, the job is planned again

    def _record_plan(self, job: dict[str, Any], plan: Plan) -> None:
        """Record the Events and metrics of a plan whose status has been written."""
        self._recorder.record(job["metadata"], plan.events)
        namespace = job["metadata"]["namespace"]
        if plan.phase and plan.status.get("phase") == plan.phase:
            self._metrics.count_transition(namespace, plan.phase)
        if plan.restart_reason:
            self._metrics.count_restart(namespace, plan.restart_reason)
        if plan.start_seconds is not None:
            self._metrics.observe_start(namespace, plan.start_seconds)
        if plan.status.get("attempt") == 1:
            self._warn_of_claim(job)

    def _warn_of_claim(self, job: dict[str, Any]) -> None:
        with contextlib.suppress(JobError):
            stored = TrainingJob.from_cluster({name: value for name, value in job.items() if name != "status"})
            if message := admission.warn_of_claim(stored, self._cluster.read_claim):
                self._recorder.record(job["metadata"], [Event("Warning", "CheckpointClaim", message)])

    def _write_status(self, key: Key, job: dict[str, Any], patch: Any) -> bool | None:
        """Write a status. Return True if the patch changed the object; None if it was not written, because the object
        has changed."""
        metadata = job["metadata"]
        guard = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        try:
            answer = self._cluster.patch(KIND, *key, {"metadata": guard, "status": dict(patch)}, subresource="status")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                self._cache.remove_job(key, metadata["uid"])
                return None
            if error.status != http.HTTPStatus.CONFLICT:
                raise
            self._read_job_again(key, metadata["uid"])
            return None
        self._cache.put_job(answer)
        return bool(answer["metadata"]["resourceVersion"] != metadata["resourceVersion"])

    def _read_job_again(self, key: Key, uid: str) -> None:
        """Read a job after a conflict: the object has changed, or another object has its name now."""
        try:
            answer = self._cluster.get(KIND, *key)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            self._cache.remove_job(key, uid)
            return
        if answer["metadata"]["uid"] != uid:
            self._cache.remove_job(key, uid)
        self._cache.put_job(answer)
