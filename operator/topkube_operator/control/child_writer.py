"""The writer of a job's children: it creates, changes and deletes them, and reports what prevents that.

Answers go into the watch cache, so that the next plan sees them.
"""

from __future__ import annotations

import contextlib
import http
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from topkube.job import KIND
from topkube_operator.control.call_pool import CallPool
from topkube_operator.control.job_memory import JobMemory
from topkube_operator.model.observed import Child, Trouble
from topkube_operator.model.plan import Deletion, GroupEnd, Release, StatusPatch
from topkube_operator.planning.contests import describe_contest
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.owner import Owner, find_owner
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import Key


class ChildWriter:
    """Writes the children of all jobs. Safe for many threads, if only one thread at a time works on each job. All
    methods raise ApiError."""

    def __init__(self, cluster: ApiClient, cache: WatchCache, calls: CallPool) -> None:
        self._cluster, self._cache, self._calls = cluster, cache, calls

    def end_groups(self, key: Key, ends: Sequence[GroupEnd]) -> None:
        """Mark pods of a job that has ended, so that Kueue frees the quota of their group."""
        self._calls.call_each(key, lambda end: self._change_pod(key, end, self._cluster.end_pod_group), ends)

    def delete(self, key: Key, deletions: Sequence[Deletion]) -> None:
        """Delete children of a job, or the job itself."""
        self._calls.call_each(key, lambda deletion: self._delete_child(key, deletion), deletions)

    def patch(self, key: Key, changes: Sequence[StatusPatch]) -> None:
        """Patch the statuses of children that have not changed since the plan was made."""
        self._calls.call_each(key, lambda change: self._patch_child(key, change), changes)

    def release(self, key: Key, releases: Sequence[Release]) -> None:
        """Remove our finalizer from pods."""
        self._calls.call_each(
            key, lambda release: self._change_pod(key, release, self._cluster.remove_finalizer), releases
        )

    def apply(self, key: Key, owner: Owner, stages: Sequence[Sequence[dict[str, Any]]], memory: JobMemory) -> None:
        """Apply every manifest of a stage before the next stage. Store the failures in `memory`, for a later try."""
        troubles: dict[tuple[str, str], Trouble] = {}
        for stage in stages:
            results = self._calls.call_each(
                key, lambda manifest: self._apply_manifest(manifest, owner, memory), stage, _ends_stage
            )
            for manifest, trouble in zip(stage, results, strict=True):
                if trouble is not None:
                    troubles[manifest["kind"], manifest["metadata"]["name"]] = trouble
            if troubles:
                break
        memory.troubles = troubles
        self._schedule_next_try(key, memory)

    def _schedule_next_try(self, key: Key, memory: JobMemory) -> None:
        """Set the time before which nothing is created. It grows while creations fail."""
        troubles = memory.troubles
        if not troubles:
            memory.failures, memory.create_from = 0, 0.0
        elif all(trouble.reason == "Terminating" for trouble in troubles.values()):
            memory.create_from = time.monotonic() + 1.0
        else:
            requested = max(trouble.wait for trouble in troubles.values()) * random.uniform(1.0, 1.2)
            back_off = memory.back_off() if self._cache.find_job(key) is not None else 1.0
            memory.create_from = time.monotonic() + max(back_off, requested)

    def _change_pod(self, key: Key, pod: Release | GroupEnd, change: Callable[[str, str, str], dict[str, Any]]) -> None:
        """Change one pod. If no pod has this UID, remove the pod from the cache."""
        name = (key[0], pod.name)
        try:
            answer = change(*name, pod.uid)
        except ApiError as error:
            if not self._is_gone("Pod", name, pod.uid, error):
                raise
            self._cache.remove("Pod", name, pod.uid)
            return
        self._cache.put("Pod", answer)

    def _is_gone(self, kind: str, name: tuple[str, str], uid: str, error: ApiError) -> bool:
        """Return True if a call failed with `error` because no object has this UID. A conflict may have another cause:
        writes of other clients at the same time, or an admission webhook."""
        if error.status != http.HTTPStatus.CONFLICT:
            return error.status == http.HTTPStatus.NOT_FOUND
        try:
            return bool(self._cluster.get(kind, *name)["metadata"]["uid"] != uid)
        except ApiError as refusal:
            if refusal.status != http.HTTPStatus.NOT_FOUND:
                raise
            return True

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

    def _delete_child(self, key: Key, deletion: Deletion) -> None:
        name = (key[0], deletion.name)
        try:
            answer = self._cluster.delete(deletion.kind, *name, deletion.uid)
        except ApiError as error:
            if not self._is_gone(deletion.kind, name, deletion.uid, error):
                raise
            answer = {}
        if deletion.kind == KIND:
            self._cache.remove_job(key, deletion.uid)
        elif answer.get("kind") == deletion.kind and answer["metadata"].get("deletionTimestamp"):
            self._cache.put(deletion.kind, answer)
        else:
            self._cache.remove(deletion.kind, name, deletion.uid)

    def _apply_manifest(self, manifest: dict[str, Any], owner: Owner, memory: JobMemory) -> Trouble | None:
        """Create or change one child. Return the trouble that prevented this; None if the child was written."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = (metadata["namespace"], metadata["name"])
        try:
            child = self._cache.find_child(kind, name, owner) if kind != "Pod" else None
            message = self._describe_contest(manifest, memory)
            answer = self._cluster.create(manifest) if child is None else self._change_child(child, manifest)
            self._cache.put(kind, answer)
            memory.contests.count_write(manifest, time.monotonic(), message)
            return None
        except ApiError as error:
            if error.status == http.HTTPStatus.CONFLICT and error.reason == "AlreadyExists":
                trouble = self._check_existing(kind, name, owner)
                if trouble is None:
                    memory.contests.count_write(manifest, time.monotonic())
                return trouble
            if error.status == http.HTTPStatus.CONFLICT:
                return Trouble("Conflict", f"another client wrote at the same time: {error.what}")
            if error.status == http.HTTPStatus.TOO_MANY_REQUESTS:
                return Trouble("Throttled", f"the API server has too many requests: {error.what}", error.wait)
            if error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return Trouble(
                    "ServerError", f"the API server, or a webhook that it calls, fails: {error.what}", error.wait
                )
            if not error.is_refusal:
                raise
            return Trouble("Refused", error.what)

    def _describe_contest(self, manifest: dict[str, Any], memory: JobMemory) -> str:
        """Return a message about a child that something else changes back after every write; empty if there is nothing
        to report."""
        if not memory.contests.must_be_reported(manifest, time.monotonic()):
            return ""
        stored, metadata = None, manifest["metadata"]
        with contextlib.suppress(ApiError):
            stored = self._cluster.get(manifest["kind"], metadata["namespace"], metadata["name"])
        return describe_contest(stored, manifest)

    def _change_child(self, child: Child, manifest: dict[str, Any]) -> dict[str, Any]:
        """Change a child to the content of `manifest`. A Secret is patched, because the tokens of removed pods must go:
        apply removes only fields that an earlier apply has written, and the Secret was written by a create."""
        if child.kind != "Secret":
            return self._cluster.apply(manifest)
        # In a merge patch, null removes a field.
        stale: dict[str, None] = {item: None for item in child.content if item not in manifest["data"]}
        patch = {"metadata": {"uid": child.uid}, "data": {**stale, **manifest["data"]}}
        return self._cluster.patch("Secret", manifest["metadata"]["namespace"], child.name, patch)

    def _check_existing(self, kind: str, name: tuple[str, str], owner: Owner) -> Trouble | None:
        """Return the trouble with an existing object of this name. None if an earlier call made the object for this job
        and its answer was lost."""
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


def _ends_stage(trouble: Trouble | None) -> bool:
    """Return True if the other objects of a stage would have the same trouble, or would add to it. A quota that is used
    up, a policy or a mistake in the template concerns all pods: for thousands of workers, their refusals would be
    thousands of calls, again at each try."""
    return trouble is not None and trouble.reason in ("Refused", "Throttled", "ServerError")
