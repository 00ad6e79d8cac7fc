"""The TrainingJobs in the watch cache, and the failures that their statuses remember."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from topkube_operator.model.nodes import NodeFailure, read_node_failures
from topkube_operator.watch.work_queue import Key


class KnownJobs:
    """The TrainingJobs, by key. Not safe for threads: the watch cache holds its lock."""

    def __init__(self) -> None:
        self._jobs: dict[Key, dict[str, Any]] = {}
        self._node_failures: dict[str, tuple[NodeFailure, ...]] = {}
        """Failures that began on a node and may still count, by the UID of the job that had them."""

    def find(self, key: Key) -> dict[str, Any] | None:
        return self._jobs.get(key)

    def list_all(self) -> list[dict[str, Any]]:
        return list(self._jobs.values())

    def list_keys(self, namespace: str) -> set[Key]:
        """Return the keys of the jobs of a namespace."""
        return {key for key in self._jobs if key[0] == namespace}

    def put(self, job: Mapping[str, Any]) -> bool:
        """Store a job. Return True if it is newer than the known job."""
        metadata = job["metadata"]
        key, uid = (metadata["namespace"], metadata["name"]), metadata["uid"]
        known = self._jobs.get(key)
        known_uid = known["metadata"]["uid"] if known is not None else None
        if known is not None and known_uid == uid and read_version(known["metadata"]) >= read_version(metadata):
            return False
        kept_metadata = {name: value for name, value in metadata.items() if name != "managedFields"}
        self._jobs[key] = {**job, "metadata": kept_metadata}
        if known_uid is not None:
            self._node_failures.pop(known_uid, None)
        now = datetime.now(UTC)
        failures = [failure for failure in read_node_failures(uid, job.get("status")) if failure.counts_at(now)]
        if failures:
            self._node_failures[uid] = tuple(failures)
        return True

    def remove(self, key: Key, uid: str) -> None:
        """Forget the job with UID `uid`, if it is the known job of this key."""
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self._jobs[key]
            self._node_failures.pop(uid, None)

    def forget_versions(self) -> None:
        """Treat the next version of every job as newer than the known version."""
        for key, job in self._jobs.items():
            self._jobs[key] = {**job, "metadata": {**job["metadata"], "resourceVersion": "0"}}

    def find_failures(self, uid: str) -> tuple[NodeFailure, ...]:
        """Return the failures of the job with UID `uid` that began on a node, and may still count."""
        return self._node_failures.get(uid, ())

    def find_failures_of_others(self, uid: str) -> tuple[NodeFailure, ...]:
        """Return the failures of all jobs, except the job with UID `uid`, that count against a node."""
        now, counting = datetime.now(UTC), list[NodeFailure]()
        for job, failures in list(self._node_failures.items()):
            recent = [failure for failure in failures if failure.counts_at(now)]
            if not recent:  # never scanned again: most jobs ended long ago
                del self._node_failures[job]
            elif job != uid:
                counting += recent
        return tuple(counting)


def read_version(metadata: Mapping[str, Any]) -> int:
    """Return an object's resource version as a number; 0 if it is not a number."""
    text = str(metadata.get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0
