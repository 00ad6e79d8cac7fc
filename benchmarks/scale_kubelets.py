"""Simulated nodes, and objects of earlier operators, for benchmarks/operator_scale.py, which has no kubelets.

python benchmarks/scale_kubelets.py KUBECONFIG       # sets the status of every new pod, like a kubelet
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from topkube.job import KIND
from topkube_operator.model import names
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

NAMESPACE = "scale"


def simulate_kubelets(kubeconfig: str) -> None:
    """Start every new pod. End a launcher 2 s after its start, and a worker 2.5 s after its start."""
    cluster = ApiClient(kubeconfig)
    pool = ThreadPoolExecutor(8)
    pods, version = cluster.list("Pod", NAMESPACE, names.JOB_NAME)
    for pod in pods:
        pool.submit(start_pod, cluster, pod)
    while True:
        for event in cluster.watch("Pod", NAMESPACE, names.JOB_NAME, version):
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] == "ADDED":
                pool.submit(start_pod, cluster, event["object"])


def start_pod(cluster: ApiClient, pod: dict[str, Any]) -> None:
    set_pod_status(cluster, pod, "Running", {"running": {"startedAt": format_now()}})
    seconds = 2.0 if pod["metadata"]["labels"][names.ROLE] == names.LAUNCHER else 2.5
    timer = threading.Timer(seconds, end_pod, (cluster, pod))
    timer.daemon = True
    timer.start()


def end_pod(cluster: ApiClient, pod: dict[str, Any]) -> None:
    set_pod_status(cluster, pod, "Succeeded", build_end_state())


def set_pod_status(cluster: ApiClient, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    container = pod["spec"]["containers"][0]["name"]
    is_running = phase == "Running"
    conditions = [
        {"type": kind, "status": str(is_running or kind == "PodScheduled")} for kind in ("PodScheduled", "Ready")
    ]
    status = {
        "phase": phase,
        "podIP": "127.0.0.1",
        "conditions": conditions,
        "containerStatuses": [
            {"name": container, "state": state, "ready": is_running, "restartCount": 0, "image": "", "imageID": ""}
        ],
    }
    try:
        cluster.patch("Pod", NAMESPACE, name, {"status": status}, subresource="status")
    except ApiError as error:
        if error.status != 404:
            print(f"kubelet: {name}: {error}", file=sys.stderr)


def build_end_state() -> dict[str, Any]:
    return {"terminated": {"exitCode": 0, "startedAt": format_now(), "finishedAt": format_now()}}


def format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def build_job(name: str, workers: int) -> dict[str, Any]:
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"workers": workers, "slotsPerWorker": 2, "template": {"spec": {"containers": [container]}}},
    }


def create_finished_job(cluster: ApiClient, name: str, workers: int) -> None:
    """Create a finished job and its pods, in the state that the operator stores at the end of a job."""
    stored_job = cluster.create(build_job(name, workers))
    uid = stored_job["metadata"]["uid"]
    pods = [(names.name_launcher_pod(name, uid, 1), names.LAUNCHER, "")]
    pods += [(names.name_worker_pod(name, uid, index, 1), names.WORKER, str(index)) for index in range(workers)]
    for pod, role, index in pods:
        labels = {names.JOB_NAME: name, names.ROLE: role, names.ATTEMPT: "1", names.WORKER_INDEX: index or "0"}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod,
                "namespace": NAMESPACE,
                "labels": labels,
                "annotations": {names.DEFAULT_CONTAINER: role},
                "ownerReferences": [names.build_owner_reference(name, uid)],
            },
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "containers": [{"name": role, "image": "image:1", "command": ["x"]}],
            },
        }
        created_pod = cluster.create(manifest)
        set_pod_status(cluster, created_pod, "Succeeded", build_end_state())
    condition = {"reason": "Succeeded", "message": "all ranks ended with 0", "lastTransitionTime": format_now()}
    status = {
        "phase": "Succeeded",
        "attempt": 1,
        "restarts": 0,
        "disruptions": 0,
        "startTime": format_now(),
        "completionTime": format_now(),
        "progress": {"step": 200, "totalSteps": 200, "percent": 100},
        "conditions": [
            {"type": "Created", "status": "True", **condition},
            {"type": "Running", "status": "False", **condition},
            {"type": "Succeeded", "status": "True", **condition},
        ],
    }
    cluster.patch(KIND, NAMESPACE, name, {"status": status}, subresource="status")


if __name__ == "__main__":
    simulate_kubelets(sys.argv[1])
