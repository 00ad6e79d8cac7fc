"""The agent's loop: look at the disk, decide, act, tell the cluster. One thread; whatever fails is tried again."""

from __future__ import annotations

import http
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from topkube.job import API_VERSION
from topkube.job.cached_dataset import CACHED_KIND, object_name
from topkube_operator import names
from topkube_operator.cluster import ApiError, Cluster
from topkube_operator.datasets import CLAIM
from topkube_operator.node_cache import plan as planning
from topkube_operator.node_cache.plan import Folder, Found, Limits, Name
from topkube_operator.node_cache.volume import Unusable, Volume

_log = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
CLUSTER_SECONDS = 10.0
"""How often claims and wishes are asked for, where nothing changes on the disk."""


@dataclass
class _Told:
    """What the cluster was last told of a dataset, and when."""

    folder: Folder | None
    at: float


class Agent:
    """The agent of `node`."""

    def __init__(self, cluster: Cluster, volume: Volume, node: str, limits: Limits) -> None:
        self._cluster, self._volume, self._node, self._limits = cluster, volume, node, limits
        self._allowed: frozenset[str] = frozenset()
        self._asked = float("-inf")
        self._wishes: dict[Name, bool] = {}
        """Datasets whose CachedDataset we have seen, and whether it asks for a pin."""
        self._deleted: set[Name] = set()
        self._told: dict[Name, _Told] = {}
        self._complaints: dict[str, str] = {}

    def turn(self) -> None:
        """Looks once, and does what is to be done."""
        now = time.monotonic()
        if now - self._asked >= CLUSTER_SECONDS:
            self._asked = now
            self._ask_for_claims()
        present = self._volume.namespaces()
        folders = [folder for namespace in sorted(present) for folder in self._look(namespace)]
        found = Found(
            self._allowed, present, tuple(folders), self._volume.free(), dict(self._wishes), frozenset(self._deleted)
        )
        decided = planning.plan(found, self._limits, time.time())
        for namespace in decided.make:
            self._volume.make(namespace)
            _log.info("%s has a node cache now", namespace)
        gone = self._act(decided)
        if decided.lacking:
            lacking = -(-decided.lacking >> 30)
            self._complain("room", f"{lacking} GiB more should be free, and no dataset is left that may go")
        else:
            self._complaints.pop("room", None)
        for name in gone:
            self._deleted.discard(name)
        self._tell({one.name: one for one in folders if one.name not in gone}, gone)

    def _look(self, namespace: str) -> list[Folder]:
        try:
            found = self._volume.look(namespace)
            self._complaints.pop(namespace, None)
            return found
        except Unusable as error:
            self._complain(namespace, str(error))
            return []

    def _act(self, decided: planning.Plan) -> set[Name]:
        """Gives the datasets that are gone."""
        gone: set[Name] = set()
        for namespace in sorted({name[0] for name in (*decided.evict, *decided.pin, *decided.unpin)}):
            evict, pin, unpin = (_of(namespace, those) for those in (decided.evict, decided.pin, decided.unpin))
            try:
                removed = self._volume.act(namespace, evict, pin, unpin)
            except Unusable as error:
                self._complain(namespace, str(error))
                continue
            for one in removed:
                _log.info("evicted %s of %s", one, namespace)
            gone |= {(namespace, one) for one in removed}
        return gone

    def _complain(self, about: str, text: str) -> None:
        """Once per trouble."""
        if self._complaints.get(about) != text:
            self._complaints[about] = text
            _log.warning("%s", text)

    # ---- the cluster

    def _ask_for_claims(self) -> None:
        try:
            claims, _ = self._cluster.list("PersistentVolumeClaim", None, names.NODE_CACHE)
        except ApiError as error:
            self._complain("claims", f"which namespaces have a node cache is not known: {error}")
            return
        self._complaints.pop("claims", None)
        self._allowed = frozenset(one["metadata"]["namespace"] for one in claims if bound(one))

    def _tell(self, folders: dict[Name, Folder], gone: set[Name]) -> None:
        now = time.monotonic()
        # What has vanished some other way (a job made room for its own dataset) is told as well.
        vanished = {name for name, told in self._told.items() if told.folder is not None and name not in folders}
        for name in sorted({*folders, *gone, *vanished}):
            folder, told = folders.get(name), self._told.get(name)
            if told is not None and _alike(told.folder, folder) and now - told.at < CLUSTER_SECONDS:
                continue
            uri = folder.uri if folder is not None else told.folder.uri if told and told.folder else ""
            if not uri:
                continue
            try:
                self._tell_one(name, uri, folder)
            except ApiError as error:
                if error.status != http.HTTPStatus.CONFLICT:  # another node's agent was faster
                    self._complain("cluster", f"{name[0]}/{object_name(uri)}: {error}")
                continue
            self._complaints.pop("cluster", None)
            if folder is None:
                self._told.pop(name, None)
            else:
                self._told[name] = _Told(folder, now)

    def _tell_one(self, name: Name, uri: str, folder: Folder | None) -> None:
        namespace, called = name[0], object_name(uri)
        if name in self._deleted:
            return
        try:
            found = self._cluster.get(CACHED_KIND, namespace, called)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            if name in self._wishes:
                _log.info("%s/%s was deleted: its data goes as soon as nobody reads it", namespace, called)
                del self._wishes[name]
                self._deleted.add(name)
                return
            if folder is None or not folder.cached_bytes:
                return
            found = self._cluster.create(
                {
                    "apiVersion": API_VERSION,
                    "kind": CACHED_KIND,
                    "metadata": {"name": called, "namespace": namespace},
                    "spec": {"uri": uri},
                }
            )
        if (found.get("spec") or {}).get("uri") != uri:
            self._complain(called, f"{namespace}/{called} is not the CachedDataset of {uri}: it is left alone")
            return
        self._wishes[name] = bool(found["spec"].get("pinned"))
        wanted = planning.status(found.get("status"), self._node, folder, datetime.now(UTC))
        if wanted is not None:
            guard = {key: found["metadata"][key] for key in ("uid", "resourceVersion")}
            patch = {"metadata": guard, "status": wanted}
            self._cluster.patch(CACHED_KIND, namespace, called, patch, subresource="status")


def bound(claim: dict[str, Any]) -> bool:
    """Whether a claim stands for its namespace's node cache: bound to the volume that an admin has made for it."""
    metadata, spec, status = claim["metadata"], claim.get("spec") or {}, claim.get("status") or {}
    return (
        metadata["name"] == CLAIM
        and status.get("phase") == "Bound"
        and spec.get("volumeName") == f"{CLAIM}-{metadata['namespace']}"
        and not metadata.get("deletionTimestamp")
    )


def _of(namespace: str, those: Iterable[Name]) -> list[str]:
    return [one for space, one in those if space == namespace]


def _alike(one: Folder | None, other: Folder | None) -> bool:
    """Whether the cluster need not hear of the difference at once."""
    if one is None or other is None:
        return one is other
    return (one.percent, one.cached_bytes, one.in_use) == (other.percent, other.cached_bytes, other.in_use)
