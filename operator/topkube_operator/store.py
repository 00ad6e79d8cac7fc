"""The watch cache: what the cluster holds of our jobs, by job. Threads of watchers write it, reconciles read it.

Answers to our own writes go in as well, so that the next plan sees them before the watch tells. An object that is older
than what is known, or that has been seen to go, is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube.job import KIND
from topkube.job.cached_dataset import object_name
from topkube_operator.datasets import CLAIM
from topkube_operator.observed import Child, Observed, Pod, Policy, Report, Trouble
from topkube_operator.placement import HOSTNAME
from topkube_operator.queue import Key

Name = tuple[str, str]
"""Namespace and name of any object."""
_REMEMBERED = timedelta(minutes=10)
_MOST_REMEMBERED = 10_000


@dataclass(slots=True)
class _Entry:
    version: int
    uid: str
    owner: str
    job: Key
    value: Pod | Child


class Store:
    """Jobs, their pods and other children, and nodes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: dict[Key, dict[str, Any]] = {}
        self._entries: dict[str, dict[Name, _Entry]] = {}
        self._of_owner: dict[str, dict[tuple[str, Name], _Entry]] = {}
        self._owners: dict[Key, set[str]] = {}
        """By a job's name the UIDs of the jobs that had it and have children."""
        self._nodes: dict[str, bool] = {}
        """Whether each node is heard from; one that was removed is not."""
        self._hostnames: dict[str, str] = {}
        """The label by which the scheduler finds a node."""
        self._claims: dict[Name, str] = {}
        """Bound claims of node caches, with their UID."""
        self._cached: dict[Name, tuple[str, Mapping[str, int]]] = {}
        """Of each CachedDataset its address, and what each node holds of it in percent."""
        self._gone: dict[str, datetime] = {}
        """When objects went, by UID."""
        self._gone_of: dict[str, dict[str, tuple[datetime, Pod | None]]] = {}
        """The same by the owner's UID and the object's name, and what pods looked like."""

    # Jobs.

    def put_job(self, job: Mapping[str, Any]) -> bool:
        """Keeps a job; gives whether that is news."""
        metadata = job["metadata"]
        key = (metadata["namespace"], metadata["name"])
        with self._lock:
            known = self._jobs.get(key)
            if metadata["uid"] in self._gone:
                return False
            if known is not None and known["metadata"]["uid"] == metadata["uid"] and _version(known) >= _version(job):
                return False
            slim = {name: value for name, value in metadata.items() if name != "managedFields"}
            self._jobs[key] = {**job, "metadata": slim}
            return True

    def remove_job(self, key: Key, uid: str) -> None:
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known["metadata"]["uid"] == uid:
                del self._jobs[key]
            self._bury(uid, "", key[1])

    def job(self, key: Key) -> dict[str, Any] | None:
        with self._lock:
            return self._jobs.get(key)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, as stored."""
        with self._lock:
            return list(self._jobs.values())

    # Children.

    def put(self, kind: str, thing: Mapping[str, Any]) -> Key | None:
        """Keeps a child; gives the job that it is news for."""
        metadata = thing["metadata"]
        owner = controller(thing)
        if owner is None:
            return None
        name, uid, job = (metadata["namespace"], metadata["name"]), metadata["uid"], (metadata["namespace"], owner[0])
        with self._lock:
            known = self._entries.setdefault(kind, {}).get(name)
            if uid in self._gone or (known is not None and known.uid == uid and known.version >= _version(thing)):
                return None
            value = Pod.from_object(thing) if kind == "Pod" else Child.from_object(kind, thing)
            if known is not None:
                self._drop(kind, name, known)
            entry = _Entry(_version(thing), uid, owner[1], job, value)
            self._entries[kind][name] = entry
            self._of_owner.setdefault(owner[1], {})[kind, name] = entry
            self._owners.setdefault(job, set()).add(owner[1])
            return job

    def remove(self, kind: str, name: Name, uid: str) -> Key | None:
        """Forgets a child; gives the job that it is news for."""
        with self._lock:
            known = self._entries.get(kind, {}).get(name)
            if known is None or known.uid != uid:
                self._bury(uid, "", name[1])
                return None
            self._bury(uid, known.owner, name[1], known.value if isinstance(known.value, Pod) else None)
            self._drop(kind, name, known)
            return known.job

    def replace(self, kind: str, namespace: str | None, things: Iterable[Mapping[str, Any]]) -> set[Key]:
        """Takes a complete list of a kind; what is not in it is gone. Gives the jobs that it is news for."""
        news: set[Key | None] = set()
        listed: set[str] = set()
        with self._lock:
            before = [
                (name, entry.uid) for name, entry in self._entries.get(kind, {}).items() if namespace in (None, name[0])
            ]
            for thing in things:
                listed.add(thing["metadata"]["uid"])
                news.add(self.put(kind, thing))
            for name, uid in before:
                if uid not in listed:
                    news.add(self.remove(kind, name, uid))
        return {key for key in news if key is not None}

    def child(self, kind: str, name: Name, owner: str) -> Child | None:
        """The child of this name, where there is one and it belongs to the job with UID `owner`."""
        with self._lock:
            known = self._entries.get(kind, {}).get(name)
            return (
                known.value if known is not None and known.owner == owner and isinstance(known.value, Child) else None
            )

    def left_behind(self, key: Key) -> list[Pod]:
        """Pods that are being deleted and in which nothing runs, of the job of this name and of those that had it
        before."""
        with self._lock:
            values = [e.value for owner in self._owners.get(key, ()) for e in self._of_owner[owner].values()]
        pods = [one for one in values if isinstance(one, Pod)]
        return [pod for pod in pods if pod.overdue is not None]

    # Nodes.

    def put_node(self, node: Mapping[str, Any]) -> set[Key]:
        """Keeps whether a node is heard from; gives the jobs with pods on it where that changed."""
        conditions, name = (node.get("status") or {}).get("conditions") or (), node["metadata"]["name"]
        with self._lock:
            self._hostnames[name] = (node["metadata"].get("labels") or {}).get(HOSTNAME) or name
        ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "Unknown")
        return self._set_node(name, ready != "Unknown")

    def remove_node(self, name: str) -> set[Key]:
        return self._set_node(name, False)

    def replace_nodes(self, nodes: Iterable[Mapping[str, Any]]) -> set[Key]:
        news: set[Key] = set()
        with self._lock:
            left = set(self._nodes)
            for node in nodes:
                left.discard(node["metadata"]["name"])
                news |= self.put_node(node)
            for name in left:
                news |= self.remove_node(name)
        return news

    def _set_node(self, name: str, heard: bool) -> set[Key]:
        with self._lock:
            before = self._nodes.get(name)
            self._nodes[name] = heard
            if before == heard:
                return set()
            pods = self._entries.get("Pod", {}).values()
            return {entry.job for entry in pods if isinstance(entry.value, Pod) and entry.value.node == name}

    # The node cache.

    def put_claim(self, claim: Mapping[str, Any]) -> set[Key]:
        """Keeps whether a namespace's claim is bound; gives the namespace's jobs where that changed."""
        metadata = claim["metadata"]
        bound = metadata["name"] == CLAIM and (claim.get("status") or {}).get("phase") == "Bound"
        bound = bound and not metadata.get("deletionTimestamp")
        return self._set_claim((metadata["namespace"], metadata["name"]), metadata["uid"] if bound else None)

    def remove_claim(self, name: Name) -> set[Key]:
        return self._set_claim(name, None)

    def replace_claims(self, namespace: str | None, claims: Iterable[Mapping[str, Any]]) -> set[Key]:
        news: set[Key] = set()
        with self._lock:
            left = {name for name in self._claims if namespace in (None, name[0])}
            for claim in claims:
                left.discard((claim["metadata"]["namespace"], claim["metadata"]["name"]))
                news |= self.put_claim(claim)
            for name in left:
                news |= self.remove_claim(name)
        return news

    def _set_claim(self, name: Name, uid: str | None) -> set[Key]:
        with self._lock:
            if self._claims.get(name) == uid:
                return set()
            self._claims.pop(name, None)
            if uid is not None:
                self._claims[name] = uid
            return {key for key in self._jobs if key[0] == name[0]}

    def put_cached(self, dataset: Mapping[str, Any]) -> None:
        """Keeps where a dataset is warm."""
        metadata, spec, status = dataset["metadata"], dataset.get("spec") or {}, dataset.get("status") or {}
        nodes = {one["name"]: one.get("percent") or 0 for one in status.get("nodes") or () if "name" in one}
        with self._lock:
            self._cached[metadata["namespace"], metadata["name"]] = (str(spec.get("uri")), nodes)

    def remove_cached(self, name: Name) -> None:
        with self._lock:
            self._cached.pop(name, None)

    def replace_cached(self, namespace: str | None, datasets: Iterable[Mapping[str, Any]]) -> None:
        with self._lock:
            self._cached = {name: kept for name, kept in self._cached.items() if namespace not in (None, name[0])}
            for dataset in datasets:
                self.put_cached(dataset)

    def _warm(self, namespace: str, uri: str) -> dict[str, int]:
        """Hostnames of nodes that are heard from and hold some of the dataset, with the percentage."""
        found: dict[str, int] = {}
        name = (namespace, object_name(uri))
        known, nodes = self._cached.get(name, ("", {}))
        for node, percent in nodes.items() if known == uri else ():
            if self._nodes.get(node):
                found[self._hostnames.get(node, node)] = percent
        return found

    # What a plan sees.

    def observe(
        self,
        uid: str,
        policy: Policy,
        report: Report | None,
        troubles: Mapping[tuple[str, str], Trouble],
        logs: Mapping[str, str],
        job: Mapping[str, Any] | None = None,
    ) -> Observed:
        """All there is about the job with this UID; with `job`, also what the node cache has for it."""
        with self._lock:
            values = [entry.value for entry in self._of_owner.get(uid, {}).values()]
            pods = tuple(sorted((one for one in values if isinstance(one, Pod)), key=lambda pod: pod.name))
            # A node that was never seen is a new one, not a lost one.
            went = dict(self._gone_of.get(uid, {}))
            last = {name: pod for name, (_, pod) in went.items() if pod is not None}
            seen = (*pods, *last.values())
            lost = {pod.node for pod in seen if pod.node and not self._nodes.get(pod.node, True)}
            gone = {name: time for name, (time, _) in went.items()}
            namespace = job["metadata"]["namespace"] if job is not None else ""
            has_cache = (namespace, CLAIM) in self._claims
            warm = self._warm(namespace, _uri(job)) if has_cache else {}
        children = {(one.kind, one.name): one for one in values if isinstance(one, Child)}
        return Observed(pods, children, troubles, frozenset(lost), report, gone, last, logs, policy, has_cache, warm)

    # Inside.

    def _drop(self, kind: str, name: Name, entry: _Entry) -> None:
        del self._entries[kind][name]
        siblings = self._of_owner.get(entry.owner, {})
        siblings.pop((kind, name), None)
        if not siblings:
            self._of_owner.pop(entry.owner, None)
            owners = self._owners.get(entry.job, set())
            owners.discard(entry.owner)
            if not owners:
                self._owners.pop(entry.job, None)

    def _bury(self, uid: str, owner: str, name: str, pod: Pod | None = None) -> None:
        now = datetime.now(UTC)
        if len(self._gone) > _MOST_REMEMBERED:
            self._gone = {uid: time for uid, time in self._gone.items() if time > now - _REMEMBERED}
            self._gone_of = {
                owner: kept
                for owner, names in self._gone_of.items()
                if (kept := {name: entry for name, entry in names.items() if entry[0] > now - _REMEMBERED})
            }
        self._gone.setdefault(uid, now)
        if owner:
            self._gone_of.setdefault(owner, {}).setdefault(name, (now, pod))


def controller(thing: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and UID of the TrainingJob that controls an object; None where none does."""
    for reference in thing["metadata"].get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == KIND:
            return reference["name"], reference["uid"]
    return None


def _uri(job: Mapping[str, Any] | None) -> str:
    """The address of a stored job's dataset, whatever the job holds."""
    spec = (job or {}).get("spec")
    dataset = spec.get("dataset") if isinstance(spec, dict) else None
    uri = dataset.get("uri") if isinstance(dataset, dict) else None
    return uri if isinstance(uri, str) else ""


def _version(thing: Mapping[str, Any]) -> int:
    text = str(thing["metadata"].get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0
