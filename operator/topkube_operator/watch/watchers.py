"""Threads that keep the watch cache up to date: list, watch, and list again if the watch has lost its position.

Every list contains a resource version. If the versions have gone back, the cluster's data were restored from a backup.
Then a watch from a version that is not reached yet would be silent for hours, and the known objects would look newer
than the current objects. In this case everything is listed again and stored as it is.
"""

from __future__ import annotations

import http
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from topkube.job import KIND
from topkube.job.cached_dataset import CACHED_KIND
from topkube_operator.model import names
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.known_jobs import read_version
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import Key

_log = logging.getLogger(__name__)
CHILDREN = ("Pod", "Service", "Secret", "NetworkPolicy")
CLAIM = "PersistentVolumeClaim"
OPTIONAL = ("Node", CLAIM, CACHED_KIND, "Workload")
"""If these kinds are refused, the operator learns of lost nodes only from their pods, there is no node cache and no
preference for warm nodes, and jobs in Kueue's queues wait."""
_SELECTORS = {"Node": "", CACHED_KIND: "", CLAIM: names.NODE_CACHE}
_AUDIT_SECONDS = 30.0
"""How often the jobs that kopf has reported are compared with a list."""
_PAUSE, _LONGEST_PAUSE, _REFUSED_PAUSE = 0.2, 10.0, 30.0
"""Seconds between two tries: the first pause, the longest pause, and the pause after a refusal."""
_SHORT_WATCH = 1.0
"""If a watch ends sooner and without an event, the next watch begins after a pause."""
_PATIENCE_SECONDS = 180.0
"""A watcher that has heard nothing for longer counts as dead."""


class Watchers:
    """All watchers. `wake` is called with the keys of the jobs whose state has changed."""

    def __init__(
        self,
        cluster: ApiClient,
        cache: WatchCache,
        namespaces: Sequence[str],
        kinds: Sequence[str],
        wake: Callable[[Iterable[Key]], None],
    ) -> None:
        self._cluster, self._cache, self._wake = cluster, cache, wake
        self._namespaces: list[str | None] = list(namespaces) or [None]
        self._stopped = threading.Event()
        self._tasks: list[tuple[str, str | None]] = [
            *((kind, namespace) for kind in kinds for namespace in self._namespaces),
            *((kind, namespace) for kind in (CLAIM, CACHED_KIND) for namespace in self._namespaces),
            ("Node", None),
        ]
        self._heard_at: dict[tuple[str, str | None], float] = {}
        self._started_at = time.monotonic()
        self._listed: set[tuple[str, str | None]] = set()
        """The kinds and namespaces that have been listed completely."""
        self._refused: set[tuple[str, str | None]] = set()
        """Kinds that the API server refuses to list: OPTIONAL kinds, or those of one of several namespaces."""
        self._newest: dict[tuple[str, str | None], int] = {}
        """The version of the last list, by kind and namespace."""
        self._restores = 0
        self._restoring = threading.Lock()

    def start(self) -> None:
        self._started_at = time.monotonic()
        for kind, namespace in self._tasks:
            name = f"watch-{kind}-{namespace or 'all'}"
            threading.Thread(target=self._follow_kind, args=(kind, namespace), name=name, daemon=True).start()
        threading.Thread(target=self._audit_forever, name="audit", daemon=True).start()

    def add(self, kind: str) -> None:
        """Watch one more kind. All its objects in the namespaces that are served have been listed when this method
        returns. Raises ApiError."""
        served_namespaces = [namespace for namespace in self._namespaces if self.serves(namespace)]
        versions = {namespace: self._list_kind(kind, namespace) for namespace in served_namespaces}
        for namespace in self._namespaces:
            version = versions.get(namespace, "")
            if namespace not in versions:
                self._refused.add((kind, namespace))
            self._tasks.append((kind, namespace))
            name = f"watch-{kind}-{namespace or 'all'}"
            threading.Thread(target=self._follow_kind, args=(kind, namespace, version), name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def is_synced(self) -> bool:
        """Return True if everything has been listed once. Nothing may be decided before that."""
        is_listed = all(task in self._listed or task in self._refused for task in self._tasks)
        return is_listed and any(self.serves(namespace) for namespace in self._namespaces)

    def serves(self, namespace: str | None) -> bool:
        """Return False if the API server refuses to list a kind in this namespace: somebody has deleted the namespace,
        and with it the operator's rights there. Nothing may be decided about its jobs then."""
        return not any(scope == namespace and kind not in OPTIONAL for kind, scope in tuple(self._refused))

    def refuses(self, kind: str) -> bool:
        """Return True if the API server refuses to list a kind of OPTIONAL, or does not know it any more."""
        return any(refused == kind for refused, _ in tuple(self._refused))

    def is_alive(self) -> bool:
        """Return True if every watcher has heard from the API server within the last three minutes."""
        oldest = time.monotonic() - _PATIENCE_SECONDS
        return all(self._heard_at.get(task, self._started_at) > oldest or task in self._refused for task in self._tasks)

    def _follow_kind(self, kind: str, namespace: str | None, version: str = "") -> None:
        pause, restores = _PAUSE, self._restores
        while not self._stopped.is_set():
            wait, begun = 0.0, time.monotonic()
            try:
                if restores != self._restores:
                    restores, version = self._restores, ""
                version = version or self._list_kind(kind, namespace)
                before, version = version, self._watch_kind(kind, namespace, version, restores)
                if version != before or time.monotonic() - begun >= _SHORT_WATCH:
                    pause = _PAUSE
                    continue
            except ApiError as error:
                wait = error.wait
                if error.status == http.HTTPStatus.GONE:
                    version = ""
                if error.status in (403, 404):  # the right or the kind may be added later
                    if (kind, namespace) not in self._refused:
                        _log.warning("cannot watch %s in %s: %s", kind, namespace or "all namespaces", error)
                    # One of several namespaces must not keep the operator from the jobs of the others.
                    if kind in OPTIONAL or len(self._namespaces) > 1:
                        self._refused.add((kind, namespace))
                    version, pause = "", _REFUSED_PAUSE
            except Exception:
                _log.exception("the watcher of %s failed and starts again", kind)
                version, wait = "", 5.0
            # Spread the retries: a restarted API server sends 410 to every watch of every replica.
            self._stopped.wait(max(pause, wait) * random.uniform(0.8, 1.6))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _list_kind(self, kind: str, namespace: str | None) -> str:
        """List a kind into the watch cache. Return the version from which a watch can continue."""
        listed_version = ""

        def read_objects() -> Iterator[dict[str, Any]]:
            nonlocal listed_version
            for objects, version in self._cluster.list_pages(kind, namespace, _find_selector(kind)):
                if not listed_version:
                    self._check_version(kind, namespace, version)
                listed_version = version
                self._note_contact(kind, namespace)
                yield from objects

        changed: Iterable[Key] = ()
        if kind == "Node":
            changed = self._cache.replace_nodes(read_objects())
        elif kind == CLAIM:
            changed = self._cache.replace_claims(namespace, read_objects())
        elif kind == CACHED_KIND:
            self._cache.replace_datasets(namespace, read_objects())
        else:
            changed = self._cache.replace(kind, namespace, read_objects())
        self._refused.discard((kind, namespace))
        self._listed.add((kind, namespace))
        self._wake(changed)
        return listed_version

    def _check_version(self, kind: str, namespace: str | None, version: str) -> None:
        """Forget the known versions if resource versions have gone back."""
        number = int(version) if version.isdigit() else 0
        with self._restoring:
            before, self._newest[kind, namespace] = self._newest.get((kind, namespace), 0), number
            if number >= before:
                return
            _log.warning(
                "resource versions have gone back from %d to %d: the cluster's data were restored from a backup. "
                "Everything is listed again",
                before,
                number,
            )
            self._newest = {(kind, namespace): number}  # the other versions have gone back too
            self._restores += 1
            self._cache.forget_versions()

    def _watch_kind(self, kind: str, namespace: str | None, version: str, restores: int) -> str:
        for event in self._cluster.watch(kind, namespace, _find_selector(kind), version):
            self._note_contact(kind, namespace)
            if restores != self._restores:
                return version
            manifest = event["object"]
            version = manifest["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            self._wake(self._store_event(kind, manifest, deleted=event["type"] == "DELETED"))
        self._note_contact(kind, namespace)
        return version

    def _store_event(self, kind: str, manifest: dict[str, object], *, deleted: bool) -> Iterable[Key]:
        metadata: dict[str, str] = manifest["metadata"]  # type: ignore[assignment]
        if kind == "Node":
            return self._cache.remove_node(metadata["name"]) if deleted else self._cache.put_node(manifest)
        name = (metadata["namespace"], metadata["name"])
        if kind == CLAIM:
            return self._cache.remove_claim(name) if deleted else self._cache.put_claim(manifest)
        if kind == CACHED_KIND:
            self._cache.remove_dataset(name) if deleted else self._cache.put_dataset(manifest)
            return ()
        if deleted:
            key = self._cache.remove(kind, name, metadata["uid"])
        else:
            key = self._cache.put(kind, manifest)
        return () if key is None else (key,)

    def _note_contact(self, kind: str, namespace: str | None) -> None:
        self._heard_at[kind, namespace] = time.monotonic()

    def _audit_forever(self) -> None:
        while not self._stopped.wait(_AUDIT_SECONDS * random.uniform(0.9, 1.1)):
            try:
                self._wake(self.audit())
            except ApiError as error:
                _log.warning("the list of jobs could not be compared: %s", error)
            except Exception:  # such as an answer that is not JSON, from a proxy in front of the API server
                _log.exception("the list of jobs could not be compared")

    def audit(self) -> set[Key]:
        """Compare the jobs that kopf has reported with a list, and return the keys of changed jobs. Nobody reports a
        deletion that happens while a watch is interrupted, and a watch from before a restore is silent."""
        changed: set[Key] = set()
        for namespace in filter(self.serves, self._namespaces):
            before = [job for job in self._cache.list_jobs() if namespace in (None, job["metadata"]["namespace"])]
            objects, version = self._cluster.list(KIND, namespace, metadata_only=True)
            restores = self._restores
            self._check_version(KIND, namespace, version)
            if restores != self._restores:  # the current watches stay silent until they end
                for kind, scope in list(self._tasks):
                    if (kind, scope) not in self._refused:
                        self._list_kind(kind, scope)
            listed = {manifest["metadata"]["uid"] for manifest in objects}
            for job in before:
                metadata = job["metadata"]
                if metadata["uid"] not in listed:
                    self._cache.remove_job((metadata["namespace"], metadata["name"]), metadata["uid"])
                    changed.add((metadata["namespace"], metadata["name"]))
            known_versions = {job["metadata"]["uid"]: read_version(job["metadata"]) for job in self._cache.list_jobs()}
            for manifest in objects:
                metadata = manifest["metadata"]
                if known_versions.get(metadata["uid"], -1) < read_version(metadata):
                    job = self._cluster.get(KIND, metadata["namespace"], metadata["name"])
                    if self._cache.put_job(job):
                        changed.add((metadata["namespace"], metadata["name"]))
        return changed


def _find_selector(kind: str) -> str:
    return _SELECTORS.get(kind, names.JOB_NAME)
