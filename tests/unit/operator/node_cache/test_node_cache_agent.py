"""The whole agent of the node cache, with a real disk and an API server in memory, and its metrics."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stored_datasets import store_dataset

from topkube.job.cached_dataset import compute_dataset_id, name_cached_dataset
from topkube_operator.node_cache import agent as agents
from topkube_operator.node_cache.agent import Agent
from topkube_operator.node_cache.decisions import CacheLimits
from topkube_operator.node_cache.metrics import METRICS, AgentMetrics
from topkube_operator.node_cache.metrics_server import MetricsServer
from topkube_operator.node_cache.volume import Volume
from topkube_operator.watch.api_connection import ApiError


class ClaimsApiServer:
    """An API server in memory that stores CachedDatasets with resource versions and lists the claims of `claims`."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.claims: list[str] = []
        self.writes = 0

    def list(self, kind: str, namespace: Any, selector: str = "") -> tuple[list[dict[str, Any]], str]:
        claims = [
            {
                "metadata": {"name": "topkube-node-cache", "namespace": claim},
                "spec": {"volumeName": f"topkube-node-cache-{claim}"},
                "status": {"phase": "Bound"},
            }
            for claim in self.claims
        ]
        return claims, "1"

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in self.objects:
            raise ApiError(404, "not found")
        return json.loads(json.dumps(self.objects[namespace, name]))

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        metadata = {**manifest["metadata"], "uid": "u", "resourceVersion": "1"}
        self.objects[key] = {**manifest, "metadata": metadata}
        return self.objects[key]

    def patch(self, kind: str, namespace: str, name: str, patch: dict[str, Any], *, subresource: str = "") -> None:
        self.writes += 1
        state = self.objects[namespace, name]
        if state["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        version = str(int(state["metadata"]["resourceVersion"]) + 1)
        self.objects[namespace, name] = {
            **state,
            "metadata": {**state["metadata"], "resourceVersion": version},
            "status": {**(state.get("status") or {}), **patch["status"]},
        }


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ClaimsApiServer:
    monkeypatch.setattr(agents, "CLUSTER_SECONDS", 0.0)
    return ClaimsApiServer()


def test_a_dataset_lives_from_the_claim_to_its_deletion(volume: Volume, api: ClaimsApiServer) -> None:
    cluster: Any = api
    agent = Agent(cluster, volume, "n1", CacheLimits())
    agent.run_once()
    assert volume.list_namespaces() == frozenset()
    api.claims = ["team-a"]
    agent.run_once()
    assert volume.list_namespaces() == {"team-a"}
    store_dataset(volume.root, "team-a", "s3://bucket/data")
    agent.run_once()
    key = ("team-a", name_cached_dataset("s3://bucket/data"))
    assert (api.objects[key]["status"]["where"], api.objects[key]["status"]["cachedPercent"]) == ("n1", 100)
    writes = api.writes
    agent.run_once()
    assert api.writes == writes, "nothing new, nothing written"
    Agent(cluster, volume, "n1", CacheLimits()).run_once()
    assert api.writes == writes, "an agent that was killed reads the state again, and continues"
    api.objects[key]["spec"]["pinned"] = True
    full = Agent(cluster, volume, "n1", CacheLimits(size=10))
    full._pin_requests = {("team-a", compute_dataset_id("s3://bucket/data")): True}
    full.run_once()
    assert volume.read_datasets("team-a")[0].pinned
    del api.objects[key]
    full.run_once()  # sees that the CachedDataset is gone
    full.run_once()
    assert volume.read_datasets("team-a") == []
    assert api.objects == {}


def test_datasets_that_a_job_evicted_are_reported_too(volume: Volume, api: ClaimsApiServer) -> None:
    cluster: Any = api
    api.claims = ["team-a"]
    agent = Agent(cluster, volume, "n1", CacheLimits())
    agent.run_once()
    folder = store_dataset(volume.root, "team-a", "s3://bucket/data")
    agent.run_once()
    folder.remove()
    agent.run_once()
    (stored,) = api.objects.values()
    assert (stored["status"]["nodes"], stored["status"]["where"]) == ([], None)


def test_the_agent_evicts_the_least_recently_used_datasets(volume: Volume, api: ClaimsApiServer) -> None:
    cluster: Any = api
    api.claims = ["team-a", "team-b"]
    agent = Agent(cluster, volume, "n1", CacheLimits(size=2500))
    agent.run_once()
    now = time.time()
    for namespace, uri, ago in (("team-a", "s3://b/1", 300), ("team-b", "s3://b/2", 600), ("team-a", "s3://b/3", 100)):
        store_dataset(volume.root, namespace, uri, used=now - ago)
    agent.run_once()
    assert {folder.uri for name in ("team-a", "team-b") for folder in volume.read_datasets(name)} == {
        "s3://b/1",
        "s3://b/3",
    }


def read_samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_metrics_describe_the_last_pass(volume: Volume, api: ClaimsApiServer) -> None:
    cluster: Any = api
    api.claims = ["team-a", "team-b"]
    metrics = AgentMetrics("r", "n1")
    agent = Agent(cluster, volume, "n1", CacheLimits(size=2500), metrics)
    agent.run_once()
    samples = read_samples(metrics.render())
    assert samples["topkube_node_cache_missing_bytes", "n1", "r"] == 0
    now = time.time()
    for uri, ago in (("s3://b/1", 300), ("s3://b/2", 600), ("s3://b/3", 100)):
        store_dataset(volume.root, "team-a", uri, used=now - ago)
    agent.run_once()
    samples = read_samples(metrics.render())
    assert samples["topkube_node_cache_evictions_total", "team-a", "n1", "r"] == 1
    assert samples["topkube_node_cache_datasets", "team-a", "n1", "r"] == 2
    assert samples["topkube_node_cache_datasets", "team-b", "n1", "r"] == 0
    assert 0 < samples["topkube_node_cache_bytes", "team-a", "n1", "r"] <= 2500
    assert (
        samples["topkube_node_cache_disk_bytes", "n1", "r"] >= samples["topkube_node_cache_free_bytes", "n1", "r"] > 0
    )
    assert samples["topkube_node_cache_last_pass_timestamp_seconds", "n1", "r"] == pytest.approx(time.time(), abs=120)
    for dataset in volume.read_datasets("team-a"):
        volume.apply("team-a", [], [dataset.id], [])
        agent._pin_requests[dataset.name] = True
    agent._limits = CacheLimits(size=10)
    agent.run_once()
    assert read_samples(metrics.render())["topkube_node_cache_missing_bytes", "n1", "r"] > 0, (
        "all that is left is pinned"
    )


def test_every_metric_of_the_agent_is_served_by_its_own_process(tmp_path: Path) -> None:
    """The agent itself must not have a second thread, because it forks."""
    metrics = AgentMetrics("r", "n1")
    metrics.set_disk(100, 50, 20)
    metrics.set_pass(["team-a"], [], 0, 0)
    metrics.observe_call("GET", 0, None)
    file = tmp_path / "metrics"
    metrics.write(file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = MetricsServer(file, port, [])
    server.keep_running()
    try:
        text = scrape_when_up(port)
        served = {(name[0], len(name) - 1) for name in read_samples(text)}
        assert served == {(metric.name, len(metric.labels)) for metric in METRICS}
        assert read_samples(text)["topkube_node_cache_api_requests_total", "unreachable", "n1", "r"] == 1
        assert server._process is not None
        first = server._process
        first.kill()
        first.wait(20)
        server.keep_running()
        assert scrape_when_up(port) == text, "a server that ended is started again"
    finally:
        server.stop()


def scrape_when_up(port: int) -> bytes:
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                return bytes(answer.read())
        except OSError:
            assert time.monotonic() < end, "the metrics are not served"
            time.sleep(0.05)
