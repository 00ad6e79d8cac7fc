"""Measure how fast the operator creates pods, and its cost when there is nothing to do.

    python benchmarks/operator_scale.py [--only start|many|idle ...] [--json FILE]

It uses a real etcd and kube-apiserver (built by tests/cluster/localkube as cluster 8; nothing else of that cluster is
started), and the operator as it is installed, in its own process. Nodes are simulated: a process sets the status of
pods as kubelets do, so that hundreds of pods fit on one machine. It needs root, like the local cluster.

start   one job with 2 and with 64 workers: from sending the job until a watcher has seen all its pods. The floor: a
        client without any logic creates the same job and children
many    100 jobs of 4 workers at once: until all 500 pods exist and every status shows them (without kubelets), and
        until every job has Succeeded (with simulated kubelets). The floor: a client without any logic creates the same
        jobs and children, with the same number of concurrent calls
idle    1,000 finished jobs with their pods: CPU and memory of an operator that has just started. The floor: a process
        that only keeps the operator's watches open and fills its cache

Every part stores the machine's load average from before its start. On a busy machine only the ratios to the floors mean
something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import yaml  # noqa: E402
from localkube.cgroups import Group  # noqa: E402
from localkube.cluster import stop_cluster  # noqa: E402
from localkube.control_plane import ControlPlane  # noqa: E402
from localkube.layout import Layout  # noqa: E402
from localkube.packages import TO_RUN, compile_kubernetes, install_packages  # noqa: E402

from scale_kubelets import NAMESPACE, build_job, create_finished_job  # noqa: E402
from topkube.job import KIND  # noqa: E402
from topkube_operator.control.plan_executor import CALLS  # noqa: E402
from topkube_operator.model import names  # noqa: E402
from topkube_operator.watch.api_client import ApiClient  # noqa: E402
from topkube_operator.watch.api_connection import ApiError  # noqa: E402

OPERATOR_NAMESPACE = "topkube-system"
METRICS_PORT = 18099
CHILDREN = {"Secret": "v1", "Service": "v1", "NetworkPolicy": "networking.k8s.io/v1", "Pod": "v1"}
RESULTS = ROOT / "benchmarks" / "results" / "operator-scale.json"
TARGETS = {"start_2": 0.3, "start_64": 1.0, "many_created": 12.0, "idle_cpu_percent": 2.0, "idle_rss_mb": 300.0}


@contextmanager
def run_api_server() -> Iterator[str]:
    """Run only etcd and kube-apiserver; yield a kubeconfig."""
    layout = Layout(8)
    install_packages(*TO_RUN)
    programs = compile_kubernetes(layout.cache)
    stop_cluster(layout)
    layout.state.mkdir(parents=True, mode=0o700)
    Group(layout.name).make()
    plane = ControlPlane(layout, programs)
    # Controllers and scheduler would take processor time, so they are not started.
    plane.controller_manager = plane.scheduler = NoDaemon()  # type: ignore[assignment]
    try:
        plane.start()
        yield str(layout.kubeconfig)
    finally:
        stop_cluster(layout)


class NoDaemon:
    """A daemon that does not run."""

    def start(self) -> None:
        """Start nothing."""


def prepare_cluster(cluster: ApiClient) -> None:
    for name in (NAMESPACE, OPERATOR_NAMESPACE):
        cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        account = {"metadata": {"name": "default"}}
        cluster.call("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    cluster.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    wait_until(lambda: is_served(cluster), "the CRD")


def is_served(cluster: ApiClient) -> bool:
    try:
        cluster.list(KIND, NAMESPACE)
    except ApiError:
        return False
    return True


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)


@contextmanager
def run_operator(kubeconfig: str) -> Iterator[int]:
    """Run the operator in its own process; yield its process id when it leads."""
    command = [
        sys.executable,
        "-m",
        "topkube_operator",
        "--kubeconfig",
        kubeconfig,
        "--metrics-port",
        str(METRICS_PORT),
    ]
    process = subprocess.Popen([*command, "--operator-namespace", OPERATOR_NAMESPACE, "--log-level", "warning"])
    try:
        wait_until(lambda: read_metric("topkube_leader") == 1, "the operator to lead")
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def read_metric(name: str) -> float | None:
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5).read().decode()
    except OSError:
        return None
    return next(
        (float(line.split()[-1]) for line in text.splitlines() if line.startswith((name + " ", name + "{"))), None
    )


@contextmanager
def run_kubelets(kubeconfig: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("scale_kubelets.py")), kubeconfig])
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


class PodWatch:
    """A watch of all pods. `seen` has the time at which each pod was seen first (monotonic seconds)."""

    def __init__(self, cluster: ApiClient) -> None:
        self._cluster = cluster
        self.seen: dict[str, float] = {}
        _, self._version = cluster.list("Pod", NAMESPACE)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                for event in self._cluster.watch("Pod", NAMESPACE, "", self._version):
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] == "ADDED":
                        self.seen[event["object"]["metadata"]["name"]] = time.monotonic()
            except ApiError:
                return


def measure_start(cluster: ApiClient, workers: int, repeats: int) -> dict[str, Any]:
    """Return the seconds from sending a job to its last pod, for several jobs."""
    load, watch, seconds, floors = os.getloadavg()[0], PodWatch(cluster), list[float](), list[float]()
    for number in range(repeats + 1):
        name = f"start-{workers}-{number}"
        begun = time.monotonic()
        cluster.create(build_job(name, workers))
        own_pods = lambda name=name: [pod for pod in watch.seen if pod.startswith(name + "-")]  # noqa: E731
        wait_until(lambda own_pods=own_pods: len(own_pods()) == workers + 1, f"the pods of {name}")
        if number:  # the first job warms up connections
            seconds.append(max(watch.seen[pod] for pod in own_pods()) - begun)
        children = list_children(cluster)
        remove_jobs(cluster, name)
        if number:
            floors.append(measure_floor(cluster, [build_job(name, workers)], children))
    return {
        "workers": workers,
        "seconds": statistics.median(seconds),
        "all": seconds,
        "floor_seconds": statistics.median(floors),
        "all_floors": floors,
        "load": load,
    }


def list_children(cluster: ApiClient) -> list[dict[str, Any]]:
    """Return all objects that belong to jobs."""
    return [
        {"apiVersion": version, "kind": kind, **item}
        for kind, version in CHILDREN.items()
        for item in cluster.list(kind, NAMESPACE, names.JOB_NAME)[0]
    ]


def remove_jobs(cluster: ApiClient, *jobs: str) -> None:
    """Suspend jobs, so that the operator deletes their pods (there is no garbage collector), and delete the jobs."""
    for name in jobs:
        cluster.patch(KIND, NAMESPACE, name, {"spec": {"runPolicy": {"suspend": True}}})
    wait_until(lambda: not cluster.list("Pod", NAMESPACE)[0], "the pods to go")
    for name in jobs:
        job = cluster.get(KIND, NAMESPACE, name)
        cluster.delete(KIND, NAMESPACE, name, job["metadata"]["uid"])


def create_jobs(cluster: ApiClient, jobs: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cluster.create, jobs))


def measure_many_jobs(cluster: ApiClient, kubeconfig: str, jobs: int, workers: int) -> dict[str, Any]:
    """Create many jobs at once. Measure until all pods exist, until all statuses are complete, and (with simulated
    kubelets) until all jobs have succeeded."""
    manifests = [build_job(f"many-{number}", workers) for number in range(jobs)]
    load, watch = os.getloadavg()[0], PodWatch(cluster)
    begun = time.monotonic()
    create_jobs(cluster, manifests)
    sent = time.monotonic() - begun
    wait_until(lambda: len(watch.seen) == jobs * (workers + 1), "all pods")
    pods = max(watch.seen.values()) - begun
    wait_until(lambda: all(is_complete(item, workers) for item in cluster.list(KIND, NAMESPACE)[0]), "every status")
    statuses = time.monotonic() - begun
    children = list_children(cluster)
    begun = time.monotonic()
    with run_kubelets(kubeconfig):
        wait_until(
            lambda: all(has_succeeded(item, workers) for item in cluster.list(KIND, NAMESPACE)[0]), "every success"
        )
        succeeded = time.monotonic() - begun
    remove_pods_and_jobs(cluster)
    return {
        "jobs": jobs,
        "workers": workers,
        "sent_seconds": sent,
        "pods_seconds": pods,
        "statuses_seconds": statuses,
        "succeeded_seconds": succeeded,
        "floor_seconds": measure_floor(cluster, manifests, children),
        "load": load,
    }


def measure_floor(cluster: ApiClient, jobs: list[dict[str, Any]], children: list[dict[str, Any]]) -> float:
    """Return the seconds in which a plain client creates jobs that the operator ignores, and then children like
    these."""
    managed = {"runPolicy": {"managedBy": "example.com/nobody"}}
    ignored_jobs = [
        {**item, "metadata": build_new_metadata(item), "spec": {**item["spec"], **managed}} for item in jobs
    ]
    manifests = [{**item, "metadata": build_new_metadata(item)} for item in children]
    for item in manifests:
        item.pop("status", None)
        if item["kind"] == "Service":
            item["spec"] = {name: value for name, value in item["spec"].items() if not name.startswith("clusterIP")}
    begun = time.monotonic()
    create_jobs(cluster, ignored_jobs)
    with ThreadPoolExecutor(CALLS) as pool:
        list(pool.map(cluster.create, manifests))
    seconds = time.monotonic() - begun
    remove_pods_and_jobs(cluster)
    for item in manifests:
        if item["kind"] not in ("Pod", KIND):
            delete_if_present(cluster, item["kind"], item)
    return seconds


def build_new_metadata(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a copy without an owner."""
    kept = {name: manifest["metadata"][name] for name in ("namespace", "annotations") if name in manifest["metadata"]}
    return {**kept, "name": f"bare-{manifest['metadata']['name']}"}


def remove_pods_and_jobs(cluster: ApiClient) -> None:
    for kind in ("Pod", KIND):
        items, _ = cluster.list(kind, NAMESPACE)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item, kind=kind: delete_if_present(cluster, kind, item), items))


def delete_if_present(cluster: ApiClient, kind: str, item: dict[str, Any]) -> None:
    """Delete an object that may be gone. Without a UID, its name decides."""
    try:
        uid = item["metadata"].get("uid") or cluster.get(kind, NAMESPACE, item["metadata"]["name"])["metadata"]["uid"]
        cluster.delete(kind, NAMESPACE, item["metadata"]["name"], uid)
    except ApiError as error:
        if error.status != 404:
            raise


def is_complete(job: dict[str, Any], workers: int) -> bool:
    status = job.get("status") or {}
    created = next((c for c in status.get("conditions", []) if c["type"] == "Created"), {})
    counts = status.get("replicaStatuses", {})
    return (
        status.get("phase") == "Pending"
        and created.get("status") == "True"
        and counts.get("workers", {}).get("active") == workers
        and counts.get("launcher", {}).get("active") == 1
    )


def has_succeeded(job: dict[str, Any], workers: int) -> bool:
    status = job.get("status") or {}
    counts = status.get("replicaStatuses", {})
    return (
        status.get("phase") == "Succeeded"
        and counts.get("workers", {}).get("succeeded") == workers
        and counts.get("launcher", {}).get("succeeded") == 1
    )


def measure_idle(cluster: ApiClient, kubeconfig: str, jobs: int, workers: int, seconds: float) -> dict[str, Any]:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: create_finished_job(cluster, f"done-{number}", workers), range(jobs)))
    load, floor_percent = os.getloadavg()[0], measure_watcher(kubeconfig, seconds)
    with run_operator(kubeconfig) as process:
        wait_until(lambda: is_quiet(cluster), "the operator to reconcile all jobs", 180)
        before, begun = read_cpu_seconds(process), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (read_cpu_seconds(process) - before) / (time.monotonic() - begun)
        scrape_start = time.monotonic()
        assert read_metric("topkube_leader") == 1
        scrape_seconds = time.monotonic() - scrape_start
        return {
            "jobs": jobs,
            "pods": jobs * (workers + 1),
            "cpu_percent": percent,
            "rss_mb": read_rss_mb(process),
            "scrape_seconds": scrape_seconds,
            "measured_seconds": seconds,
            "floor_cpu_percent": floor_percent,
            "load": load,
        }


_WATCHER = """
import sys
import time
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.watchers import CHILDREN, Watchers
watchers = Watchers(ApiClient(sys.argv[1]), WatchCache(), (), CHILDREN, lambda keys: None)
watchers.start()
while not watchers.is_synced():
    time.sleep(0.05)
print("synced", flush=True)
sys.stdin.read()
"""


def measure_watcher(kubeconfig: str, seconds: float) -> float:
    """Return the percentage of a core that a process needs to keep the operator's watches open."""
    command = [sys.executable, "-c", _WATCHER, kubeconfig]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"synced\n", "the watcher has listed nothing"
        before, begun = read_cpu_seconds(process.pid), time.monotonic()
        time.sleep(seconds)
        return 100 * (read_cpu_seconds(process.pid) - before) / (time.monotonic() - begun)
    finally:
        process.kill()
        process.wait(10)


_last: dict[str, float] = {}
"""The last number of reconciles (`total`), and the time at which it was seen first (`since`, monotonic seconds)."""


def is_quiet(cluster: ApiClient) -> bool:
    """Return True if the number of reconciles has not changed for three seconds."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5).read().decode()
    total = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("topkube_reconciles_total{"))
    if _last.get("total") != total:
        _last.update(total=total, since=time.monotonic())
    time.sleep(0.2)
    return total > 0 and time.monotonic() - _last["since"] > 3


def read_cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_rss_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=["start", "many", "idle"])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--finished", type=int, default=1000)
    options = parser.parse_args()
    parts = options.only or ["start", "many", "idle"]
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "kubernetes": "1.20.2"}
    results["machine"]["date"] = time.strftime("%Y-%m-%d")
    results["targets"] = TARGETS
    with run_api_server() as kubeconfig:
        cluster = ApiClient(kubeconfig)
        prepare_cluster(cluster)
        if "start" in parts or "many" in parts:
            with run_operator(kubeconfig):
                if "start" in parts:
                    results["start_2"] = measure_start(cluster, 2, 7)
                    results["start_64"] = measure_start(cluster, 64, 5)
                if "many" in parts:
                    results["many"] = measure_many_jobs(cluster, kubeconfig, options.jobs, 4)
        if "idle" in parts:
            results["idle"] = measure_idle(cluster, kubeconfig, options.finished, 2, 30.0)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({part: results[part] for part in results if part not in ("machine", "targets")}, indent=1))


if __name__ == "__main__":
    main()
