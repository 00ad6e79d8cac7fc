"""The node agent: its decisions (pure), its changes of a disk, and its reports to the cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from topkube.data.cache.dataset_folder import DatasetFolder
from topkube.data.cache.disk_tier import DiskTier
from topkube.job.cached_dataset import CachedDatasetStatus, dataset_id, object_name
from topkube_operator.node_cache import agent as agents
from topkube_operator.node_cache.agent import Agent
from topkube_operator.node_cache.decisions import (
    CacheLimits,
    CacheState,
    Decisions,
    LocalDataset,
    build_status,
    decide,
)
from topkube_operator.node_cache.metrics import METRICS, AgentMetrics
from topkube_operator.node_cache.metrics_server import MetricsServer
from topkube_operator.node_cache.volume import UnusableFolder, Volume
from topkube_operator.watch.api_client import ApiError

NOW = 1_800_000_000.0
TIME = datetime.fromtimestamp(NOW, UTC)
folders = st.builds(
    LocalDataset,
    namespace=st.sampled_from(["a", "b", "c"]),
    id=st.uuids().map(lambda identifier: identifier.hex[:16]),
    uri=st.just("s3://bucket/x"),
    cached_bytes=st.integers(0, 100),
    last_used=st.floats(0, NOW),
    in_use=st.booleans(),
    pinned=st.booleans(),
)
limits = st.builds(
    CacheLimits,
    size=st.none() | st.integers(0, 500),
    free=st.integers(0, 300),
    idle_seconds=st.sampled_from([0.0, 3600.0]),
)


@st.composite
def situations(draw: st.DrawFn) -> CacheState:
    there = tuple(draw(st.lists(folders, max_size=8)))
    names = [dataset.name for dataset in there]
    some = st.sets(st.sampled_from(names)) if names else st.just(set())
    return CacheState(
        allowed=frozenset(draw(st.sets(st.sampled_from(["a", "b", "d"])))),
        present=frozenset(dataset.namespace for dataset in there),
        datasets=there,
        free=draw(st.integers(0, 400)),
        wishes={name: draw(st.booleans()) for name in draw(some)},
        deleted=frozenset(draw(some)),
    )


def _apply(state: CacheState, done: Decisions) -> CacheState:
    left = tuple(dataset for dataset in state.datasets if dataset.name not in done.evict)
    evicted_bytes = sum(dataset.cached_bytes for dataset in state.datasets) - sum(
        dataset.cached_bytes for dataset in left
    )
    left = tuple(
        replace(dataset, pinned=(dataset.pinned or dataset.name in done.pin) and dataset.name not in done.unpin)
        for dataset in left
    )
    return replace(
        state,
        datasets=left,
        free=state.free + evicted_bytes,
        present=state.present | set(done.create),
        deleted=frozenset(),
    )


@given(situations(), limits)
def test_datasets_in_use_or_pinned_stay_and_the_others_are_evicted_oldest_first(
    state: CacheState, wanted: CacheLimits
) -> None:
    done = decide(state, wanted, NOW)
    by_name = {dataset.name: dataset for dataset in state.datasets}
    evicted = [by_name[name] for name in done.evict]
    pinned = {name: state.wishes.get(name, dataset.pinned) for name, dataset in by_name.items()}
    assert len(set(done.evict)) == len(done.evict)
    assert not any(dataset.in_use for dataset in evicted)
    assert not any(pinned[dataset.name] and dataset.name not in state.deleted for dataset in evicted)
    for_room = [dataset for dataset in evicted if dataset.name not in state.deleted]
    spared = [
        dataset
        for dataset in state.datasets
        if dataset.name not in done.evict and not dataset.in_use and not pinned[dataset.name] and dataset.cached_bytes
    ]
    assert all(dataset.last_used <= other.last_used for dataset in for_room for other in spared), (
        "least recently used first"
    )
    after = _apply(state, done)
    used = sum(dataset.cached_bytes for dataset in after.datasets)
    if spared:  # there was no need for more
        assert after.free >= wanted.free
        assert wanted.size is None or used <= wanted.size
        assert done.missing_bytes == 0
    assert (done.missing_bytes > 0) == (after.free < wanted.free or (wanted.size is not None and used > wanted.size))
    assert set(done.create) == state.allowed - state.present


@given(situations(), limits)
def test_a_second_decision_changes_nothing(state: CacheState, wanted: CacheLimits) -> None:
    again = decide(_apply(state, decide(state, wanted, NOW)), wanted, NOW)
    assert (again.create, again.evict, again.pin, again.unpin) == ((), (), (), ())


def test_nothing_is_evicted_without_need() -> None:
    dataset = LocalDataset("a", "1", "s3://x/y", cached_bytes=10, last_used=NOW - 1)
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(free=50), NOW) == Decisions()
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(idle_seconds=10), NOW) == Decisions()
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(idle_seconds=0.5), NOW).evict == (("a", "1"),)


# The status of CachedDatasets.

entries = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["n1", "n2", "n3"]),
        "cachedBytes": st.integers(0, 10),
        "percent": st.integers(0, 100),
        "updatedAt": st.integers(0, 7200).map(lambda ago: (TIME - timedelta(seconds=ago)).isoformat()),
    }
)


@given(
    st.none()
    | st.text(max_size=3)
    | st.fixed_dictionaries({"nodes": st.lists(entries, unique_by=lambda node: node["name"])}),
    st.none() | folders,
    st.none() | st.integers(0, 200),
)
def test_the_status_has_this_node_as_it_is_and_the_others_as_they_were(
    stored: Any, folder: LocalDataset | None, total: int | None
) -> None:
    folder = replace(folder, total_bytes=total) if folder is not None else None
    status = build_status(stored, "n1", folder, TIME)
    before = {node["name"]: node for node in stored["nodes"]} if isinstance(stored, dict) else {}
    result = status if status is not None else stored
    nodes = {node["name"]: node for node in (result or {}).get("nodes") or ()}
    assert ("n1" in nodes) == (folder is not None)
    for name in ("n2", "n3"):
        fresh = name in before and datetime.fromisoformat(before[name]["updatedAt"]) >= TIME - timedelta(hours=1)
        assert nodes.get(name) == (before[name] if fresh else None)
    if folder is not None:
        assert nodes["n1"]["cachedBytes"] == folder.cached_bytes
        if total is not None:
            assert (nodes["n1"]["percent"] == 100) == (folder.cached_bytes >= total)
    if status is not None:
        CachedDatasetStatus.model_validate({key: value for key, value in status.items() if value is not None})
        again = build_status({key: value for key, value in status.items() if value is not None}, "n1", folder, TIME)
        assert again is None or (not status["nodes"] and again == status)


def test_people_see_the_least_that_a_node_holds() -> None:
    first = build_status(
        None, "n1", LocalDataset("a", "1", "s3://x/y", cached_bytes=50, total_bytes=100, last_used=NOW - 60), TIME
    )
    assert first is not None
    second = build_status(
        first, "n2", LocalDataset("a", "1", "s3://x/y", cached_bytes=100, total_bytes=100, last_used=NOW), TIME
    )
    assert second is not None
    assert (second["where"], second["cachedPercent"]) == ("n1,n2", 50)
    assert second["lastUsed"] == second["nodes"][1]["lastUsed"] > second["nodes"][0]["lastUsed"]


@given(st.from_regex(r"[a-z][a-z0-9+.-]{0,5}://\S{1,80}", fullmatch=True))
def test_every_address_has_a_name_that_kubernetes_takes(uri: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", object_name(uri))
    assert len(object_name(uri)) <= 63


# The disk.


def fill(root: Path, namespace: str, uri: str, size: int = 1000, used: float | None = None) -> DatasetFolder:
    """A dataset as a job leaves it."""
    folder = DiskTier(root / namespace).dataset(uri)
    os.close(folder.publish(f"{size:032x}", size, lambda file: os.truncate(file, size)))
    folder.write_summary({"bytes": size, "shards": 1, "listing": "x"})
    if used is not None:
        os.utime(folder.path / "dataset.json", (used, used))
    return folder


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path / "node")


def test_any_user_of_a_namespace_writes_in_its_folder_and_other_namespaces_cannot(volume: Volume) -> None:
    if os.geteuid():
        pytest.skip("needs root to be several users")
    volume.create_folder("team-a")
    assert volume.list_namespaces() == {"team-a"}
    assert stat.S_IMODE(volume.root.stat().st_mode) == 0o711
    script = (
        "import os, sys; from pathlib import Path; from topkube.data.cache.disk_tier import DiskTier\n"
        "uid, key = int(sys.argv[2]), sys.argv[3]\n"
        "os.chroot(sys.argv[1]); os.chdir('/'); os.setgroups([]); os.setgid(uid); os.setuid(uid); os.umask(0o077)\n"
        "folder = DiskTier(Path('/')).dataset('s3://bucket/x')\n"
        "use = folder.use(); os.close(folder.publish(key, 7, lambda file: os.truncate(file, 7)))\n"
        "print(len(folder.entries()), folder.evict('a' * 32) if uid == 2000 else '')\n"
    )
    # As in a pod: the namespace's folder is all there is. All that Python needs is loaded before.
    before = (
        "import numpy, xxhash, json, mmap, uuid, tempfile, encodings.idna\n"
        "import topkube_operator.node_cache.volume as v; v._preload()\n"
    )
    for uid, key in ((1000, "a" * 32), (2000, "b" * 32)):
        command = [sys.executable, "-c", before + script, str(volume.root / "team-a"), str(uid), key]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "7"], "another user's shard is seen, and can be evicted"


def test_datasets_are_found_pinned_and_evicted(volume: Volume) -> None:
    volume.create_folder("team-a")
    kept, old = (
        fill(volume.root, "team-a", "s3://bucket/kept"),
        fill(volume.root, "team-a", "s3://bucket/old", used=5.0),
    )
    use = kept.use()
    state = {dataset.uri: dataset for dataset in volume.read_datasets("team-a")}
    assert state["s3://bucket/kept"].in_use
    assert state["s3://bucket/old"] == LocalDataset(
        "team-a", old.name, "s3://bucket/old", 1000, 1, 1000, last_used=5.0, in_use=False, pinned=False
    )
    assert volume.apply("team-a", [kept.name, old.name], [], []) == {old.name}, "what is read stays"
    use.release()
    volume.apply("team-a", [], [kept.name], [])
    assert volume.read_datasets("team-a")[0].pinned
    volume.apply("team-a", [], [], [kept.name])
    assert not volume.read_datasets("team-a")[0].pinned


def test_a_namespace_cannot_lead_the_agent_elsewhere(volume: Volume, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to confine")
    for name in ("team-a", "team-b"):
        volume.create_folder(name)
    secret = fill(volume.root, "team-b", "s3://bucket/secret")
    fill(volume.root, "team-a", "s3://bucket/own")
    datasets = volume.root / "team-a/datasets"
    (datasets / secret.name).symlink_to(secret.path)
    (datasets / "0123456789abcdef").mkdir()
    (datasets / "0123456789abcdef/dataset.json").write_text(json.dumps({"uri": "s3://bucket/forged"}))
    assert [dataset.uri for dataset in volume.read_datasets("team-a")] == ["s3://bucket/own"]
    assert volume.apply("team-a", [secret.name], [], []) == set()
    assert secret.shard_path(f"{1000:032x}").exists()


def test_a_folder_that_never_answers_costs_a_deadline_and_no_more(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    from topkube_operator.node_cache import volume as module

    monkeypatch.setattr(module, "_READ_SECONDS", 0.3)
    volume.create_folder("team-a")
    folder = fill(volume.root, "team-a", "s3://bucket/own")
    (folder.path / "dataset.json").unlink()
    os.mkfifo(folder.path / "dataset.json")
    with pytest.raises(UnusableFolder, match="did not answer"):
        volume.read_datasets("team-a")


# The whole agent, with an API server in memory.


class Api:
    """Objects of one kind, with versions."""

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
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(agents, "CLUSTER_SECONDS", 0.0)
    return Api()


def test_a_dataset_lives_from_the_claim_to_its_deletion(volume: Volume, api: Api) -> None:
    cluster: Any = api
    agent = Agent(cluster, volume, "n1", CacheLimits())
    agent.run_once()
    assert volume.list_namespaces() == frozenset()
    api.claims = ["team-a"]
    agent.run_once()
    assert volume.list_namespaces() == {"team-a"}
    fill(volume.root, "team-a", "s3://bucket/data")
    agent.run_once()
    key = ("team-a", object_name("s3://bucket/data"))
    assert (api.objects[key]["status"]["where"], api.objects[key]["status"]["cachedPercent"]) == ("n1", 100)
    writes = api.writes
    agent.run_once()
    assert api.writes == writes, "nothing new, nothing written"
    Agent(cluster, volume, "n1", CacheLimits()).run_once()
    assert api.writes == writes, "an agent that was killed goes on by looking"
    api.objects[key]["spec"]["pinned"] = True
    full = Agent(cluster, volume, "n1", CacheLimits(size=10))
    full._wishes = {("team-a", dataset_id("s3://bucket/data")): True}
    full.run_once()
    assert volume.read_datasets("team-a")[0].pinned
    del api.objects[key]
    full.run_once()  # sees that it is gone
    full.run_once()
    assert volume.read_datasets("team-a") == []
    assert api.objects == {}


def test_datasets_that_a_job_evicted_are_reported_too(volume: Volume, api: Api) -> None:
    cluster: Any = api
    api.claims = ["team-a"]
    agent = Agent(cluster, volume, "n1", CacheLimits())
    agent.run_once()
    folder = fill(volume.root, "team-a", "s3://bucket/data")
    agent.run_once()
    folder.remove()
    agent.run_once()
    (stored,) = api.objects.values()
    assert (stored["status"]["nodes"], stored["status"]["where"]) == ([], None)


def test_the_agent_evicts_the_least_recently_used_datasets(volume: Volume, api: Api) -> None:
    cluster: Any = api
    api.claims = ["team-a", "team-b"]
    agent = Agent(cluster, volume, "n1", CacheLimits(size=2500))
    agent.run_once()
    now = time.time()
    for namespace, uri, ago in (("team-a", "s3://b/1", 300), ("team-b", "s3://b/2", 600), ("team-a", "s3://b/3", 100)):
        fill(volume.root, namespace, uri, used=now - ago)
    agent.run_once()
    assert {folder.uri for name in ("team-a", "team-b") for folder in volume.read_datasets(name)} == {
        "s3://b/1",
        "s3://b/3",
    }


def _samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_pass_is_in_the_metrics(volume: Volume, api: Api) -> None:
    cluster: Any = api
    api.claims = ["team-a", "team-b"]
    metrics = AgentMetrics("r", "n1")
    agent = Agent(cluster, volume, "n1", CacheLimits(size=2500), metrics)
    agent.run_once()
    samples = _samples(metrics.text())
    assert samples["topkube_node_cache_missing_bytes", "n1", "r"] == 0
    now = time.time()
    for uri, ago in (("s3://b/1", 300), ("s3://b/2", 600), ("s3://b/3", 100)):
        fill(volume.root, "team-a", uri, used=now - ago)
    agent.run_once()
    samples = _samples(metrics.text())
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
        agent._wishes[dataset.name] = True
    agent._limits = CacheLimits(size=10)
    agent.run_once()
    assert _samples(metrics.text())["topkube_node_cache_missing_bytes", "n1", "r"] > 0, "all that is left is pinned"


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
        text = _scrape_when_up(port)
        served = {(name[0], len(name) - 1) for name in _samples(text)}
        assert served == {(metric.name, len(metric.labels)) for metric in METRICS}
        assert _samples(text)["topkube_node_cache_api_requests_total", "unreachable", "n1", "r"] == 1
        assert server._process is not None
        first = server._process
        first.kill()
        first.wait(20)
        server.keep_running()
        assert _scrape_when_up(port) == text, "a server that ended is started again"
    finally:
        server.stop()


def _scrape_when_up(port: int) -> bytes:
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                return bytes(answer.read())
        except OSError:
            assert time.monotonic() < end, "the metrics are not served"
            time.sleep(0.05)
