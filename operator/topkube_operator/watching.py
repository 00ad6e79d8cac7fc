"""Threads that keep the store as the cluster is: list, watch, and list again when the watch has lost its place."""

from __future__ import annotations

import http
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from topkube.job import KIND
from topkube.job.cached_dataset import CACHED_KIND
from topkube_operator import names
from topkube_operator.cluster import ApiError, Cluster
from topkube_operator.queue import Key
from topkube_operator.store import Store

_log = logging.getLogger(__name__)
CHILDREN = ("Pod", "Service", "Secret", "NetworkPolicy")
CLAIM = "PersistentVolumeClaim"
OPTIONAL = ("Node", CLAIM, CACHED_KIND)
"""Without these there is no word of lost nodes but their pods', no node cache, no preference for warm nodes."""
_SELECTORS = {"Node": "", CACHED_KIND: "", CLAIM: names.NODE_CACHE}
_AUDIT_SECONDS = 30.0
_PATIENCE = 180.0


class Watching:
    """All watchers. `woken` is called with the jobs that there is news for."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        namespaces: Sequence[str],
        kinds: Sequence[str],
        woken: Callable[[Iterable[Key]], None],
    ) -> None:
        self._cluster, self._store, self._woken = cluster, store, woken
        self._namespaces: list[str | None] = list(namespaces) or [None]
        self._stopped = threading.Event()
        self._tasks: list[tuple[str, str | None]] = [
            *((kind, namespace) for kind in kinds for namespace in self._namespaces),
            *((kind, namespace) for kind in (CLAIM, CACHED_KIND) for namespace in self._namespaces),
            ("Node", None),
        ]
        self._heard: dict[tuple[str, str | None], float] = {}
        self._refused: set[tuple[str, str | None]] = set()

    def start(self) -> None:
        for kind, namespace in self._tasks:
            name = f"watch-{kind}-{namespace or 'all'}"
            threading.Thread(target=self._follow, args=(kind, namespace), name=name, daemon=True).start()
        threading.Thread(target=self._audit_forever, name="audit", daemon=True).start()

    def add(self, kind: str) -> None:
        """Follows one more kind; all of it has been listed when this returns. Raises ApiError."""
        versions = [(namespace, self._list(kind, namespace)) for namespace in self._namespaces]
        for namespace, version in versions:
            self._tasks.append((kind, namespace))
            name = f"watch-{kind}-{namespace or 'all'}"
            threading.Thread(target=self._follow, args=(kind, namespace, version), name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def synced(self) -> bool:
        """Whether everything has been listed once: before that, nothing may be decided."""
        return all(task in self._heard or task in self._refused for task in self._tasks)

    def alive(self) -> bool:
        """Whether every watcher has heard from the API server lately."""
        oldest = time.monotonic() - _PATIENCE
        return all(self._heard.get(task, 0.0) > oldest or task in self._refused for task in self._tasks)

    def _follow(self, kind: str, namespace: str | None, version: str = "") -> None:
        pause = 0.2
        while not self._stopped.is_set():
            try:
                version = version or self._list(kind, namespace)
                version = self._watch(kind, namespace, version)
                pause = 0.2
            except ApiError as error:
                if error.status == http.HTTPStatus.GONE:
                    version = ""
                    continue
                if error.status in (403, 404):  # a right or a kind that may come later
                    if (kind, namespace) not in self._refused:
                        _log.warning("cannot watch %s in %s: %s", kind, namespace or "all namespaces", error)
                    if kind in OPTIONAL:
                        self._refused.add((kind, namespace))
                    version, pause = "", 30.0
                self._stopped.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, 10.0)
            except Exception:
                _log.exception("the watcher of %s failed and starts again", kind)
                version = ""
                self._stopped.wait(5)

    def _list(self, kind: str, namespace: str | None) -> str:
        things, version = self._cluster.list(kind, namespace, _selector(kind))
        news: Iterable[Key] = ()
        if kind == "Node":
            news = self._store.replace_nodes(things)
        elif kind == CLAIM:
            news = self._store.replace_claims(namespace, things)
        elif kind == CACHED_KIND:
            self._store.replace_cached(namespace, things)
        else:
            news = self._store.replace(kind, namespace, things)
        self._refused.discard((kind, namespace))
        self._hear(kind, namespace)
        self._woken(news)
        return version

    def _watch(self, kind: str, namespace: str | None, version: str) -> str:
        for event in self._cluster.watch(kind, namespace, _selector(kind), version):
            self._hear(kind, namespace)
            thing = event["object"]
            version = thing["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            self._woken(self._take(kind, thing, deleted=event["type"] == "DELETED"))
        self._hear(kind, namespace)
        return version

    def _take(self, kind: str, thing: dict[str, object], *, deleted: bool) -> Iterable[Key]:
        metadata: dict[str, str] = thing["metadata"]  # type: ignore[assignment]
        if kind == "Node":
            return self._store.remove_node(metadata["name"]) if deleted else self._store.put_node(thing)
        name = (metadata["namespace"], metadata["name"])
        if kind == CLAIM:
            return self._store.remove_claim(name) if deleted else self._store.put_claim(thing)
        if kind == CACHED_KIND:
            self._store.remove_cached(name) if deleted else self._store.put_cached(thing)
            return ()
        if deleted:
            key = self._store.remove(kind, (metadata["namespace"], metadata["name"]), metadata["uid"])
        else:
            key = self._store.put(kind, thing)
        return () if key is None else (key,)

    def _hear(self, kind: str, namespace: str | None) -> None:
        self._heard[kind, namespace] = time.monotonic()

    def _audit_forever(self) -> None:
        while not self._stopped.wait(_AUDIT_SECONDS * random.uniform(0.9, 1.1)):
            try:
                self._woken(self.audit())
            except ApiError as error:
                _log.warning("the list of jobs could not be compared: %s", error)

    def audit(self) -> set[Key]:
        """Compares the jobs that kopf has told of with a list: a deletion during a broken watch is told by nobody."""
        news: set[Key] = set()
        for namespace in self._namespaces:
            before = [job for job in self._store.jobs() if namespace in (None, job["metadata"]["namespace"])]
            things, _ = self._cluster.list(KIND, namespace, metadata_only=True)
            listed = {thing["metadata"]["uid"] for thing in things}
            for job in before:
                metadata = job["metadata"]
                if metadata["uid"] not in listed:
                    self._store.remove_job((metadata["namespace"], metadata["name"]), metadata["uid"])
                    news.add((metadata["namespace"], metadata["name"]))
            known = {job["metadata"]["uid"] for job in self._store.jobs()}
            for thing in things:
                metadata = thing["metadata"]
                if metadata["uid"] not in known:
                    job = self._cluster.get(KIND, metadata["namespace"], metadata["name"])
                    if self._store.put_job(job):
                        news.add((metadata["namespace"], metadata["name"]))
        return news


def _selector(kind: str) -> str:
    return _SELECTORS.get(kind, names.JOB_NAME)
