"""The whole agent of the node cache, with a real disk and an API server in memory, and its metrics."""

from __future__ import annotations

import collections
import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stored_datasets import Disk, store_dataset

from topkube.job.cached_dataset import CACHED_KIND, compute_dataset_id, name_cached_dataset
from topkube_operator.node_cache import agent as agents
from topkube_operator.node_cache import decisions
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
        self.calls: collections.Counter[str] = collections.Counter()
        self.quota: int | None = None
        """The most CachedDatasets that a ResourceQuota allows."""
        self.lags = False
        """True while the memory of the API server has no CachedDatasets yet."""

    def list(
        self, kind: str, namespace: Any, selector: str = "", *, metadata_only: bool = False, may_lag: bool = False
    ) -> tuple[list[dict[str, Any]], str]:
        assert may_lag, "a thousand agents that read from etcd every ten seconds slow the cluster down"
        if kind == CACHED_KIND:
            self.calls["list"] += 1
            assert metadata_only, "the status of one may have 200 KB"
            objects = {} if self.lags else self.objects
            return [{"metadata": entry["metadata"]} for key, entry in objects.items() if key[0] == namespace], "1"
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
        self.calls["get"] += 1
        if (namespace, name) not in self.objects:
            raise ApiError(404, "not found")
        return json.loads(json.dumps(self.objects[namespace, name]))

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        self.calls["create"] += 1
        if self.quota is not None and len(self.objects) >= self.quota:
            raise ApiError(403, "exceeded quota")
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        metadata = {**manifest["metadata"], "uid": "u", "resourceVersion": "1", "generation": 1}
        self.objects[key] = {**manifest, "metadata": metadata}
        return self.objects[key]

    def patch(self, kind: str, namespace: str, name: str, patch: dict[str, Any], *, subresource: str = "") -> None:
        self.writes += 1
        self.calls["patch"] += 1
        state = self.objects[namespace, name]
        if state["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        version = str(int(state["metadata"]["resourceVersion"]) + 1)
        self.objects[namespace, name] = {
            **state,
            "metadata": {**state["metadata"], "resourceVersion": version},
            "status": {**(state.get("status") or {}), **patch["status"]},
        }

    def pin(self, key: tuple[str, str], *, pinned: bool) -> None:
        """Pin a dataset, as people do."""
        self.objects[key]["spec"]["pinned"] = pinned
        self.objects[key]["metadata"]["generation"] += 1


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


def test_an_api_server_that_lags_behind_removes_no_data(volume: Volume, api: ClaimsApiServer) -> None:
    cluster: Any = api
    api.claims = ["team-a"]
    agent = Agent(cluster, volume, "n1", CacheLimits())
    agent.run_once()
    store_dataset(volume.root, "team-a", "s3://bucket/data")
    agent.run_once()
    (key,) = api.objects
    api.lags = True
    agent.run_once()
    agent.run_once()
    assert len(volume.read_datasets("team-a")) == 1
    api.lags = False
    del api.objects[key]
    agent.run_once()  # sees that the CachedDataset is gone
    agent.run_once()
    assert volume.read_datasets("team-a") == []


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of the agent: a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(agents.time, "monotonic", lambda: now[0])
    return now


def test_unchanged_datasets_cost_one_call_for_each_namespace(clock: list[float]) -> None:
    api, disk = ClaimsApiServer(), Disk([f"s3://b/{number}" for number in range(50)])
    cluster: Any = api
    agent = Agent(cluster, disk, "n1", CacheLimits())
    agent.run_once()
    assert (len(api.objects), api.calls["list"]) == (50, 1)
    api.calls.clear()
    for _ in range(30):
        clock[0] += agents.POLL_SECONDS
        agent.run_once()
    assert api.calls == {"list": 6}
    key = ("team", name_cached_dataset("s3://b/7"))
    api.pin(key, pinned=True)
    clock[0] += agents.CLUSTER_SECONDS
    agent.run_once()
    agent.run_once()
    assert (disk.pinned, api.calls["get"]) == ({compute_dataset_id("s3://b/7")}, 1)
    del api.objects[key]
    clock[0] += agents.CLUSTER_SECONDS
    agent.run_once()
    agent.run_once()
    assert key not in api.objects
    assert compute_dataset_id("s3://b/7") not in {dataset.id for dataset in disk.read_datasets("team")}


def test_an_unchanged_report_is_repeated_so_that_others_keep_the_node(clock: list[float]) -> None:
    api, disk = ClaimsApiServer(), Disk(["s3://b/1"])
    cluster: Any = api
    agent = Agent(cluster, disk, "n1", CacheLimits())
    agent.run_once()
    (stored,) = api.objects.values()
    stored["status"]["nodes"] = []
    clock[0] += 660
    agent.run_once()
    assert next(iter(api.objects.values()))["status"]["where"] == "n1"


def test_the_datasets_of_a_namespace_that_are_reported_are_limited(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decisions, "MOST_REPORTED", 10)
    monkeypatch.setattr(agents, "MOST_OBJECTS", 25)
    api, disk = ClaimsApiServer(), Disk([f"s3://b/{number}" for number in range(1000)])
    cluster: Any = api
    agent = Agent(cluster, disk, "n1", CacheLimits())
    for _ in range(10):
        agent.run_once()
        clock[0] += agents.CLUSTER_SECONDS
    uris = {entry["spec"]["uri"] for entry in api.objects.values()}
    assert uris == {f"s3://b/{number}" for number in range(990, 1000)}, "the last used"
    assert caplog.text.count("datasets of each namespace are reported") == 1
    for number in range(1000, 2000, 10):
        disk.uris = [f"s3://b/{number + offset}" for offset in range(10)]
        agent.run_once()
        clock[0] += agents.CLUSTER_SECONDS
    assert len(api.objects) == 25
    assert caplog.text.count("Delete the CachedDatasets that no node holds") == 1


def test_after_a_refused_creation_the_other_datasets_are_reported(clock: list[float]) -> None:
    api, disk = ClaimsApiServer(), Disk([f"s3://b/{number}" for number in range(20)])
    cluster: Any = api
    api.quota = 5
    agent = Agent(cluster, disk, "n1", CacheLimits())
    agent.run_once()
    agent.run_once()
    assert (len(api.objects), api.calls["create"], api.calls["patch"]) == (5, 6, 5)
    api.quota = None
    clock[0] += agents.CLUSTER_SECONDS
    agent.run_once()
    assert len(api.objects) == 20


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
