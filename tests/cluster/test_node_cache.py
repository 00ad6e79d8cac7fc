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
from jobs import job
from kubernetes.client.exceptions import ApiException
from localkube.images import RUNTIME
from target import GROUP, VERSION, Namespace, Target, execute, wait_for

from conftest import Once, manifest
from topkube.job.cached_dataset import object_name

SHARDS, SHARD = 8, 1 << 20
AGENTS = "topkube-node-cache"
# The remote: a folder of tar shards with ranges; it counts the bytes of shards that it has sent.
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
# Plain files, under mountPath, read-only; and then samples of the same dataset.
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
class Remote:
    """The pod that serves the dataset."""

    address: str

    @property
    def uri(self) -> str:
        return f"http://{self.address}:8000"

    @property
    def sent(self) -> int:
        with urlopen(f"{self.uri}/sent", timeout=5) as answer:
            return int(answer.read())

    @property
    def id(self) -> str:
        """The name of its CachedDataset."""
        return object_name(self.uri)


@pytest.fixture
def remote(namespace: Namespace) -> Remote:
    container = {
        "name": "remote",
        "image": RUNTIME.name,
        "command": ["python", "-c", REMOTE],
        "imagePullPolicy": "IfNotPresent",
    }
    body = {"metadata": {"name": "remote"}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    core = namespace.target.core
    core.create_namespaced_pod(namespace.name, body)

    def connect_when_served() -> Remote | None:
        address = core.read_namespaced_pod("remote", namespace.name).status.pod_ip
        try:
            return Remote(address) if address and Remote(address).sent == 0 else None
        except OSError:
            return None

    return wait_for(connect_when_served, "the remote", 60)


def dataset(remote: Remote, medium: str, **more: Any) -> dict[str, Any]:
    return {"uri": remote.uri, "mountPath": "/data", "cache": {"medium": medium, **more}}


def read_printed_lines(namespace: Namespace, name: str) -> list[dict[str, Any]]:
    """The JSON lines of a job's ranks."""
    logs = "\n".join(namespace.logs(pod.metadata.name) for pod in namespace.pods("worker", name))
    return [json.loads(line) for line in re.findall(r"^\[rank \d+\] (\{.*\})$", logs, re.MULTILINE)]


def list_worker_nodes(namespace: Namespace, name: str) -> set[str]:
    return {pod.spec.node_name for pod in namespace.pods("worker", name)}


def test_a_volume_of_the_pods_own_shows_the_files_to_a_plain_script(namespace: Namespace, remote: Remote) -> None:
    """The store's credentials are in the workers' environment, and come only from the Secret."""
    namespace.target.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": "keys"}, "stringData": {"AWS_SECRET_ACCESS_KEY": "hunter2"}}
    )
    script = PLAIN + "import os; print(json.dumps({'key': len(os.environ['AWS_SECRET_ACCESS_KEY'])}))\n"
    given = {**dataset(remote, "Ephemeral", sizeLimit="100Mi"), "secretName": "keys"}
    name = namespace.create(job("plain", ["python", "-c", script], workers=1, dataset=given))
    status = namespace.wait_phase(name, "Succeeded")
    names = [f"{shard:03}.tar" for shard in range(SHARDS)]
    assert read_printed_lines(namespace, name) == [{"files": names, "refused": "EROFS"}, {"key": len("hunter2")}]
    (node,) = status["cache"]["nodes"]
    assert node == {"name": list_worker_nodes(namespace, name).pop(), "cachedBytes": remote.sent}
    launcher = namespace.target.core.list_namespaced_pod(namespace.name, label_selector="topkube.dev/role=launcher")
    assert "hunter2" not in str(launcher.items) + str(namespace.job(name))
    assert "keys" not in str([container.env_from for pod in launcher.items for container in pod.spec.containers])


def test_a_namespace_without_a_node_cache_is_refused_with_words(namespace: Namespace) -> None:
    given = {"uri": "http://10.0.0.1/x", "cache": {"medium": "Node"}}
    name = namespace.create(job("refused", ["true"], workers=1, dataset=given))
    condition = wait_for(lambda: namespace.condition(name, "Created"), "a condition")
    assert (condition["status"], condition["reason"]) == ("False", "NodeCacheNotAllowed")
    assert f"namespace {namespace.name} has no node cache" in condition["message"]
    assert namespace.pods(job=name) == []
    wait_for(lambda: any("no node cache" in event for event in namespace.events()), "an Event that says so")


@pytest.fixture(scope="session")
def agents(installed: Target, once: Once) -> Target:
    """The node agent of manifests/node-cache on every node."""
    needs.folder_on_each_node(installed)
    with once("node-cache") as first:
        if first:
            installed.apply(manifest("node-cache/agent"))
            installed.core.delete_collection_namespaced_pod(
                AGENTS, label_selector="app.kubernetes.io/component=node-cache", grace_period_seconds=1
            )

        def ready() -> bool:
            status = installed.apps.read_namespaced_daemon_set("topkube-node-cache", AGENTS).status
            return status.number_ready == status.desired_number_scheduled == len(installed.nodes())

        wait_for(ready, "an agent on every node", 60)
    return installed


@pytest.fixture
def allowed(agents: Target, namespace: Namespace) -> Iterator[Namespace]:
    """A namespace with a node cache, as the admin's file makes it."""
    text = manifest("node-cache/namespace").replace("team-a", namespace.name)
    agents.apply(text)
    yield namespace
    custom = agents.custom
    for dataset in cached(namespace):
        custom.delete_namespaced_custom_object(GROUP, VERSION, namespace.name, "cacheddatasets", dataset)
    agents.core.delete_persistent_volume(f"topkube-node-cache-{namespace.name}")


def cached(namespace: Namespace) -> dict[str, dict[str, Any]]:
    """The namespace's CachedDatasets by name."""
    listed = namespace.target.custom.list_namespaced_custom_object(GROUP, VERSION, namespace.name, "cacheddatasets")
    return {item["metadata"]["name"]: item for item in listed["items"]}


def kubectl_says(kubectl: Path, namespace: Namespace) -> list[dict[str, str]]:
    """`kubectl get cacheddatasets`, by column."""
    command = [kubectl, f"--kubeconfig={namespace.target.kubeconfig}", "-n", namespace.name, "get", "cacheddatasets"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if not lines:
        return []
    starts = [match.start() for match in re.finditer(r"\S+", lines[0])]

    def split_columns(line: str) -> list[str]:
        return [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    return [dict(zip(split_columns(lines[0]), split_columns(line), strict=True)) for line in lines[1:]]


def test_a_second_job_lands_on_the_warm_node_and_reads_nothing_from_the_remote(
    allowed: Namespace, remote: Remote, kubectl: Path
) -> None:
    command, given = ["python", "-c", SAMPLES], dataset(remote, "Node")
    first = allowed.create(job("first", command, workers=1, dataset=given))
    allowed.wait_phase(first, "Succeeded")
    (warm,) = list_worker_nodes(allowed, first)
    total, sent = SHARDS * SHARD, remote.sent
    assert [report["bytes"] for report in read_printed_lines(allowed, first)] == [total]

    def cache_entry() -> dict[str, str] | None:
        rows = [row for row in kubectl_says(kubectl, allowed) if row["CACHED%"] == "100"]
        return rows[0] if rows else None

    row = wait_for(cache_entry, "kubectl get cacheddatasets to say so", 30)
    assert (row["NAME"], row["DATASET"], row["NODES"], row["PINNED"]) == (remote.id, remote.uri, warm, "false")
    second = allowed.create(job("second", command, workers=1, dataset=given))
    status = allowed.wait_phase(second, "Succeeded")
    assert list_worker_nodes(allowed, second) == {warm}, "it lands where the data is"
    (pod,) = allowed.pods("worker", second)
    (rule,) = pod.spec.affinity.node_affinity.preferred_during_scheduling_ignored_during_execution
    assert (rule.weight, rule.preference.match_expressions[0].values) == (100, [warm]), "because it is asked to"
    assert read_printed_lines(allowed, second) == [{"bytes": total, "remote": 0.0, "misses": 0.0}]
    assert remote.sent == sent, "the remote itself says so"
    assert (status["cache"]["hitRatio"], status["cache"]["remoteBytes"]) == ("1.0000", 0)
    assert [node["name"] for node in status["cache"]["nodes"]] == [warm]


def test_datasets_outlive_their_agent_and_go_when_they_are_deleted(allowed: Namespace, remote: Remote) -> None:
    """SIGKILL to the agent while a job publishes; a job of another user; then `kubectl delete cacheddataset`."""
    target = allowed.target
    given = dataset(remote, "Node")
    name = allowed.create(job("busy", ["python", "-c", SAMPLES, "/tmp/go"], workers=1, dataset=given))
    wait_for(lambda: list_worker_nodes(allowed, name) - {None}, "a node")
    if target.local is not None:
        (node,) = list_worker_nodes(allowed, name)
        wait_for(lambda: remote.sent > 0, "the first byte", interval=0.01)
        (agent,) = target.core.list_namespaced_pod(
            AGENTS,
            label_selector="app.kubernetes.io/component=node-cache",
            field_selector=f"spec.nodeName={node}",
        ).items
        target.kill_container(agent, "agent")
    entry = wait_for(
        lambda: next((item for item in cached(allowed).values() if _percent(item) == 100), None),
        "the agent to tell of the dataset",
        60,
    )
    assert entry["status"]["nodes"][0]["inUse"] is True
    delete: Any = target.custom.delete_namespaced_custom_object
    delete(GROUP, VERSION, allowed.name, "cacheddatasets", remote.id)
    allowed.execute(allowed.pods("worker", name)[0].metadata.name, "touch", "/tmp/go")
    allowed.wait_phase(name, "Succeeded")
    assert [item["bytes"] for item in read_printed_lines(allowed, name)] == [SHARDS * SHARD], "what is read stays"

    # Nobody reads it any more: it goes. The next job, of another user, fetches it anew into the same folder.
    sent = remote.sent
    other = job("other", ["python", "-c", SAMPLES], workers=1, dataset=given)
    other["spec"]["template"]["spec"] |= {
        "nodeSelector": {"kubernetes.io/hostname": entry["status"]["where"]},
        "securityContext": {"runAsUser": 4321, "runAsNonRoot": True},
    }
    wait_for(lambda: not list_cached_datasets(target, entry["status"]["where"], allowed.name), "the eviction")
    allowed.create(other)
    allowed.wait_phase("other", "Succeeded")
    assert remote.sent == 2 * sent
    wait_for(lambda: remote.id in cached(allowed), "it to be told of again", 30)


def _percent(dataset: dict[str, Any]) -> int | None:
    """Return the agent's report; None until there is one."""
    percent: int | None = (dataset.get("status") or {}).get("cachedPercent")
    return percent


def list_cached_datasets(target: Target, node: str, namespace: str) -> list[str]:
    """Datasets in the node's cache, as seen from its agent."""
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
