"""The node caches in the watch cache: which namespaces have one, and which nodes hold a part of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube.job.cached_dataset import name_cached_dataset
from topkube_operator.children.datasets import CLAIM
from topkube_operator.watch.known_children import Name


class KnownCaches:
    """The claims of node caches, and the CachedDatasets. Not safe for threads: the watch cache holds its lock."""

    def __init__(self) -> None:
        self._claims: dict[Name, str] = {}
        """The UIDs of the bound claims of node caches."""
        self._cached: dict[Name, tuple[str, Mapping[str, int]]] = {}
        """The address of each CachedDataset, and the percentage that each node holds."""

    def has_cache(self, namespace: str) -> bool:
        """Return True if the namespace has a node cache."""
        return (namespace, CLAIM) in self._claims

    def put_claim(self, claim: Mapping[str, Any]) -> bool:
        """Store whether a namespace's claim is bound. Return True if that has changed."""
        metadata = claim["metadata"]
        bound = metadata["name"] == CLAIM and (claim.get("status") or {}).get("phase") == "Bound"
        bound = bound and not metadata.get("deletionTimestamp")
        return self._set_claim((metadata["namespace"], metadata["name"]), metadata["uid"] if bound else None)

    def remove_claim(self, name: Name) -> bool:
        """Store that a claim is gone. Return True if it was bound."""
        return self._set_claim(name, None)

    def list_claims(self, namespace: str | None) -> set[Name]:
        """Return the bound claims of a namespace; None for all namespaces."""
        return {name for name in self._claims if namespace in (None, name[0])}

    def _set_claim(self, name: Name, uid: str | None) -> bool:
        if self._claims.get(name) == uid:
            return False
        self._claims.pop(name, None)
        if uid is not None:
            self._claims[name] = uid
        return True

    def put_dataset(self, dataset: Mapping[str, Any]) -> None:
        """Store which nodes hold a part of a dataset."""
        metadata, spec, status = dataset["metadata"], dataset.get("spec") or {}, dataset.get("status") or {}
        nodes = {entry["name"]: entry.get("percent") or 0 for entry in status.get("nodes") or () if "name" in entry}
        self._cached[metadata["namespace"], metadata["name"]] = (str(spec.get("uri")), nodes)

    def remove_dataset(self, name: Name) -> None:
        self._cached.pop(name, None)

    def list_datasets(self, namespace: str | None) -> set[Name]:
        """Return the CachedDatasets of a namespace; None for all namespaces."""
        return {name for name in self._cached if namespace in (None, name[0])}

    def find_nodes(self, namespace: str, uri: str) -> Mapping[str, int]:
        """Return the percentage of the dataset that each node holds."""
        cached_uri, nodes = self._cached.get((namespace, name_cached_dataset(uri)), ("", {}))
        return nodes if cached_uri == uri else {}
