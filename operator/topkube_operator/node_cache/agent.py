"""The agent's loop: read the disk, decide, act, report to the cluster. One thread; failures are tried again."""

from __future__ import annotations

import http
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from topkube.job import API_VERSION
from topkube.job.cached_dataset import CACHED_KIND, name_cached_dataset
from topkube_operator.children.datasets import CLAIM
from topkube_operator.model import names
from topkube_operator.node_cache.decisions import (
    MOST_OBJECTS,
    MOST_REPORTED,
    REPEAT_AFTER,
    CacheLimits,
    CacheState,
    Decisions,
    LocalDataset,
    Name,
    build_status,
    decide,
    select_reported,
)
from topkube_operator.node_cache.metrics import AgentMetrics
from topkube_operator.node_cache.volume import UnusableFolder, Volume
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

_log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
CLUSTER_SECONDS = 10.0
"""How often the cluster is asked for claims and CachedDatasets while nothing changes on the disk."""


@dataclass
class _LastReport:
    """The last report of the agent about a dataset, its time, and the version of the CachedDataset."""

    dataset: LocalDataset | None
    at: float
    version: tuple[str, int] | None


@dataclass
class _Listing:
    """The CachedDatasets of a namespace, as the API server listed them at the time `at`."""

    at: float
    versions: dict[str, tuple[str, int]]
    """UID and generation, by name. They change when people delete a CachedDataset or change its spec."""
    has_room: bool
    """True if the agent may create CachedDatasets."""


class Agent:
    """The agent of `node`."""

    def __init__(
        self,
        cluster: ApiClient,
        volume: Volume,
        node: str,
        limits: CacheLimits,
        metrics: AgentMetrics | None = None,
    ) -> None:
        self._cluster, self._volume, self._node, self._limits = cluster, volume, node, limits
        self._metrics = metrics or AgentMetrics("topkube", node)
        self._allowed: frozenset[str] = frozenset()
        self._claims_read_at = float("-inf")
        self._pin_requests: dict[Name, bool] = {}
        """The datasets whose CachedDataset the agent has seen: True if the CachedDataset asks to pin the dataset."""
        self._deleted: set[Name] = set()
        self._reports: dict[Name, _LastReport] = {}
        self._listings: dict[str, _Listing] = {}
        self._warnings: dict[str, str] = {}

    def run_once(self) -> None:
        """Read the disk once, and do what is needed."""
        now = time.monotonic()
        if now - self._claims_read_at >= CLUSTER_SECONDS:
            self._claims_read_at = now
            self._read_claims()
        present = self._volume.list_namespaces()
        answers = {namespace: self._read_datasets(namespace) for namespace in sorted(present)}
        datasets = [dataset for answer in answers.values() for dataset in answer or ()]
        state = CacheState(
            self._allowed,
            present,
            tuple(datasets),
            self._volume.measure_free_bytes(),
            dict(self._pin_requests),
            frozenset(self._deleted),
        )
        decisions = decide(state, self._limits, time.time())
        for namespace in decisions.create:
            self._volume.create_folder(namespace)
            _log.info("%s has a node cache now", namespace)
        removed = self._apply_decisions(decisions)
        if decisions.excess_bytes:
            missing = -(-decisions.excess_bytes >> 30)
            self._warn_once("room", f"the cache exceeds its limits by {missing} GiB, but no dataset may be evicted")
        else:
            self._warnings.pop("room", None)
        for name in removed:
            self._deleted.discard(name)
        kept = {dataset.name: dataset for dataset in datasets if dataset.name not in removed}
        unreadable = sum(answer is None for answer in answers.values())
        self._metrics.count_evictions(removed)
        self._metrics.set_disk(self._volume.measure_total_bytes(), self._volume.measure_free_bytes(), self._limits.free)
        self._metrics.set_pass(present, kept.values(), decisions.excess_bytes, unreadable)
        self._report_changes(kept, removed)

    def _read_datasets(self, namespace: str) -> list[LocalDataset] | None:
        """Return the datasets of a namespace; None if its folder cannot be read."""
        try:
            datasets = self._volume.read_datasets(namespace)
            self._warnings.pop(namespace, None)
            return datasets
        except UnusableFolder as error:
            self._warn_once(namespace, str(error))
            return None

    def _apply_decisions(self, decisions: Decisions) -> set[Name]:
        """Evict, pin and unpin datasets. Return the datasets that were removed."""
        removed: set[Name] = set()
        for namespace in sorted({name[0] for name in (*decisions.evict, *decisions.pin, *decisions.unpin)}):
            evict, pin, unpin = (
                _list_ids(namespace, dataset_names)
                for dataset_names in (decisions.evict, decisions.pin, decisions.unpin)
            )
            try:
                removed_ids = self._volume.apply(namespace, evict, pin, unpin)
            except UnusableFolder as error:
                self._warn_once(namespace, str(error))
                continue
            for dataset_id in removed_ids:
                _log.info("evicted %s of %s", dataset_id, namespace)
            removed |= {(namespace, dataset_id) for dataset_id in removed_ids}
        return removed

    def _warn_once(self, subject: str, text: str) -> None:
        """Log a warning, unless it is the last warning about this subject."""
        if self._warnings.get(subject) != text:
            self._warnings[subject] = text
            _log.warning("%s", text)

    # The cluster.

    def _read_claims(self) -> None:
        try:
            claims, _ = self._cluster.list("PersistentVolumeClaim", None, names.NODE_CACHE, may_lag=True)
        except ApiError as error:
            self._warn_once("claims", f"cannot read which namespaces have a node cache: {error}")
            return
        self._warnings.pop("claims", None)
        self._allowed = frozenset(claim["metadata"]["namespace"] for claim in claims if is_node_cache_claim(claim))

    def _report_changes(self, on_disk: dict[Name, LocalDataset], removed: set[Name]) -> None:
        now = time.monotonic()
        datasets = {dataset.name: dataset for dataset in select_reported(on_disk.values())}
        if len(datasets) < len(on_disk):
            self._warn_once("reports", f"only the last used {MOST_REPORTED} datasets of each namespace are reported")
        # Datasets may also vanish in other ways: a job removes one to make room for its own dataset.
        vanished = {
            name for name, report in self._reports.items() if report.dataset is not None and name not in datasets
        }
        dataset_names = sorted({*datasets, *removed, *vanished})
        listings = {namespace: self._list_objects(namespace, now) for namespace in {name[0] for name in dataset_names}}
        self._listings = {namespace: listing for namespace, listing in listings.items() if listing is not None}
        for name in dataset_names:
            dataset, report, listing = datasets.get(name), self._reports.get(name), self._listings.get(name[0])
            reported_uri = report.dataset.uri if report and report.dataset else ""
            uri = dataset.uri if dataset is not None else reported_uri
            if not uri or listing is None:
                continue
            object_name = name_cached_dataset(uri)
            if report is not None and _is_reported(report, dataset, listing.versions.get(object_name), now):
                continue
            try:
                self._report_dataset(name, uri, dataset, listing)
            except ApiError as error:
                # Another node's agent was faster, or somebody has deleted the CachedDataset since it was listed.
                if error.status not in (http.HTTPStatus.CONFLICT, http.HTTPStatus.NOT_FOUND):
                    self._warn_once("cluster", f"{name[0]}/{object_name}: {error}")
                continue
            self._warnings.pop("cluster", None)
            if dataset is None:
                self._reports.pop(name, None)
            else:
                self._reports[name] = _LastReport(dataset, now, listing.versions.get(object_name))

    def _list_objects(self, namespace: str, now: float) -> _Listing | None:
        """Return the CachedDatasets of a namespace, not older than CLUSTER_SECONDS; None if they cannot be listed."""
        known = self._listings.get(namespace)
        if known is not None and now - known.at < CLUSTER_SECONDS:
            return known
        try:
            objects, _ = self._cluster.list(CACHED_KIND, namespace, metadata_only=True, may_lag=True)
        except ApiError as error:
            self._warn_once("cluster", f"cannot list the CachedDatasets of {namespace}: {error}")
            return None
        versions = {entry["metadata"]["name"]: _read_version(entry) for entry in objects}
        if len(versions) >= MOST_OBJECTS:
            text = f"{namespace} has {MOST_OBJECTS} CachedDatasets or more: new datasets are not reported. "
            self._warn_once(f"objects of {namespace}", text + "Delete the CachedDatasets that no node holds")
        return _Listing(now, versions, len(versions) < MOST_OBJECTS)

    def _report_dataset(self, name: Name, uri: str, dataset: LocalDataset | None, listing: _Listing) -> None:
        namespace, object_name = name[0], name_cached_dataset(uri)
        if name in self._deleted:
            return
        if object_name in listing.versions:
            stored = self._cluster.get(CACHED_KIND, namespace, object_name)
        elif name in self._pin_requests:
            try:
                stored = self._cluster.get(CACHED_KIND, namespace, object_name)  # the listing may lag behind
            except ApiError as error:
                if error.status != http.HTTPStatus.NOT_FOUND:
                    raise
                _log.info("%s/%s was deleted: its data is removed when no job reads it", namespace, object_name)
                del self._pin_requests[name]
                self._deleted.add(name)
                return
        elif dataset is None or not dataset.cached_bytes or not listing.has_room:
            return
        else:
            stored = self._create_object(namespace, object_name, uri, listing)
        if (stored.get("spec") or {}).get("uri") != uri:
            self._warn_once(
                object_name, f"{namespace}/{object_name} is not the CachedDataset of {uri}: it stays unchanged"
            )
            return
        self._pin_requests[name] = bool(stored["spec"].get("pinned"))
        status = build_status(stored.get("status"), self._node, dataset, datetime.now(UTC))
        if status is not None:
            guard = {key: stored["metadata"][key] for key in ("uid", "resourceVersion")}
            patch = {"metadata": guard, "status": status}
            self._cluster.patch(CACHED_KIND, namespace, object_name, patch, subresource="status")

    def _create_object(self, namespace: str, object_name: str, uri: str, listing: _Listing) -> dict[str, Any]:
        """Create a CachedDataset. If the API server refuses it, for example because of a ResourceQuota, no other is
        created before the next listing."""
        metadata = {"name": object_name, "namespace": namespace}
        manifest = {"apiVersion": API_VERSION, "kind": CACHED_KIND, "metadata": metadata, "spec": {"uri": uri}}
        try:
            stored = self._cluster.create(manifest)
        except ApiError as error:
            listing.has_room = error.status == http.HTTPStatus.CONFLICT
            raise
        listing.versions[object_name] = _read_version(stored)
        listing.has_room = len(listing.versions) < MOST_OBJECTS
        return stored


def is_node_cache_claim(claim: dict[str, Any]) -> bool:
    """Return True if a claim enables its namespace's node cache: it is bound to the volume that an admin made for
    it."""
    metadata, spec, status = claim["metadata"], claim.get("spec") or {}, claim.get("status") or {}
    return (
        metadata["name"] == CLAIM
        and status.get("phase") == "Bound"
        and spec.get("volumeName") == f"{CLAIM}-{metadata['namespace']}"
        and not metadata.get("deletionTimestamp")
    )


def _list_ids(namespace: str, dataset_names: Iterable[Name]) -> list[str]:
    return [dataset_id for space, dataset_id in dataset_names if space == namespace]


def _read_version(stored: dict[str, Any]) -> tuple[str, int]:
    metadata = stored["metadata"]
    return str(metadata.get("uid")), int(metadata.get("generation") or 0)


def _is_reported(
    report: _LastReport, dataset: LocalDataset | None, version: tuple[str, int] | None, now: float
) -> bool:
    """Return True if nothing is to be reported. `version` is the listed version of the CachedDataset."""
    if version != report.version:
        return False
    age = now - report.at
    if age < CLUSTER_SECONDS:
        return _is_same_report(report.dataset, dataset)
    return version is not None and report.dataset == dataset and age < REPEAT_AFTER.total_seconds()


def _is_same_report(first: LocalDataset | None, second: LocalDataset | None) -> bool:
    """Return True if the difference need not be written to the status at once."""
    if first is None or second is None:
        return first is second
    return (first.percent, first.cached_bytes, first.in_use) == (second.percent, second.cached_bytes, second.in_use)
