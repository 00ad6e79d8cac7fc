"""The pods of a job: the user's template with the one container wrapped, and what a restricted pod lacks. Pure.

Nothing that the template says is overruled, except restartPolicy, and the command of the wrapped container, which
becomes the argument of `topkube worker`. Sidecars and init containers stay exactly as they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from topkube.job import TrainingJob
from topkube.job.template import without_nulls, worker_container
from topkube.launch import contract
from topkube_operator import datasets, names, placement
from topkube_operator.observed import Policy, digest
from topkube_operator.templates import list_in, mapping_in

CHECKPOINTS = "/checkpoint"
HOME = "/home/topkube"
_USER = 1000
_GRACE_SECONDS = 30
_LAST_WORDS_SECONDS = 5
_SHM_MIB, _SHM_MIB_PER_RANK = 1024, 256
_PREFIX = "topkube-"
_OF_WORKERS, _OF_LAUNCHER = "spec.template", "spec.launcher.template"
_POD, _CONTAINER = "the pod template's spec", "the container"
_LAUNCHER_REQUESTS = {"cpu": "50m", "memory": "96Mi"}
# What a launcher's pod takes over from the workers' template, so that it can pull the same image and be scheduled.
_INHERITED = ("imagePullSecrets", "tolerations", "priorityClassName", "schedulerName", "serviceAccountName")


def shape(job: TrainingJob) -> str:
    """A hash of all that a worker's pod is made from: a pod of another shape is replaced with the next attempt."""
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    parts = ("template", "slotsPerWorker", "mpiImplementation", "dataset", "spread")
    claim = [job.spec.checkpoint.claim_name] if job.spec.checkpoint else []
    return digest([*(spec.get(part) for part in parts), *claim])


def worker(
    job: TrainingJob,
    uid: str,
    index: int,
    attempt: int,
    address: str,
    policy: Policy,
    warm: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Worker `index`, made in `attempt`. `address`: of the launcher's Service. `warm`: nodes that hold some of the
    dataset, with the percentage. Raises JobError."""
    name = names.worker_name(job.name, index, attempt)
    launches = index == 0 and job.spec.launcher.colocate
    pod, container = _from_template(job, job.spec.template, name, attempt)
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"] |= {names.ROLE: names.WORKER, names.WORKER_INDEX: str(index)}
    metadata["annotations"] |= {
        names.SHAPE: shape(job),
        names.LAUNCHER_ADDRESS: address,
        names.DEFAULT_CONTAINER: container["name"],
    }
    spec.setdefault("terminationGracePeriodSeconds", _GRACE_SECONDS)
    host = f"$({contract.POD_IP_VARIABLE})" if launches else address
    plan = contract.WorkerPlan(
        name=job.name,
        namespace=job.metadata.namespace or "",
        uid=uid,
        index=index,
        attempt=attempt,
        pod=name,
        slots=job.spec.slots_per_worker,
        workers=job.spec.workers,
        launcher=endpoint(host),
        grace_seconds=_ranks_grace(job),
    )
    container["command"] = ["topkube", "worker", "--", *container["command"]]
    _environment(container, {contract.WORKER_VARIABLE: plan.text()})
    _unprivileged(container, spec)
    _scratch(spec, container, job.spec.slots_per_worker, datasets.shared_memory_bytes(job))
    datasets.give(spec, container, job, policy)
    _volume(
        spec,
        container,
        {"name": _PREFIX + "token", "secret": _items(job, {contract.token_item(index, attempt): contract.TOKEN_FILE})},
        contract.CREDENTIALS_DIRECTORY,
        read_only=True,
    )
    ports = list_in(container, "ports", _CONTAINER)
    if not any(isinstance(port, dict) and port.get("containerPort") == contract.METRICS_PORT for port in ports):
        ports.append({"name": "topkube-metrics", "containerPort": contract.METRICS_PORT, "protocol": "TCP"})
    if job.spec.checkpoint:
        claim = {"claimName": job.spec.checkpoint.claim_name}
        _volume(spec, container, {"name": _PREFIX + "checkpoint", "persistentVolumeClaim": claim}, CHECKPOINTS)
        security = mapping_in(spec, "securityContext", f"{_OF_WORKERS}.spec")
        if "fsGroup" not in security:
            security |= {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}
    if job.spec.spread == "Node":
        placement.spread_over_nodes(spec, job)
    if datasets.uses_node_cache(job):
        placement.prefer_warm_nodes(spec, warm)
    placement.join_gang(pod, job, policy.gang, policy.gang_scheduler)
    return pod


def launcher(job: TrainingJob, uid: str, attempt: int, workers: Sequence[tuple[int, int]], policy: Policy) -> Any:
    """The launcher of `attempt`; `workers`: (index, attempt in which its pod was made) of each. Raises JobError."""
    name = names.launcher_name(job.name, attempt)
    template = without_nulls(job.spec.launcher.template or {})
    spec = mapping_in(template, "spec", _OF_LAUNCHER)
    above: Any = without_nulls(job.spec.template.get("spec"))
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    for field in _INHERITED:
        if field in above:
            spec.setdefault(field, above[field])
    spec.setdefault("terminationGracePeriodSeconds", _grace(job))  # ranks save their state: it waits for them
    containers = list_in(spec, "containers", f"{_OF_LAUNCHER}.spec")
    if not any(isinstance(one, dict) and one.get("name") == names.LAUNCHER for one in containers):
        if len(containers) == 1 and isinstance(containers[0], dict) and "name" not in containers[0]:
            containers[0]["name"] = names.LAUNCHER
        else:
            containers.insert(0, {"name": names.LAUNCHER})
    pod, container = _from_template(job, template, name, attempt, names.LAUNCHER)
    pod["metadata"]["labels"] |= {names.ROLE: names.LAUNCHER}
    _launch(job, uid, attempt, workers, policy, pod, container)
    placement.join_gang(pod, job, policy.gang, policy.gang_scheduler)
    return pod


def colocated(
    job: TrainingJob,
    uid: str,
    attempt: int,
    workers: Sequence[tuple[int, int]],
    policy: Policy,
    warm: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Worker 0 of `attempt` with the launcher as a second container. Raises JobError."""
    pod = worker(job, uid, 0, attempt, "", policy, warm)
    container: dict[str, Any] = {"name": names.LAUNCHER}
    list_in(pod["spec"], "containers", _POD).append(container)
    _launch(job, uid, attempt, workers, policy, pod, container)
    return pod


def _grace(job: TrainingJob) -> int:
    """Seconds that workers' pods may take to end."""
    spec: Any = without_nulls(job.spec.template.get("spec"))
    grace = (spec or {}).get("terminationGracePeriodSeconds")
    return grace if isinstance(grace, int) else _GRACE_SECONDS


def _ranks_grace(job: TrainingJob) -> float:
    """Of that, what ranks have to save their state."""
    return max(0.0, float(_grace(job)) - _LAST_WORDS_SECONDS)


def endpoint(host: str) -> str:
    """HOST:PORT of the launcher."""
    return f"[{host}]:{contract.LAUNCHER_PORT}" if ":" in host else f"{host}:{contract.LAUNCHER_PORT}"


def _launch(
    job: TrainingJob,
    uid: str,
    attempt: int,
    workers: Sequence[tuple[int, int]],
    policy: Policy,
    pod: dict[str, Any],
    container: dict[str, Any],
) -> None:
    """Makes `container` the launcher."""
    image = worker_container(job.spec.template)
    changes = datasets.changes(job, policy)
    if job.spec.checkpoint:
        changes["checkpoint_directory"] = f"{CHECKPOINTS}/{job.spec.checkpoint.path}"
    plan = contract.LaunchPlan(
        name=job.name,
        namespace=job.metadata.namespace or "",
        uid=uid,
        attempt=attempt,
        workers=tuple(
            contract.ExpectedWorker(index=index, attempt=made, pod=names.worker_name(job.name, index, made))
            for index, made in workers
        ),
        slots=job.spec.slots_per_worker,
        mpi=job.spec.mpi_implementation,
        # Pods may wait for days in a queue, and only the operator knows it: it ends a rendezvous itself.
        rendezvous_seconds=30 * 86400,
        stall_seconds=policy.stall_seconds,
        startup_seconds=policy.startup_seconds,
        lost_seconds=policy.lost_seconds,
        grace_seconds=_ranks_grace(job),
        environment=job.environment(**changes),
    )
    container.setdefault("image", image["image"])
    if "imagePullPolicy" in image:
        container.setdefault("imagePullPolicy", image["imagePullPolicy"])
    container.setdefault("command", ["topkube", "launch"])
    container.setdefault("resources", {"requests": dict(_LAUNCHER_REQUESTS)})
    _environment(container, {contract.PLAN_VARIABLE: plan.text().replace("$", "$$")})
    _unprivileged(container, pod["spec"])
    container["securityContext"].setdefault("readOnlyRootFilesystem", True)
    _scratch(pod["spec"], container, 0)
    list_in(container, "ports", _CONTAINER).append(
        {"name": "launcher", "containerPort": contract.LAUNCHER_PORT, "protocol": "TCP"}
    )
    keys = (contract.KEY_FILE, contract.TOKEN_KEY_FILE, contract.OPERATOR_TOKEN_FILE)
    _volume(
        pod["spec"],
        container,
        {"name": _PREFIX + "keys", "secret": _items(job, {key: key for key in keys})},
        contract.CREDENTIALS_DIRECTORY,
        read_only=True,
    )
    pod["metadata"]["annotations"].setdefault(names.DEFAULT_CONTAINER, container["name"])
    pod["metadata"]["annotations"][names.WORKERS] = str(len(workers))


def _from_template(
    job: TrainingJob, template: dict[str, Any], name: str, attempt: int, role: str = names.WORKER
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a template, and the container to wrap in it."""
    template = without_nulls(template)
    where = _OF_WORKERS if role == names.WORKER else _OF_LAUNCHER
    written = mapping_in(template, "metadata", where)
    labels, annotations = placement.passed_through(job)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": {**mapping_in(written, "labels", f"{where}.metadata"), **labels},
        "annotations": {**mapping_in(written, "annotations", f"{where}.metadata"), **annotations},
    }
    metadata["labels"] |= {names.JOB_NAME: names.job_label(job.name), names.ATTEMPT: str(attempt)}
    spec = template["spec"]
    spec["restartPolicy"] = "Never"
    spec.setdefault("enableServiceLinks", False)
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    if role == names.WORKER:
        container = worker_container(template)
        container.setdefault("name", names.WORKER)
    else:
        container = next(one for one in spec["containers"] if isinstance(one, dict) and one.get("name") == role)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, container


def _environment(container: dict[str, Any], plans: dict[str, str]) -> None:
    entries = list_in(container, "env", _CONTAINER)
    ours: list[dict[str, Any]] = [
        {"name": contract.POD_IP_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": contract.NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": name, "value": value} for name, value in plans.items()),
    ]
    taken = {entry["name"] for entry in ours}
    kept = [entry for entry in entries if not (isinstance(entry, dict) and entry.get("name") in taken)]
    named = {entry.get("name") for entry in kept if isinstance(entry, dict)}
    if "HOME" not in named:
        ours.append({"name": "HOME", "value": HOME})
    container["env"] = ours + kept


def _unprivileged(container: dict[str, Any], pod: dict[str, Any]) -> None:
    """What Pod Security's restricted level asks for, where neither the container nor its pod says otherwise."""
    security = mapping_in(container, "securityContext", _CONTAINER)
    above = mapping_in(pod, "securityContext", _POD)
    security.setdefault("allowPrivilegeEscalation", bool(security.get("privileged")))
    if not security.get("privileged"):
        security.setdefault("capabilities", {"drop": ["ALL"]})
    for field, value in (("runAsNonRoot", True), ("runAsUser", _USER), ("seccompProfile", {"type": "RuntimeDefault"})):
        if field not in above and field not in security:
            if field == "runAsNonRoot" and 0 in (security.get("runAsUser"), above.get("runAsUser")):
                continue
            security[field] = value


def _scratch(pod: dict[str, Any], container: dict[str, Any], ranks: int, samples: int = 0) -> None:
    """Writable /tmp and HOME, and a /dev/shm that holds the ranks' shared windows and `samples` bytes of the memory
    tier."""
    _volume(pod, container, {"name": f"{_PREFIX}tmp-{container['name']}", "emptyDir": {}}, "/tmp")
    _volume(pod, container, {"name": f"{_PREFIX}home-{container['name']}", "emptyDir": {}}, HOME)
    if ranks:
        size = f"{_SHM_MIB + _SHM_MIB_PER_RANK * ranks + -(-samples // (1 << 20))}Mi"
        shared = {"name": _PREFIX + "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        _volume(pod, container, shared, "/dev/shm")


def _volume(
    pod: dict[str, Any], container: dict[str, Any], volume: dict[str, Any], path: str, *, read_only: bool = False
) -> None:
    """Mounts `volume` at `path`, unless the template has something of its own there."""
    mounts = list_in(container, "volumeMounts", _CONTAINER)
    if any(isinstance(mount, dict) and str(mount.get("mountPath")).rstrip("/") == path for mount in mounts):
        return
    volume["name"] = names.child_name(volume["name"])
    list_in(pod, "volumes", _POD).append(volume)
    mounts.append({"name": volume["name"], "mountPath": path, **({"readOnly": True} if read_only else {})})


def _items(job: TrainingJob, files: dict[str, str]) -> dict[str, Any]:
    """The items of the job's Secret that one pod sees: the certificate and `files` (item: file name)."""
    items = {contract.CERTIFICATE_FILE: contract.CERTIFICATE_FILE, **files}
    return {
        "secretName": names.secret_name(job.name),
        "defaultMode": 0o444,
        "items": [{"key": key, "path": path} for key, path in items.items()],
    }
