"""The metrics of a node's agent: its disk, its datasets, its evictions and its calls.

The agent writes them to a file after each pass. `metrics_server` serves the file from a process of its own, because the
agent forks, which is safe in a process with one thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from topkube import __version__
from topkube.files import write_bytes
from topkube.telemetry.metrics import Metric
from topkube_operator.node_cache.decisions import LocalDataset, Name

OWN = ("release", "node")
OF_NAMESPACE = ("namespace", *OWN)

BUILD = Metric("topkube_node_cache_build_info", "info", "Always 1. `version` is the agent's.", (*OWN, "version"))
DISK_BYTES = Metric("topkube_node_cache_disk_bytes", "gauge", "Size of the disk that has the node's cache.", OWN)
FREE_BYTES = Metric("topkube_node_cache_free_bytes", "gauge", "Free bytes of this disk.", OWN)
KEEP_FREE_BYTES = Metric(
    "topkube_node_cache_keep_free_bytes", "gauge", "Bytes of this disk that the agent leaves free.", OWN
)
MISSING_BYTES = Metric(
    "topkube_node_cache_missing_bytes",
    "gauge",
    "Bytes that exceed the cache's limits although the agent has evicted everything that it may evict. Above 0: jobs "
    "store no more shards, and read from the remote store.",
    OWN,
)
CACHED_BYTES = Metric("topkube_node_cache_bytes", "gauge", "Bytes of datasets on this node.", OF_NAMESPACE)
DATASETS = Metric("topkube_node_cache_datasets", "gauge", "Datasets on this node.", OF_NAMESPACE)
EVICTIONS = Metric(
    "topkube_node_cache_evictions_total", "counter", "Datasets that the agent has removed.", OF_NAMESPACE
)
UNREADABLE = Metric(
    "topkube_node_cache_unreadable_folders",
    "gauge",
    "Folders of namespaces that the agent could not read in its last pass. Their datasets stay unchanged.",
    OWN,
)
API_REQUESTS = Metric(
    "topkube_node_cache_api_requests_total",
    "counter",
    "The agent's calls to the API server by status code. Calls without an answer have the code unreachable.",
    (*OWN, "code"),
)
LAST_PASS = Metric(
    "topkube_node_cache_last_pass_timestamp_seconds", "gauge", "When the agent last finished a pass.", OWN
)
METRICS = (
    *(DISK_BYTES, FREE_BYTES, KEEP_FREE_BYTES, MISSING_BYTES, CACHED_BYTES, DATASETS, EVICTIONS, UNREADABLE),
    *(API_REQUESTS, LAST_PASS, BUILD),
)


class AgentMetrics:
    """All metrics of the agent of `node`. `write` stores them in a file."""

    def __init__(self, release: str, node: str) -> None:
        disable_created_metrics()
        self._own = (release, node)
        self._registry = CollectorRegistry(auto_describe=False)
        self._add_gauge(BUILD).labels(*self._own, __version__).set(1)
        self._disk, self._free, self._keep_free, self._missing, self._unreadable, self._last_pass = (
            self._add_gauge(metric).labels(*self._own)
            for metric in (DISK_BYTES, FREE_BYTES, KEEP_FREE_BYTES, MISSING_BYTES, UNREADABLE, LAST_PASS)
        )
        self._bytes, self._datasets = self._add_gauge(CACHED_BYTES), self._add_gauge(DATASETS)
        self._evictions, self._calls = self._add_counter(EVICTIONS), self._add_counter(API_REQUESTS)

    def _add_gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self._registry)

    def _add_counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def set_disk(self, size: int, free: int, keep_free: int) -> None:
        """Set the bytes of the disk: all, free, and those to leave free."""
        self._disk.set(size)
        self._free.set(free)
        self._keep_free.set(keep_free)

    def set_pass(
        self, namespaces: Iterable[str], datasets: Iterable[LocalDataset], missing_bytes: int, unreadable: int
    ) -> None:
        """Set what a pass has seen: the namespaces with a folder, and their datasets."""
        stored = list(datasets)
        self._bytes.clear()
        self._datasets.clear()
        for namespace in namespaces:
            in_namespace = [dataset for dataset in stored if dataset.namespace == namespace]
            self._bytes.labels(namespace, *self._own).set(sum(dataset.cached_bytes for dataset in in_namespace))
            self._datasets.labels(namespace, *self._own).set(len(in_namespace))
            self._evictions.labels(namespace, *self._own)  # starts at 0, so that a rate includes the first eviction
        self._missing.set(missing_bytes)
        self._unreadable.set(unreadable)
        self._last_pass.set(time.time())

    def count_evictions(self, removed: Iterable[Name]) -> None:
        """Count removed datasets."""
        for namespace, _ in removed:
            self._evictions.labels(namespace, *self._own).inc()

    def observe_call(self, method: str, status: int, seconds: float | None) -> None:
        """Count a call to the API server. `status` is 0 without an answer."""
        self._calls.labels(*self._own, str(status) if status else "unreachable").inc()

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def write(self, path: Path) -> None:
        """Store the metrics in a file, atomically. Raises OSError."""
        write_bytes(path, self.render())
