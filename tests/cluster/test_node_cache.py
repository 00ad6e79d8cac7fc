"""Datasets on a cluster: a pod's own volume, and the node cache that jobs share one after the other."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import needs
import pytest
from jobs import build_job
from kubernetes.client.exceptions import ApiException
from localkube.images import RUNTIME
from target import GROUP, VERSION, Namespace, Target, execute, wait_for

from conftest import SharedStep, read_manifest
from topkube.job.cached_dataset import name_cached_dataset

SHARDS, SHARD = 8, 1 << 20
AGENTS = "topkube-node-cache"
# The remote serves a folder of tar shards, with ranges, and counts the bytes of shards that it has sent.
REMOTE = f"""
import http.server, io, os, tarfile, threading
os.makedirs("/tmp/data"); os.chdir("/tmp/data"); sent = 0
for shard in range({SHARDS}):
    with tarfile.open(f"{{shard:03}}.tar", "w") as tar:
        for sample in range(16):
            member = tarfile.TarInfo(f"{{shard:03}}{{sample:02}}.bin"); member.size = {SHARD} // 16
            tar.addfile(member, io.BytesIO(os.urandom(member.size)))
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        global sent
        name, headers = self.path.split("?")[0], {{}}
        if name == "/sent":
            data, status = str(sent).encode(), 200
        elif name.endswith(".tar") and os.path.exists("." + name):
            data, status = open("." + name, "rb").read(), 200
            headers["Last-Modified"] = self.date_time_string(os.stat("." + name).st_mtime)
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                first, size = int(first), len(data)
                data, status = data[first:int(last) + 1 if last else None], 206
                headers["Content-Range"] = f"bytes {{first}}-{{first + len(data) - 1}}/{{size}}"
            sent += len(data)
        else:
            return super().do_GET()
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
# A script that reads plain files under mountPath and tries to write there, and a script that reads samples.
PLAIN = """
import errno, json, pathlib, time
data = pathlib.Path("/data")
while not (data / ".topkube-complete").exists():
    time.sleep(0.05)
archives = sorted(path.name for path in data.glob("*.tar"))
try:
    (data / "mine").write_text("x"); refused = None
except OSError as error:
    refused = errno.errorcode[error.errno]
print(json.dumps({"files": archives, "refused": refused}), flush=True)
"""
SAMPLES = """
import json, os, sys, time, topkube
from topkube.data import CachedDataset
topkube.init()
dataset = CachedDataset("/data")
count = sum(len(sample["bin"]) for sample in map(dataset.__getitem__, range(len(dataset))))
statistics = dataset.statistics()
counts = {"bytes": count, "remote": statistics["remote_bytes"], "misses": statistics["disk_misses"]}
print(json.dumps(counts), flush=True)
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@dataclass
class RemotePod:
    """The pod that serves the dataset."""

    address: str

    @property
    def uri(self) -> str:
        return f"http://{self.address}:8000"

    @property
    def sent(self) -> int:
        """The bytes of shards that the remote has sent."""
        with urlopen(f"{self.uri}/sent", timeout=30) as answer:
            return int(answer.read())

    @property
    def id(self) -> str:
        """The name of the CachedDataset of this remote."""
        return name_cached_dataset(self.uri)


@pytest.fixture
def remote(namespace: Namespace) -> RemotePod:
    container = {
        "name": "remote",
        "image": RUNTIME.name,
        "command": ["python", "-c", REMOTE],
        "imagePullPolicy": "IfNotPresent",
    }
    body = {"metadata": {"name": "remote"}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    core = namespace.target.core
    core.create_namespaced_pod(namespace.name, body)

    def connect_when_served() -> RemotePod | None:
        address = core.read_namespaced_pod("remote", namespace.name).status.pod_ip
        try:
            return RemotePod(address) if address and RemotePod(address).sent == 0 else None
        except OSError:
            return None

    return wait_for(connect_when_served, "the remote", 60)


def build_dataset(remote: RemotePod, medium: str, **cache_options: Any) -> dict[str, Any]:
    return {"uri": remote.uri, "mountPath": "/data", "cache": {"medium": medium, **cache_options}}


def read_printed_lines(namespace: Namespace, name: str) -> list[dict[str, Any]]:
    """Return the JSON lines that a job's ranks printed."""
    logs = "\n".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods("worker", name))
    return [json.loads(line) for line in re.findall(r"^\[rank \d+\] (\{.*\})$", logs, re.MULTILINE)]


def list_worker_nodes(namespace: Namespace, name: str) -> set[str]:
    return {pod.spec.node_name for pod in namespace.list_pods("worker", name)}


def test_a_volume_of_the_pods_own_shows_the_files_to_a_plain_script(namespace: Namespace, remote: RemotePod) -> None:
    """The store's credentials are in the workers' environment, and come only from the Secret."""
    namespace.target.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": "keys"}, "stringData": {"AWS_SECRET_ACCESS_KEY": "hunter2"}}
    )
    script = PLAIN + "import os; print(json.dumps({'key': len(os.environ['AWS_SECRET_ACCESS_KEY'])}))\n"
    dataset = {**build_dataset(remote, "Ephemeral", sizeLimit="100Mi"), "secretName": "keys"}
    name = namespace.create(build_job("plain", ["python", "-c", script], workers=1, dataset=dataset))
    status = namespace.wait_phase(name, "Succeeded")
    names = [f"{shard:03}.tar" for shard in range(SHARDS)]
    assert read_printed_lines(namespace, name) == [{"files": names, "refused": "EROFS"}, {"key": len("hunter2")}]
    (node,) = status["cache"]["nodes"]
    assert node == {"name": list_worker_nodes(namespace, name).pop(), "cachedBytes": remote.sent}
    launcher = namespace.target.core.list_namespaced_pod(namespace.name, label_selector="topkube.dev/role=launcher")
    assert "hunter2" not in str(launcher.items) + str(namespace.read_job(name))
    assert "keys" not in str([container.env_from for pod in launcher.items for container in pod.spec.containers])


def test_a_job_in_a_namespace_without_a_node_cache_is_refused_with_the_reason(namespace: Namespace) -> None:
    dataset = {"uri": "http://10.0.0.1/x", "cache": {"medium": "Node"}}
    name = namespace.create(build_job("refused", ["true"], workers=1, dataset=dataset))
    condition = wait_for(lambda: namespace.read_condition(name, "Created"), "a condition")
    assert (condition["status"], condition["reason"]) == ("False", "NodeCacheNotAllowed")
    assert f"namespace {namespace.name} has no node cache" in condition["message"]
    assert namespace.list_pods(job=name) == []
    wait_for(lambda: any("no node cache" in event for event in namespace.list_events()), "an Event with the reason")


@pytest.fixture(scope="session")
def agents(installation: Target, shared_step: SharedStep) -> Target:
    """The node agent of manifests/node-cache on every node."""
    needs.require_cache_folder(installation)
    with shared_step("node-cache") as first:
        if first:
            installation.apply(read_manifest("node-cache/agent"))
            installation.core.delete_collection_namespaced_pod(
                AGENTS, label_selector="app.kubernetes.io/component=node-cache", grace_period_seconds=1
            )

        def are_agents_ready() -> bool:
            status = installation.apps.read_namespaced_daemon_set("topkube-node-cache", AGENTS).status
            return status.number_ready == status.desired_number_scheduled == len(installation.list_nodes())

        wait_for(are_agents_ready, "an agent on every node", 60)
    return installation


@pytest.fixture
def cached_namespace(agents: Target, namespace: Namespace) -> Iterator[Namespace]:
    """A namespace with a node cache, created from the administrator's manifest."""
    text = read_manifest("node-cache/namespace").replace("team-a", namespace.name)
    agents.apply(text)
    yield namespace
    custom = agents.custom
    for dataset in list_cached_objects(namespace):
        custom.delete_namespaced_custom_object(GROUP, VERSION, namespace.name, "cacheddatasets", dataset)
    agents.core.delete_persistent_volume(f"topkube-node-cache-{namespace.name}")


def list_cached_objects(namespace: Namespace) -> dict[str, dict[str, Any]]:
    """Return the namespace's CachedDatasets by name."""
    listed = namespace.target.custom.list_namespaced_custom_object(GROUP, VERSION, namespace.name, "cacheddatasets")
    return {item["metadata"]["name"]: item for item in listed["items"]}


def read_kubectl_table(kubectl: Path, namespace: Namespace) -> list[dict[str, str]]:
    """Return the rows of `kubectl get cacheddatasets`, by column."""
    command = [kubectl, f"--kubeconfig={namespace.target.kubeconfig}", "-n", namespace.name, "get", "cacheddatasets"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if not lines:
        return []
    starts = [match.start() for match in re.finditer(r"\S+", lines[0])]

    def split_columns(line: str) -> list[str]:
        return [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    return [dict(zip(split_columns(lines[0]), split_columns(line), strict=True)) for line in lines[1:]]


def test_a_second_job_lands_on_the_warm_node_and_reads_nothing_from_the_remote(
    cached_namespace: Namespace, remote: RemotePod, kubectl: Path
) -> None:
    command, dataset = ["python", "-c", SAMPLES], build_dataset(remote, "Node")
    first = cached_namespace.create(build_job("first", command, workers=1, dataset=dataset))
    cached_namespace.wait_phase(first, "Succeeded")
    (warm,) = list_worker_nodes(cached_namespace, first)
    total, sent = SHARDS * SHARD, remote.sent
    assert [report["bytes"] for report in read_printed_lines(cached_namespace, first)] == [total]

    def find_complete_row() -> dict[str, str] | None:
        rows = [row for row in read_kubectl_table(kubectl, cached_namespace) if row["CACHED%"] == "100"]
        return rows[0] if rows else None

    row = wait_for(find_complete_row, "kubectl get cacheddatasets to show a complete dataset", 30)
    assert (row["NAME"], row["DATASET"], row["NODES"], row["PINNED"]) == (remote.id, remote.uri, warm, "false")
    second = cached_namespace.create(build_job("second", command, workers=1, dataset=dataset))
    status = cached_namespace.wait_phase(second, "Succeeded")
    assert list_worker_nodes(cached_namespace, second) == {warm}, "the job runs where the data is"
    (pod,) = cached_namespace.list_pods("worker", second)
    (rule,) = pod.spec.affinity.node_affinity.preferred_during_scheduling_ignored_during_execution
    assert (rule.weight, rule.preference.match_expressions[0].values) == (100, [warm]), "the pod prefers the warm node"
    assert read_printed_lines(cached_namespace, second) == [{"bytes": total, "remote": 0.0, "misses": 0.0}]
    assert remote.sent == sent, "the remote sent bytes again"
    assert (status["cache"]["hitRatio"], status["cache"]["remoteBytes"]) == ("1.0000", 0)
    assert [node["name"] for node in status["cache"]["nodes"]] == [warm]


def test_datasets_survive_their_agent_and_are_evicted_when_they_are_deleted(
    cached_namespace: Namespace, remote: RemotePod
) -> None:
    """The agent is killed while a job publishes. Then the dataset is deleted while the job reads it, and the job of
    another user fetches it again."""
    target = cached_namespace.target
    dataset = build_dataset(remote, "Node")
    name = cached_namespace.create(build_job("busy", ["python", "-c", SAMPLES, "/tmp/go"], workers=1, dataset=dataset))
    wait_for(lambda: list_worker_nodes(cached_namespace, name) - {None}, "a node")
    if target.local is not None:
        (node,) = list_worker_nodes(cached_namespace, name)
        wait_for(lambda: remote.sent > 0, "the first byte", interval=0.01)
        (agent,) = target.core.list_namespaced_pod(
            AGENTS,
            label_selector="app.kubernetes.io/component=node-cache",
            field_selector=f"spec.nodeName={node}",
        ).items
        target.kill_container(agent, "agent")
    entry = wait_for(
        lambda: next(
            (item for item in list_cached_objects(cached_namespace).values() if _read_percent(item) == 100), None
        ),
        "the agent to report the dataset",
        60,
    )
    assert entry["status"]["nodes"][0]["inUse"] is True
    delete: Any = target.custom.delete_namespaced_custom_object
    delete(GROUP, VERSION, cached_namespace.name, "cacheddatasets", remote.id)
    cached_namespace.execute(cached_namespace.list_pods("worker", name)[0].metadata.name, "touch", "/tmp/go")
    cached_namespace.wait_phase(name, "Succeeded")
    assert [item["bytes"] for item in read_printed_lines(cached_namespace, name)] == [SHARDS * SHARD], (
        "a dataset that is read stays"
    )

    # No job reads the dataset any more, so it is evicted. The job of another user fetches it into the same folder.
    sent = remote.sent
    other = build_job("other", ["python", "-c", SAMPLES], workers=1, dataset=dataset)
    other["spec"]["template"]["spec"] |= {
        "nodeSelector": {"kubernetes.io/hostname": entry["status"]["where"]},
        "securityContext": {"runAsUser": 4321, "runAsNonRoot": True},
    }
    wait_for(lambda: not list_cached_datasets(target, entry["status"]["where"], cached_namespace.name), "the eviction")
    cached_namespace.create(other)
    cached_namespace.wait_phase("other", "Succeeded")
    assert remote.sent == 2 * sent
    wait_for(lambda: remote.id in list_cached_objects(cached_namespace), "the dataset to be reported again", 30)


def _read_percent(dataset: dict[str, Any]) -> int | None:
    """Return the percentage that the agent reports; None until there is a report."""
    percent: int | None = (dataset.get("status") or {}).get("cachedPercent")
    return percent


def list_cached_datasets(target: Target, node: str, namespace: str) -> list[str]:
    """Return the datasets in the node's cache. The node's agent reads them."""
    (agent,) = target.core.list_namespaced_pod(
        AGENTS,
        label_selector="app.kubernetes.io/component=node-cache",
        field_selector=f"spec.nodeName={node}",
    ).items
    script = f"import os; print(*os.listdir('/cache/{namespace}/datasets'))"
    try:
        return execute(target, AGENTS, agent.metadata.name, "python", "-c", script).split()
    except ApiException:
        return ["unknown"]
