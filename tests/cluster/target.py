"""The cluster on which tests run, through its API: the cluster of this machine, or any other."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import kubernetes
import kubernetes.watch
import yaml
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ConflictError
from kubernetes.stream import stream
from localkube.cgroups import Group
from localkube.cluster import LocalCluster

T = TypeVar("T")
GROUP, VERSION, PLURAL = "topkube.dev", "v1alpha1", "trainingjobs"
OPERATOR_NAMESPACE, OPERATOR = "topkube-system", "topkube-operator"
KUBELET_SECONDS = 180.0
"""The time in which a kubelet removes ended pods. A kubelet of 1.20 may take more than a minute."""
PATIENCE = 5
"""How many times slower than the machines of CI a machine may be on which the tests pass. Waits end as soon as their
condition is true, so tests that pass do not take longer."""


def wait_for(condition: Callable[[], T], what: str, seconds: float = 60.0, interval: float = 0.15) -> T:
    """Return the first true result of `condition`. Raises AssertionError that names `what` after `seconds` of a fast
    machine."""
    seconds *= PATIENCE
    deadline, result = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(interval)
    raise AssertionError(f"waited {seconds:.0f} s in vain for {what}; last seen: {result!r}")


class Target:
    """The cluster of `kubeconfig`. `local` is the cluster of this machine, whose nodes can be broken; None for other
    clusters."""

    def __init__(self, kubeconfig: Path, local: LocalCluster | None) -> None:
        self.kubeconfig, self.local = kubeconfig, local
        self.client = kubernetes.config.new_client_from_config(str(kubeconfig))
        self.core = kubernetes.client.CoreV1Api(self.client)
        self.apps = kubernetes.client.AppsV1Api(self.client)
        self.custom = kubernetes.client.CustomObjectsApi(self.client)
        self.policies = kubernetes.client.NetworkingV1Api(self.client)
        self.leases = kubernetes.client.CoordinationV1Api(self.client)
        self.admission = kubernetes.client.AdmissionregistrationV1Api(self.client)
        self.dynamic = kubernetes.dynamic.DynamicClient(self.client)
        version = kubernetes.client.VersionApi(self.client).get_code()
        self.release: str = version.git_version
        self.version = (int(version.major), int(re.match(r"\d+", version.minor)[0]))

    def apply(self, manifests: str) -> None:
        """Create or update the objects of YAML documents."""
        for manifest in yaml.safe_load_all(manifests):
            kind = self.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
            namespace = {"namespace": manifest["metadata"]["namespace"]} if kind.namespaced else {}
            try:
                kind.create(body=manifest, **namespace)
            except ConflictError:
                kind.patch(body=manifest, content_type="application/merge-patch+json", **namespace)

    def list_nodes(self) -> list[str]:
        """Return the names of the nodes that are Ready."""
        return sorted(
            node.metadata.name
            for node in self.core.list_node().items
            if any(
                condition.type == "Ready" and condition.status == "True" for condition in node.status.conditions or ()
            )
        )

    def label_node(self, node: str, label: str, value: str | None) -> None:
        """Set a label of a node; None removes it."""
        self.core.patch_node(node, {"metadata": {"labels": {label: value}}})

    def scale_operator(self, replicas: int) -> None:
        """Scale the operator, and wait until exactly this number of replicas run."""
        self.apps.patch_namespaced_deployment_scale(OPERATOR, OPERATOR_NAMESPACE, {"spec": {"replicas": replicas}})

        wait_for(self.is_rolled_out, f"{replicas} replicas of the operator", KUBELET_SECONDS)

    def is_rolled_out(self, replaced: Collection[str] = ()) -> bool:
        """Return True if the operator's pods are those that the Deployment asks for, all are ready, the webhook's
        Service leads to them alone, and no other pod is left. `replaced` holds UIDs of pods that must be gone."""
        deployment = self.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
        status, expected, pods = deployment.status, deployment.spec.replicas, self.list_operator_pods()
        counts = (status.replicas or 0, status.updated_replicas or 0, status.ready_replicas or 0, len(pods))
        if status.observed_generation != deployment.metadata.generation or set(counts) != {expected}:
            return False
        if any(pod.metadata.deletion_timestamp or pod.metadata.uid in replaced for pod in pods):
            return False
        subsets = self.core.read_namespaced_endpoints(OPERATOR, OPERATOR_NAMESPACE).subsets or ()
        served = {address.ip for subset in subsets for address in subset.addresses or ()}
        return served == {pod.status.pod_ip for pod in pods}

    def has_webhook(self) -> bool:
        """Return True if the API server asks the operator's webhook about jobs. The API server ignores a webhook that
        does not answer."""
        container = {"name": "worker", "image": "image", "command": ["true"]}
        invalid = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "TrainingJob",
            "metadata": {"name": "invalid"},
            "spec": {"workers": 1, "template": {"spec": {"containers": [container, container]}}},
        }
        try:
            self.custom.create_namespaced_custom_object(GROUP, VERSION, "default", PLURAL, invalid, dry_run="All")
        except ApiException as error:
            return "admission webhook" in str(error.body)
        return False

    def list_operator_pods(self) -> list[Any]:
        return self.core.list_namespaced_pod(
            OPERATOR_NAMESPACE, label_selector="app.kubernetes.io/component=operator"
        ).items

    def kill_container(self, pod: Any, container: str) -> None:
        """Send SIGKILL to the processes of a container from outside, as the kernel does if memory runs out."""
        self.find_container(pod, container).kill()

    def find_container(self, pod: Any, container: str) -> Group:
        """Return the cgroup of a running container."""
        assert self.local is not None
        identity = next(status.container_id for status in pod.status.container_statuses if status.name == container)
        return self.local.nodes[pod.spec.node_name].find_container(identity.rpartition("/")[2])


class Namespace:
    """The namespace of one test: its jobs and their results."""

    def __init__(self, target: Target, name: str) -> None:
        self.target, self.name = target, name

    # -- jobs

    def create(self, job: dict[str, Any]) -> str:
        """Create a TrainingJob. Return its name."""
        self.target.custom.create_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, job)
        return str(job["metadata"]["name"])

    def read_job(self, name: str) -> dict[str, Any]:
        job: dict[str, Any] = self.target.custom.get_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, name)
        return job

    def read_status(self, name: str) -> dict[str, Any]:
        return self.read_job(name).get("status") or {}

    def read_phase(self, name: str) -> str:
        return str(self.read_status(name).get("phase") or "")

    def patch(self, name: str, change: dict[str, Any]) -> None:
        """Apply a merge patch to the job."""
        self.target.custom.patch_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, name, change)

    def delete(self, name: str) -> None:
        self.target.custom.delete_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, name)

    def exists(self, name: str) -> bool:
        """Return True if there is a job of this name."""
        try:
            self.read_job(name)
        except ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    def wait_phase(self, name: str, *phases: str, seconds: float = 90.0) -> dict[str, Any]:
        """Return the status in the first of `phases` that is reached. Fail at once if the job ends in another phase."""

        def read_reached_status() -> dict[str, Any] | None:
            status = self.read_status(name)
            phase = status.get("phase")
            if phase in phases:
                return status
            if phase in ("Succeeded", "Failed"):
                raise AssertionError(f"{name} is {phase}, not {' or '.join(phases)}: {json.dumps(status, indent=1)}")
            return None

        return wait_for(read_reached_status, f"{name} to be {' or '.join(phases)}", seconds)

    def watch_phases(self, name: str) -> list[str]:
        """Return the phases of the job in order, as a watcher sees them. The list grows until the job's end."""
        seen: list[str] = []

        def follow() -> None:
            watching = kubernetes.watch.Watch()
            selector, kind = f"metadata.name={name}", (GROUP, VERSION, self.name, PLURAL)
            list_jobs = self.target.custom.list_namespaced_custom_object
            end = time.monotonic() + 1800
            while seen[-1:] not in (["Succeeded"], ["Failed"]) and time.monotonic() < end:
                # A watch may end before the job. A new one begins with the present job.
                for event in watching.stream(list_jobs, *kind, field_selector=selector, timeout_seconds=280):
                    phase = (event["object"].get("status") or {}).get("phase")
                    if phase and phase not in seen[-1:]:
                        seen.append(phase)
                    if phase in ("Succeeded", "Failed"):
                        watching.stop()

        threading.Thread(target=follow, daemon=True).start()
        return seen

    def read_condition(self, name: str, kind: str) -> dict[str, Any]:
        matches = (
            condition for condition in self.read_status(name).get("conditions") or () if condition["type"] == kind
        )
        return next(matches, {})

    # -- their objects

    def list_pods(self, role: str = "", job: str = "") -> list[Any]:
        """Return the pods of TrainingJobs that are not being deleted, by name."""
        parts = [f"topkube.dev/role={role}" if role else "topkube.dev/role"]
        if job:
            parts.append(f"topkube.dev/job-name={job}")
        pods = self.target.core.list_namespaced_pod(self.name, label_selector=",".join(parts)).items
        return sorted((pod for pod in pods if not pod.metadata.deletion_timestamp), key=lambda pod: pod.metadata.name)

    def build_pod_name(self, job: str, part: str) -> str:
        """Return the name of a pod, such as worker-1-2 or launcher-2, of the job that exists now."""
        return f"{job}-{part}-{self.read_job(job)['metadata']['uid'][:5]}"

    def read_uids(self, role: str) -> dict[str, str]:
        return {pod.metadata.name: pod.metadata.uid for pod in self.list_pods(role)}

    def list_children(self) -> set[str]:
        """Return everything that a job may leave behind, as kind/name."""
        core = self.target.core
        names: set[str] = set()
        for kind, items in (
            ("pod", core.list_namespaced_pod(self.name).items),
            ("service", core.list_namespaced_service(self.name).items),
            ("secret", core.list_namespaced_secret(self.name).items),
            ("networkpolicy", self.target.policies.list_namespaced_network_policy(self.name).items),
        ):
            names |= {f"{kind}/{item.metadata.name}" for item in items if "token" not in item.metadata.name}
        return names

    def read_log(self, pod: str, container: str | None = None) -> str:
        with suppress(ApiException):
            return str(self.target.core.read_namespaced_pod_log(pod, self.name, container=container))
        return ""

    def execute(self, pod: str, *command: str) -> str:
        """Run a command in the pod's first container. Return its output."""
        return execute(self.target, self.name, pod, *command)

    def wait_log(self, text: str, role: str = "worker", seconds: float = 60.0) -> None:
        """Wait until a pod of this role has printed `text`."""
        wait_for(
            lambda: any(text in self.read_log(pod.metadata.name) for pod in self.list_pods(role)),
            f"a {role} to print {text!r}",
            seconds,
        )

    def list_events(self) -> list[str]:
        """Return the Events of TrainingJobs, as 'Reason: message'."""
        items = self.target.core.list_namespaced_event(
            self.name, field_selector="involvedObject.kind=TrainingJob"
        ).items
        return [
            f"{item.reason}: {item.message}"
            for item in sorted(items, key=lambda event: event.metadata.creation_timestamp)
        ]

    def describe(self) -> Iterator[str]:
        """Yield the statuses of jobs, the states and logs of pods, and the events, for a failed test."""
        jobs = self.target.custom.list_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL)["items"]
        for job in jobs:
            yield f"--- job {job['metadata']['name']}\n{yaml.safe_dump(job.get('status') or {}, sort_keys=False)}"
        for pod in self.target.core.list_namespaced_pod(self.name).items:
            states = [status.state.to_dict() for status in pod.status.container_statuses or ()]
            yield f"--- pod {pod.metadata.name} on {pod.spec.node_name}: {pod.status.phase} {states}"
            for container in pod.spec.containers:
                yield "\n".join(self.read_log(pod.metadata.name, container.name).splitlines()[-25:])
        yield "--- events"
        for event in self.target.core.list_namespaced_event(self.name).items:
            what = f"{event.involved_object.kind} {event.involved_object.name}"
            yield f"{event.last_timestamp} {what} {event.reason}: {event.message}"
        for pod in self.target.list_operator_pods():
            yield f"--- operator {pod.metadata.name}: {pod.status.phase}"
            with suppress(ApiException):
                yield str(
                    self.target.core.read_namespaced_pod_log(pod.metadata.name, OPERATOR_NAMESPACE, tail_lines=150)
                )


def execute(target: Target, namespace: str, pod: str, *command: str) -> str:
    """Run a command in a pod. Return its output. Raises ApiException if the command cannot be run."""
    call = target.core.connect_get_namespaced_pod_exec
    return str(stream(call, pod, namespace, command=command, stdout=True, stderr=True, stdin=False, tty=False))


def create_shared_claim(namespace: Namespace, folder: Path, name: str) -> None:
    """Create a ReadWriteMany claim on `folder`, which all nodes of this machine share. Its volume has the namespace's
    name."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    core = namespace.target.core
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    core.create_persistent_volume(
        {
            "metadata": {"name": namespace.name},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "hostPath": {"path": str(folder)},
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace.name, "name": name},
            },
        }
    )
    core.create_namespaced_persistent_volume_claim(
        namespace.name,
        {
            "metadata": {"name": name},
            "spec": {"accessModes": modes, "resources": {"requests": size}, "storageClassName": ""},
        },
    )
