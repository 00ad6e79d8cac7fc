"""The executor of plans: it writes a job's status, then deletes and makes the job's children.

The status is written first, guarded by the version of the object that the plan was made for. Answers go into the watch
cache, so that the next plan, which follows at once, sees them.
"""

from __future__ import annotations

import contextlib
import http
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from topkube.errors import JobError
from topkube.job import KIND, TrainingJob
from topkube_operator.control.call_pool import CallPool
from topkube_operator.control.event_recorder import EventRecorder
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.model.observed import Child, LauncherReport, Trouble
from topkube_operator.model.plan import Deletion, GroupEnd, Plan, Release, StatusPatch
from topkube_operator.model.status import Event
from topkube_operator.planning import admission
from topkube_operator.planning.causes.pod_failures import LOG_TAIL_BYTES, LOG_TAIL_LINES
from topkube_operator.planning.contests import Contests, describe_contest
from topkube_operator.watch.api_client import ApiError, Cluster
from topkube_operator.watch.owner import Owner, find_owner
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import Key, WorkQueue

CALLS = 24
"""Calls to the API server at a time, of all jobs."""
_COUNTS_SECONDS, _PROGRESS_SECONDS = 1.0, 15.0
"""Minimum seconds between two status writes that change only counts of pods, or only progress."""
_LONGEST_PAUSE = 60.0
_OBJECT_SECONDS, _MISSING_OBJECT_SECONDS = 60.0, 8.0


def _choose_age_limit(content: dict[str, Any]) -> float:
    return _OBJECT_SECONDS if content else _MISSING_OBJECT_SECONDS


@dataclass
class JobMemory:
    """What the controller remembers of one job between reconciles. All of it may be lost at any time."""

    report: LauncherReport | None = None
    troubles: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    contests: Contests = field(default_factory=Contests)
    logs: dict[str, str] = field(default_factory=dict)
    objects: dict[tuple[str, str], tuple[float, dict[str, Any]]] = field(default_factory=dict)
    """Objects of the whole cluster, with the time at which they were read (monotonic)."""
    patched_at: float = float("-inf")
    failures: int = 0
    create_from: float = 0.0
    """Nothing is created before this time, because the last try failed (monotonic)."""

    def list_known_objects(self, now: float) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the objects that were read lately. One that could not be read is tried again soon."""
        kept = {
            key: (time, content)
            for key, (time, content) in self.objects.items()
            if now < time + _choose_age_limit(content)
        }
        self.objects = kept
        return {key: content for key, (_, content) in kept.items()}

    def back_off(self) -> float:
        """Count a failure. Return the seconds until the next try."""
        self.failures += 1
        return float(min(0.5 * 2.0 ** min(self.failures, 10), _LONGEST_PAUSE))


@dataclass(frozen=True)
class ControlContext:
    """The parts of a replica that the controller and the plan executor share."""

    cluster: Cluster
    cache: WatchCache
    queue: WorkQueue
    recorder: EventRecorder
    metrics: OperatorMetrics


class PlanExecutor:
    """Carries out plans for all jobs. Safe for many threads, if only one thread at a time works on each job."""

    def __init__(self, context: ControlContext) -> None:
        self._cluster, self._cache, self._queue = context.cluster, context.cache, context.queue
        self._recorder, self._metrics = context.recorder, context.metrics
        self._calls = CallPool(CALLS)

    def close(self) -> None:
        """Begin no further call of a batch."""
        self._calls.close()

    def read_logs(self, key: Key, plan: Plan, memory: JobMemory) -> None:
        """Read the log tails that the planner needs into `memory`."""
        for request in plan.logs:
            text = self._cluster.log_tail(key[0], request.pod, request.container, LOG_TAIL_LINES, LOG_TAIL_BYTES)
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
            due = memory.patched_at + (_COUNTS_SECONDS if plan.urgency == "soon" else _PROGRESS_SECONDS)
            if now < due:
                self._queue.add_after(key, due - now)
                patch = {}
        if patch:
            is_written = self._write_status(key, job, patch)
            if is_written is None:
                return True, False
            memory.patched_at = now
            if is_written:
                self._publish(job, plan)
            else:  # the CRD is older than this operator and drops unknown fields: another try would not help
                patch = {}
        if plan.end_groups:
            self._calls.each(key, lambda end: self._change_pod(key, end, self._cluster.end_pod_group), plan.end_groups)
        if plan.delete:
            self._calls.each(key, lambda deletion: self._delete(key, deletion), plan.delete)
        if plan.patches:
            self._calls.each(key, lambda change: self._patch_child(key, change), plan.patches)
        if apply:
            memory.logs.clear()
            self._apply_stages(key, job, apply, memory)
        if plan.release:  # last: if the right to patch pods is missing, everything else is done
            self._calls.each(key, lambda release: self.release(key, release), plan.release)
        has_written = bool(patch or plan.release or plan.end_groups or plan.delete or plan.patches or apply)
        return has_written, has_written

    def release(self, key: Key, release: Release) -> None:
        """Remove our finalizer from a pod. Raises ApiError."""
        self._change_pod(key, release, self._cluster.remove_finalizer)

    def _change_pod(self, key: Key, pod: Release | GroupEnd, change: Callable[[str, str, str], dict[str, Any]]) -> None:
        """Change one pod. It is forgotten if there is no pod of this UID."""
        name = (key[0], pod.name)
        try:
            answer = change(*name, pod.uid)
        except ApiError as error:
            if error.status not in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT):
                raise
            self._cache.remove("Pod", name, pod.uid)
            return
        self._cache.put("Pod", answer)

    # The status.

    def _publish(self, job: dict[str, Any], plan: Plan) -> None:
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
            self._read_again(key, metadata["uid"])
            return None
        self._cache.put_job(answer)
        return bool(answer["metadata"]["resourceVersion"] != metadata["resourceVersion"])

    def _read_again(self, key: Key, uid: str) -> None:
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

    # Children.

    def _patch_child(self, key: Key, change: StatusPatch) -> None:
        """Patch the status of a child, unless the child has changed since the plan was made."""
        guard = {"uid": change.uid, "resourceVersion": change.version}
        patch = {"metadata": guard, "status": dict(change.status)}
        try:
            answer = self._cluster.patch(change.kind, key[0], change.name, patch, subresource="status")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                self._cache.remove(change.kind, (key[0], change.name), change.uid)
                return
            if error.status != http.HTTPStatus.CONFLICT:
                raise
            with contextlib.suppress(ApiError):  # if it is gone, the watch reports it
                self._cache.put(change.kind, self._cluster.get(change.kind, key[0], change.name))
            return
        self._cache.put(change.kind, answer)

    def _delete(self, key: Key, deletion: Deletion) -> None:
        name = (key[0], deletion.name)
        try:
            answer = self._cluster.delete(deletion.kind, *name, deletion.uid)
        except ApiError as error:
            if error.status not in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT):
                raise
            answer = {}
        if deletion.kind == KIND:
            self._cache.remove_job(key, deletion.uid)
        elif answer.get("kind") == deletion.kind and answer["metadata"].get("deletionTimestamp"):
            self._cache.put(deletion.kind, answer)
        else:
            self._cache.remove(deletion.kind, name, deletion.uid)

    def _apply_stages(
        self, key: Key, job: dict[str, Any], stages: tuple[tuple[dict[str, Any], ...], ...], memory: JobMemory
    ) -> None:
        """Apply every manifest of a stage before the next stage. Remember what failed, for a later try."""
        owner, troubles = Owner.of(job), dict[tuple[str, str], Trouble]()
        for stage in stages:
            results = self._calls.each(key, lambda manifest: self._apply(manifest, owner, memory), stage, _is_overload)
            for manifest, trouble in zip(stage, results, strict=True):
                if trouble is not None:
                    troubles[manifest["kind"], manifest["metadata"]["name"]] = trouble
            if troubles:
                break
        memory.troubles = troubles
        if not troubles:
            memory.failures, memory.create_from = 0, 0.0
        elif all(trouble.reason == "Terminating" for trouble in troubles.values()):
            memory.create_from = time.monotonic() + 1.0
        else:
            requested = max(trouble.wait for trouble in troubles.values()) * random.uniform(1.0, 1.2)
            back_off = memory.back_off() if self._cache.job(key) is not None else 1.0
            memory.create_from = time.monotonic() + max(back_off, requested)

    def _apply(self, manifest: dict[str, Any], owner: Owner, memory: JobMemory) -> Trouble | None:
        """Create or change one child. Return why that was not possible; None if it was."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = (metadata["namespace"], metadata["name"])
        try:
            child = self._cache.child(kind, name, owner) if kind != "Pod" else None
            message = self._describe_contest(manifest, memory)
            answer = self._cluster.create(manifest) if child is None else self._change(child, manifest)
            self._cache.put(kind, answer)
            memory.contests.count_write(manifest, time.monotonic(), message)
            return None
        except ApiError as error:
            if error.status == http.HTTPStatus.CONFLICT and error.reason == "AlreadyExists":
                trouble = self._check_existing(kind, name, owner)
                if trouble is None:
                    memory.contests.count_write(manifest, time.monotonic())
                return trouble
            if error.status in (400, 403, 404, 409, 422):
                return Trouble("Refused", error.what)
            if error.status == http.HTTPStatus.TOO_MANY_REQUESTS:
                return Trouble("Throttled", f"the API server has too many requests: {error.what}", error.wait)
            if error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return Trouble(
                    "ServerError", f"the API server, or a webhook that it calls, fails: {error.what}", error.wait
                )
            raise

    def _describe_contest(self, manifest: dict[str, Any], memory: JobMemory) -> str:
        """Return a message about a child that something else changes back after every write; empty if nothing does."""
        if not memory.contests.must_be_reported(manifest, time.monotonic()):
            return ""
        stored, metadata = None, manifest["metadata"]
        with contextlib.suppress(ApiError):
            stored = self._cluster.get(manifest["kind"], metadata["namespace"], metadata["name"])
        return describe_contest(stored, manifest)

    def _change(self, child: Child, manifest: dict[str, Any]) -> dict[str, Any]:
        """Change a child to its wanted content. A Secret is patched, because apply would keep the tokens of removed
        pods that create has written."""
        if child.kind != "Secret":
            return self._cluster.apply(manifest)
        stale: dict[str, None] = {item: None for item in child.content if item not in manifest["data"]}
        patch = {"metadata": {"uid": child.uid}, "data": {**stale, **manifest["data"]}}
        return self._cluster.patch("Secret", manifest["metadata"]["namespace"], child.name, patch)

    def _check_existing(self, kind: str, name: tuple[str, str], owner: Owner) -> Trouble | None:
        """Return why an object of this name prevents a creation. None if the object is ours: an earlier call made it,
        whose answer was lost."""
        try:
            existing = self._cluster.get(kind, *name)
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return Trouble("Terminating", "an object of this name is just being deleted")
            raise
        holder = find_owner(existing)
        if holder == owner:
            self._cache.put(kind, existing)
            return None
        if existing["metadata"].get("deletionTimestamp") or (holder is not None and holder.key == owner.key):
            return Trouble("Terminating", "an object of this name, left by an earlier job, is being deleted")
        return Trouble("ForeignObject", "exists and does not belong to this job: delete it, or rename the job")


def _is_overload(trouble: Trouble | None) -> bool:
    """Return True if further calls would add to the problem."""
    return trouble is not None and trouble.reason in ("Throttled", "ServerError")
