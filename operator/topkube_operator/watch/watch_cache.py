"""The watch cache: the objects of our jobs in the cluster, by job. Watcher threads write the cache; reconciles read it.

Answers to our own writes are stored as well, so that the next plan sees them before the watch does. An object that is
older than the known object, or that was already removed, is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from topkube_operator.model import names
from topkube_operator.model.observed import Child, LauncherReport, Observed, Pod, Policy, Trouble
from topkube_operator.watch.known_caches import KnownCaches
from topkube_operator.watch.known_children import Entry, KnownChildren, Name
from topkube_operator.watch.known_jobs import KnownJobs, read_version
from topkube_operator.watch.known_nodes import KnownNodes
from topkube_operator.watch.observer import Observer
from topkube_operator.watch.owner import Owner, find_owner
from topkube_operator.watch.removals import Removals
from topkube_operator.watch.work_queue import Key


class WatchCache:
    """Jobs, their pods and other children, nodes, and what the node caches hold. Safe for many threads."""

    def __init__(self, fault_conditions: Iterable[str] = ()) -> None:
        """`fault_conditions` are further condition types of nodes that report a fault if their status is True."""
        self._lock = threading.RLock()
        self._jobs = KnownJobs()
        self._children = KnownChildren()
        self._nodes = KnownNodes(fault_conditions)
        self._caches = KnownCaches()
        self._removals = Removals()
        self._ownerless: dict[Name, str] = {}
        """The UIDs of pods that have our finalizer and no TrainingJob as their controller."""
        self._observer = Observer(self._jobs, self._children, self._nodes, self._caches, self._removals)

    # Jobs.

    def put_job(self, job: Mapping[str, Any]) -> bool:
        """Store a job. Return True if it is newer than the known job."""
        with self._lock:
            return job["metadata"]["uid"] not in self._removals and self._jobs.put(job)

    def remove_job(self, key: Key, uid: str) -> None:
        """Forget a job, and ignore its late events."""
        with self._lock:
            self._jobs.remove(key, uid)
            self._removals.add(uid, None, key[1])

    def find_job(self, key: Key) -> dict[str, Any] | None:
        """Return a job, as stored; None if there is none."""
        with self._lock:
            return self._jobs.find(key)

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, as stored."""
        with self._lock:
            return self._jobs.list_all()

    def forget_versions(self) -> None:
        """Treat the next version of every object as newer than the known version. Resource versions go back if the
        cluster's data were restored from a backup. Removed objects may exist again."""
        with self._lock:
            self._jobs.forget_versions()
            self._children.forget_versions()
            self._removals.clear()

    # Children.

    def put(self, kind: str, manifest: Mapping[str, Any]) -> Key | None:
        """Store a child. Return the key of the job whose state has changed; None if nothing has changed."""
        metadata = manifest["metadata"]
        owner = find_owner(manifest)
        name, uid = (metadata["namespace"], metadata["name"]), metadata["uid"]
        with self._lock:
            if kind == "Pod":
                self._note_ownerless(name, uid, owner is None and names.ENDING in (metadata.get("finalizers") or ()))
            known = self._children.find(kind, name)
            if owner is None:  # the object never was a child, or somebody has removed its owner
                if known is None or known.version >= read_version(metadata):
                    return None
                self._children.forget(kind, name, known)
                return known.owner.key
            is_old = known is not None and known.uid == uid and known.version >= read_version(metadata)
            if is_old or uid in self._removals:
                return None
            value = Pod.from_object(manifest) if kind == "Pod" else Child.from_object(kind, manifest)
            self._children.put(kind, name, Entry(read_version(metadata), uid, owner, value))
            return owner.key

    def remove(self, kind: str, name: Name, uid: str) -> Key | None:
        """Forget a child. Return the key of the job whose state has changed; None if nothing has changed."""
        with self._lock:
            if kind == "Pod" and self._ownerless.get(name) == uid:
                del self._ownerless[name]
            known = self._children.find(kind, name)
            if known is None or known.uid != uid:
                self._removals.add(uid, None, name[1])
                return None
            self._removals.add(uid, known.owner, name[1], known.value if isinstance(known.value, Pod) else None)
            self._children.forget(kind, name, known)
            return known.owner.key

    def replace(self, kind: str, namespace: str | None, manifests: Iterable[Mapping[str, Any]]) -> set[Key]:
        """Store a complete list of a kind; known objects that it lacks are removed. Return the keys of changed jobs.

        The list may be read from the API server while it is iterated. An object that becomes known after the iteration
        has begun, from the answer to a write, may be newer than the list and stays."""
        changed: set[Key | None] = set()
        with self._lock:
            unlisted = {entry.uid: name for name, entry in self._children.list_kind(kind, namespace)}
        for manifest in manifests:
            unlisted.pop(manifest["metadata"]["uid"], None)
            changed.add(self.put(kind, manifest))
        changed |= {self.remove(kind, name, uid) for uid, name in unlisted.items()}
        return {key for key in changed if key is not None}

    def find_child(self, kind: str, name: Name, owner: Owner) -> Child | None:
        """Return the child of this name; None if there is none, or if the child belongs to another job than `owner`."""
        with self._lock:
            known = self._children.find(kind, name)
            is_own = known is not None and known.owner == owner
            return known.value if known is not None and is_own and isinstance(known.value, Child) else None

    def find_pods(self, owner: Owner) -> tuple[Pod, ...]:
        """Return the pods of the job `owner`."""
        with self._lock:
            return tuple(value for value in self._children.list_children(owner) if isinstance(value, Pod))

    def find_launchers(self, owner: Owner) -> list[Pod]:
        """Return the pods of the job `owner` that contain a launcher."""
        with self._lock:
            return self._children.list_launchers(owner)

    def find_stuck_pods(self, key: Key) -> list[Pod]:
        """Return the pods that are being deleted and in which nothing runs, of all jobs that have had this key."""
        with self._lock:
            return [pod for _, pod in self._children.find_pods(key) if pod.removable_from is not None]

    def find_unreleased_pods(self, key: Key, uid: str) -> list[tuple[Owner, Pod]]:
        """Return the pods that have our finalizer, and their jobs, of all jobs that have had this key except the job
        with UID `uid`."""
        with self._lock:
            pods = self._children.find_pods(key)
        return [(owner, pod) for owner, pod in pods if owner.uid != uid and pod.has_finalizer]

    def list_ownerless_pods(self) -> list[tuple[Name, str]]:
        """Return name and UID of the pods that have our finalizer and belong to no job. Their jobs were deleted with
        `--cascade=orphan`, or somebody has removed the owner references."""
        with self._lock:
            return list(self._ownerless.items())

    def _note_ownerless(self, name: Name, uid: str, is_ownerless: bool) -> None:
        if is_ownerless and uid not in self._removals:
            self._ownerless[name] = uid
        else:
            self._ownerless.pop(name, None)

    # Nodes.

    def put_node(self, node: Mapping[str, Any]) -> set[Key]:
        """Store a node: its faults, its labels, and its contact with the control plane. If the contact has changed,
        return the jobs with pods on the node."""
        with self._lock:
            return self._find_keys_on_node(node["metadata"]["name"]) if self._nodes.put(node) else set()

    def remove_node(self, name: str) -> set[Key]:
        """Store that a node is gone, for some time and for as long as pods on it are known. Return the jobs of these
        pods."""
        with self._lock:
            changed = self._find_keys_on_node(name) if self._nodes.remove(name) else set()
            self._forget_nodes()
        return changed

    def _forget_nodes(self) -> None:
        """Forget nodes that were removed long ago and have no known pods."""
        if removed := self._nodes.find_nodes_removed_long_ago():
            pods = [pod for _, pod in self._children.list_pods()]
            used = {pod.node for pod in (*pods, *self._removals.list_last_pods())}
            self._nodes.forget(removed - used)

    def replace_nodes(self, nodes: Iterable[Mapping[str, Any]]) -> set[Key]:
        """Store a complete list of nodes, as `replace` does. Return the keys of changed jobs."""
        changed: set[Key] = set()
        with self._lock:
            unlisted = set(self._nodes.names)
        for node in nodes:
            unlisted.discard(node["metadata"]["name"])
            changed |= self.put_node(node)
        for name in unlisted:
            changed |= self.remove_node(name)
        return changed

    def _find_keys_on_node(self, node: str) -> set[Key]:
        """Return the keys of the jobs with pods on a node."""
        return {owner.key for owner in self._children.find_owners_on_node(node)}

    def find_node_label(self, name: str, key: str) -> str:
        """Return a label of a node; empty if the node is not known or does not have it."""
        with self._lock:
            return self._nodes.find_label(name, key)

    # The node cache.

    def put_claim(self, claim: Mapping[str, Any]) -> set[Key]:
        """Store whether a namespace's claim is bound. If that has changed, return the namespace's jobs."""
        with self._lock:
            return self._jobs.list_keys(claim["metadata"]["namespace"]) if self._caches.put_claim(claim) else set()

    def remove_claim(self, name: Name) -> set[Key]:
        with self._lock:
            return self._jobs.list_keys(name[0]) if self._caches.remove_claim(name) else set()

    def replace_claims(self, namespace: str | None, claims: Iterable[Mapping[str, Any]]) -> set[Key]:
        """Store a complete list of claims, as `replace` does. Return the keys of changed jobs."""
        changed: set[Key] = set()
        with self._lock:
            unlisted = self._caches.list_claims(namespace)
        for claim in claims:
            unlisted.discard((claim["metadata"]["namespace"], claim["metadata"]["name"]))
            changed |= self.put_claim(claim)
        for name in unlisted:
            changed |= self.remove_claim(name)
        return changed

    def put_dataset(self, dataset: Mapping[str, Any]) -> None:
        """Store which nodes hold a part of a dataset."""
        with self._lock:
            self._caches.put_dataset(dataset)

    def remove_dataset(self, name: Name) -> None:
        with self._lock:
            self._caches.remove_dataset(name)

    def replace_datasets(self, namespace: str | None, datasets: Iterable[Mapping[str, Any]]) -> None:
        """Store a complete list of CachedDatasets, as `replace` does."""
        with self._lock:
            unlisted = self._caches.list_datasets(namespace)
        for dataset in datasets:
            unlisted.discard((dataset["metadata"]["namespace"], dataset["metadata"]["name"]))
            self.put_dataset(dataset)
        for name in unlisted:
            self.remove_dataset(name)

    # What a plan sees.

    def observe(
        self,
        owner: Owner,
        policy: Policy,
        report: LauncherReport | None,
        troubles: Mapping[tuple[str, str], Trouble],
        logs: Mapping[str, str],
        job: Mapping[str, Any] | None = None,
        paused: frozenset[tuple[str, str]] = frozenset(),
    ) -> Observed:
        """Return everything known about the job `owner`; with `job`, also what the node cache holds for it."""
        with self._lock:
            return self._observer.observe(owner, policy, report, troubles, logs, job, paused)
