"""The pods of a job: the user's template with its main container wrapped, and the fields that restricted pods need.
Pure.

The operator overrides nothing in the template, except the restart policies of the pod and of the wrapped container, and
the command of the wrapped container, which becomes the argument of `topkube worker`. Sidecars and init containers stay
unchanged. `children/inheritance.py` decides what a launcher inherits from the workers' template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from topkube.job import TrainingJob
from topkube.job.template import find_worker_container, remove_nulls
from topkube.launch import contract
from topkube_operator.children import datasets, inheritance, placement, source
from topkube_operator.children.templates import ensure_list, ensure_mapping, escape_variables
from topkube_operator.model import names
from topkube_operator.model.observed import Policy, hash_data

CHECKPOINTS = "/checkpoint"
HOME = "/home/topkube"
_USER = 1000
_GRACE_SECONDS = 30
_SECONDS_AFTER_RANKS = 5
"""The last part of a worker's grace period. The ranks have ended, and `topkube worker` sends their results."""
_DOMAINS_SECONDS = 15.0
"""How long a launcher waits for the zones, racks or blocks of its workers."""
_SHM_MIB, _SHM_MIB_PER_RANK = 1024, 256
"""The size of a worker's /dev/shm, without samples: a fixed part, and a part for each rank."""
_PREFIX = "topkube-"
_WORKER_TEMPLATE, _LAUNCHER_TEMPLATE = "spec.template", "spec.launcher.template"
_POD, _CONTAINER = "the pod template's spec", "the container"
_VISIBLE_GPUS = "NVIDIA_VISIBLE_DEVICES"
_USER_FIELDS = ("runAsNonRoot", "runAsUser", "seccompProfile")
"""The fields of a security context that the operator sets, unless the template sets them to a value or to null."""
_RESTART_FIELDS = ("restartPolicy", "restartPolicyRules")
"""Fields of a container by which Kubernetes 1.34 and newer starts it again in its pod. A launcher that is started again
hides how its attempt ended."""


def hash_worker(job: TrainingJob) -> str:
    """Return a hash of everything that a worker's pod is made from. The next attempt replaces pods of another shape."""
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    parts = ("template", "slotsPerWorker", "mpiImplementation", "dataset", "spread")
    claim = [job.spec.checkpoint.claim_name] if job.spec.checkpoint else []
    later_parts = [spec[part] for part in ("topology", "source", "setup") if part in spec]  # old jobs keep their shape
    return hash_data([*(spec.get(part) for part in parts), *claim, *later_parts])


def build_worker(
    job: TrainingJob,
    uid: str,
    index: int,
    attempt: int,
    address: str,
    policy: Policy,
    warm: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the pod of worker `index`, made for `attempt`.

    `address` is the address of the launcher's Service. `warm` holds the percentage of the dataset by node. Raises
    JobError if the template makes no valid pod.
    """
    name = names.name_worker_pod(job.name, uid, index, attempt)
    has_launcher = index == 0 and job.spec.launcher.colocate
    pod, container = _build_pod(job, uid, job.spec.template, name, attempt, policy)
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"] |= {names.ROLE: names.WORKER, names.WORKER_INDEX: str(index)}
    metadata["annotations"] |= {
        names.SHAPE: hash_worker(job),
        names.LAUNCHER_ADDRESS: address,
        names.DEFAULT_CONTAINER: container["name"],
    }
    spec.setdefault("terminationGracePeriodSeconds", _GRACE_SECONDS)
    host = f"$({contract.POD_IP_VARIABLE})" if has_launcher else address
    plan = contract.WorkerPlan(
        name=job.name,
        namespace=job.metadata.namespace or "",
        uid=uid,
        index=index,
        attempt=attempt,
        pod=name,
        slots=job.spec.slots_per_worker,
        workers=job.spec.workers,
        launcher=format_endpoint(host),
        grace_seconds=_compute_ranks_grace_seconds(job),
    )
    fetcher = source.build_source_container(job, container, name, index, attempt) if source.has_code(job) else None
    container["command"] = ["topkube", "worker", "--", *container["command"]]
    _add_environment(container, {contract.WORKER_VARIABLE: plan.to_json()})
    _restrict_container(container, spec, _find_unset_fields(job))
    _add_scratch_volumes(spec, container, job.spec.slots_per_worker, datasets.count_shared_memory_bytes(job))
    if fetcher is not None:
        _add_home(fetcher)
        _restrict_container(fetcher, spec, _find_unset_fields(job))
        _add_scratch_volumes(spec, fetcher, 0)
        source.add_source(spec, container, fetcher, job)
    datasets.add_dataset(spec, container, job, policy)
    _mount_volume(
        spec,
        container,
        {
            "name": _PREFIX + "token",
            "secret": _build_secret_source(job, {contract.name_token_item(index, attempt): contract.TOKEN_FILE}),
        },
        contract.CREDENTIALS_DIRECTORY,
        read_only=True,
    )
    ports = ensure_list(container, "ports", _CONTAINER)
    if not any(isinstance(port, dict) and port.get("containerPort") == contract.METRICS_PORT for port in ports):
        ports.append({"name": "topkube-metrics", "containerPort": contract.METRICS_PORT, "protocol": "TCP"})
    if job.spec.checkpoint:
        claim = {"claimName": job.spec.checkpoint.claim_name}
        _mount_volume(spec, container, {"name": _PREFIX + "checkpoint", "persistentVolumeClaim": claim}, CHECKPOINTS)
        security = ensure_mapping(spec, "securityContext", f"{_WORKER_TEMPLATE}.spec")
        if "fsGroup" not in security and not {"fsGroup", "runAsUser"} & _find_unset_fields(job):
            security |= {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}
    if job.spec.spread == "Node":
        placement.spread_over_nodes(spec, job, uid)
    placement.place_together(spec, job, uid)
    if datasets.uses_node_cache(job):
        placement.prefer_warm_nodes(spec, warm)
    placement.join_gang(pod, job, uid, policy.gang, policy.gang_scheduler)
    placement.join_kueue_group(pod, names.LAUNCHER if has_launcher else names.WORKER)
    return pod


def build_launcher(job: TrainingJob, uid: str, attempt: int, workers: Sequence[tuple[int, int]], policy: Policy) -> Any:
    """Return the launcher's pod of `attempt`. `workers` holds (index, attempt for which the pod was made) of each
    worker. Raises JobError if the template makes no valid pod."""
    name = names.name_launcher_pod(job.name, uid, attempt)
    template = remove_nulls(job.spec.launcher.template or {})
    spec = ensure_mapping(template, "spec", _LAUNCHER_TEMPLATE)
    # Before the launcher inherits the workers' service account, whose token it does not need.
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    inheritance.inherit_fields(template, remove_nulls(job.spec.template))
    # The launcher waits while ranks save their state.
    spec.setdefault("terminationGracePeriodSeconds", _read_grace_seconds(job))
    containers = ensure_list(spec, "containers", f"{_LAUNCHER_TEMPLATE}.spec")
    if not any(isinstance(entry, dict) and entry.get("name") == names.LAUNCHER for entry in containers):
        if len(containers) == 1 and isinstance(containers[0], dict) and "name" not in containers[0]:
            containers[0]["name"] = names.LAUNCHER
        else:
            containers.insert(0, {"name": names.LAUNCHER})
    pod, container = _build_pod(job, uid, template, name, attempt, policy, names.LAUNCHER)
    pod["metadata"]["labels"] |= {names.ROLE: names.LAUNCHER}
    _configure_launcher(job, uid, attempt, workers, policy, pod, container)
    placement.join_gang(pod, job, uid, policy.gang, policy.gang_scheduler)
    placement.join_kueue_group(pod, names.LAUNCHER)
    return pod


def build_colocated_worker(
    job: TrainingJob,
    uid: str,
    attempt: int,
    workers: Sequence[tuple[int, int]],
    policy: Policy,
    warm: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Return the pod of worker 0 of `attempt`, with the launcher as a second container. Raises JobError if the template
    makes no valid pod."""
    pod = build_worker(job, uid, 0, attempt, "", policy, warm)
    container: dict[str, Any] = {"name": names.LAUNCHER}
    ensure_list(pod["spec"], "containers", _POD).append(container)
    _configure_launcher(job, uid, attempt, workers, policy, pod, container)
    return pod


def _read_grace_seconds(job: TrainingJob) -> int:
    """Return the seconds that workers' pods may take to end."""
    spec: Any = remove_nulls(job.spec.template.get("spec"))
    grace = (spec or {}).get("terminationGracePeriodSeconds")
    return grace if isinstance(grace, int) else _GRACE_SECONDS


def _compute_ranks_grace_seconds(job: TrainingJob) -> float:
    """Return the part of the grace period in which ranks can save their state."""
    return max(0.0, float(_read_grace_seconds(job)) - _SECONDS_AFTER_RANKS)


def _checks_address(job: TrainingJob, policy: Policy) -> bool:
    """Return True if the launcher compares the address of a caller with the address of the worker's pod."""
    annotation = job.metadata.annotations.get(names.CHECK_ADDRESS)
    return annotation == "true" if annotation in ("true", "false") else policy.check_address


def format_endpoint(host: str) -> str:
    """Return HOST:PORT of the launcher."""
    return f"[{host}]:{contract.LAUNCHER_PORT}" if ":" in host else f"{host}:{contract.LAUNCHER_PORT}"


def _configure_launcher(
    job: TrainingJob,
    uid: str,
    attempt: int,
    workers: Sequence[tuple[int, int]],
    policy: Policy,
    pod: dict[str, Any],
    container: dict[str, Any],
) -> None:
    """Make `container` of `pod` the container of the launcher."""
    worker = find_worker_container(job.spec.template)
    settings = datasets.build_cache_settings(job, policy)
    if job.spec.checkpoint:
        settings["checkpoint_directory"] = f"{CHECKPOINTS}/{job.spec.checkpoint.path}"
    plan = contract.LaunchPlan(
        name=job.name,
        namespace=job.metadata.namespace or "",
        uid=uid,
        attempt=attempt,
        workers=tuple(
            contract.ExpectedWorker(
                index=index, attempt=made_for, pod=names.name_worker_pod(job.name, uid, index, made_for)
            )
            for index, made_for in workers
        ),
        slots=job.spec.slots_per_worker,
        mpi=job.spec.mpi_implementation,
        # Pods may wait in a queue for days, which only the operator can see. The operator ends a rendezvous itself.
        rendezvous_seconds=30 * 86400,
        stall_seconds=policy.stall_seconds,
        startup_seconds=policy.startup_seconds,
        lost_seconds=policy.lost_seconds,
        grace_seconds=_compute_ranks_grace_seconds(job),
        domains_seconds=_DOMAINS_SECONDS if job.spec.topology is not None else 0.0,
        check_address=_checks_address(job, policy),
        environment=job.environment(**settings),
    )
    container.setdefault("image", worker["image"])
    if "imagePullPolicy" in worker:
        container.setdefault("imagePullPolicy", worker["imagePullPolicy"])
    container.setdefault("command", ["topkube", "launch"])
    container.setdefault("resources", inheritance.choose_launcher_resources(job))
    _add_environment(container, {contract.PLAN_VARIABLE: escape_variables(plan.to_json())})
    _hide_gpus(container)
    _restrict_container(container, pod["spec"], _find_unset_fields(job, of_launcher=True))
    container["securityContext"].setdefault("readOnlyRootFilesystem", True)
    _add_scratch_volumes(pod["spec"], container, 0)
    ensure_list(container, "ports", _CONTAINER).append(
        {"name": "launcher", "containerPort": contract.LAUNCHER_PORT, "protocol": "TCP"}
    )
    keys = (contract.KEY_FILE, contract.TOKEN_KEY_FILE, contract.OPERATOR_TOKEN_FILE)
    _mount_volume(
        pod["spec"],
        container,
        {"name": _PREFIX + "keys", "secret": _build_secret_source(job, {key: key for key in keys})},
        contract.CREDENTIALS_DIRECTORY,
        read_only=True,
    )
    pod["metadata"]["annotations"].setdefault(names.DEFAULT_CONTAINER, container["name"])
    pod["metadata"]["annotations"][names.WORKERS] = str(len(workers))
    pod["metadata"]["finalizers"] = [names.ENDING]


def _build_pod(
    job: TrainingJob,
    uid: str,
    template: dict[str, Any],
    name: str,
    attempt: int,
    policy: Policy,
    role: str = names.WORKER,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod of a template, and the container to wrap in it."""
    template = remove_nulls(template)
    path = _WORKER_TEMPLATE if role == names.WORKER else _LAUNCHER_TEMPLATE
    template_metadata = ensure_mapping(template, "metadata", path)
    labels, annotations = placement.select_queue_metadata(job, uid, policy)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": {**_select_own(template_metadata, "labels", path), **labels},
        "annotations": {**_select_own(template_metadata, "annotations", path), **annotations},
    }
    metadata["labels"] |= {
        names.JOB_NAME: names.name_job_label(job.name),
        names.JOB_UID: uid,
        names.ATTEMPT: str(attempt),
    }
    spec = template["spec"]
    spec["restartPolicy"] = "Never"
    spec.setdefault("enableServiceLinks", False)
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    if role == names.WORKER:
        container = find_worker_container(template)
        container.setdefault("name", names.WORKER)
    else:
        containers = [entry for entry in spec["containers"] if isinstance(entry, dict)]
        container = next(entry for entry in containers if entry.get("name") == role)
    for field in _RESTART_FIELDS:
        container.pop(field, None)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, container


def _select_own(metadata: dict[str, Any], field: str, path: str) -> dict[str, Any]:
    """Return the labels or annotations of a template's `metadata` without the operator's markers. With a marker of
    another role, a pod would be taken for a pod of that role."""
    entries = ensure_mapping(metadata, field, f"{path}.metadata")
    return {key: value for key, value in entries.items() if key not in names.MARKERS}


def _add_environment(container: dict[str, Any], plans: dict[str, str]) -> None:
    """Add our variables. They replace variables of the same name in the template."""
    entries = ensure_list(container, "env", _CONTAINER)
    ours: list[dict[str, Any]] = [
        {"name": contract.POD_IP_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": contract.NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": name, "value": value} for name, value in plans.items()),
    ]
    reserved = {entry["name"] for entry in ours}
    kept = [entry for entry in entries if not (isinstance(entry, dict) and entry.get("name") in reserved)]
    container["env"] = ours + kept
    _add_home(container)


def _add_home(container: dict[str, Any]) -> None:
    """Set HOME to a folder that every user can write, unless the template sets HOME."""
    entries = ensure_list(container, "env", _CONTAINER)
    if not any(isinstance(entry, dict) and entry.get("name") == "HOME" for entry in entries):
        entries.insert(0, {"name": "HOME", "value": HOME})  # before the entries that may refer to $(HOME)


def _hide_gpus(container: dict[str, Any]) -> None:
    """Hide the GPUs of the node from the container, unless its template requests GPUs or sets the variable.

    Images for CUDA set NVIDIA_VISIBLE_DEVICES=all, and NVIDIA's container runtime follows it in a container that
    requests no GPU. A launcher would then see, and could use, all GPUs of its node. The value `void` makes the runtime
    add neither devices nor driver files.
    """
    if inheritance.requests_gpus(container):
        return
    entries = ensure_list(container, "env", _CONTAINER)
    if not any(isinstance(entry, dict) and entry.get("name") == _VISIBLE_GPUS for entry in entries):
        entries.append({"name": _VISIBLE_GPUS, "value": "void"})


def _find_unset_fields(job: TrainingJob, *, of_launcher: bool = False) -> frozenset[str]:
    """Return the fields of security contexts that a template sets to null: the cluster chooses their values. A null in
    the workers' template also counts for the launcher."""
    templates = [job.spec.template, job.spec.launcher.template or {}] if of_launcher else [job.spec.template]
    unset = set[str]()
    for template in templates:
        spec = template.get("spec")
        for part in (spec, find_worker_container(template)):
            context = part.get("securityContext") if isinstance(part, dict) else None
            unset |= {name for name, value in context.items() if value is None} if isinstance(context, dict) else set()
    return frozenset(unset)


def _restrict_container(container: dict[str, Any], pod: dict[str, Any], unset: frozenset[str]) -> None:
    """Set the fields that Pod Security's restricted level requires, except fields that the container or its pod sets,
    and fields that they set to null (`unset`)."""
    security = ensure_mapping(container, "securityContext", _CONTAINER)
    pod_security = ensure_mapping(pod, "securityContext", _POD)
    security.setdefault("allowPrivilegeEscalation", bool(security.get("privileged")))
    if not security.get("privileged"):
        security.setdefault("capabilities", {"drop": ["ALL"]})
    for field, value in zip(_USER_FIELDS, (True, _USER, {"type": "RuntimeDefault"}), strict=True):
        if field not in pod_security and field not in security and field not in unset:
            if field == "runAsNonRoot" and 0 in (security.get("runAsUser"), pod_security.get("runAsUser")):
                continue
            security[field] = value


def _add_scratch_volumes(pod: dict[str, Any], container: dict[str, Any], ranks: int, memory_tier: int = 0) -> None:
    """Mount a writable /tmp and HOME, and a /dev/shm for the ranks' shared windows and `memory_tier` bytes of
    samples."""
    _mount_volume(pod, container, {"name": f"{_PREFIX}tmp-{container['name']}", "emptyDir": {}}, "/tmp")
    _mount_volume(pod, container, {"name": f"{_PREFIX}home-{container['name']}", "emptyDir": {}}, HOME)
    if ranks:
        size = f"{_SHM_MIB + _SHM_MIB_PER_RANK * ranks + -(-memory_tier // (1 << 20))}Mi"
        shared = {"name": _PREFIX + "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        _mount_volume(pod, container, shared, "/dev/shm")


def _mount_volume(
    pod: dict[str, Any], container: dict[str, Any], volume: dict[str, Any], path: str, *, read_only: bool = False
) -> None:
    """Mount `volume` at `path`, unless the template mounts something there."""
    mounts = ensure_list(container, "volumeMounts", _CONTAINER)
    if any(isinstance(mount, dict) and str(mount.get("mountPath")).rstrip("/") == path for mount in mounts):
        return
    volume["name"] = names.name_child(volume["name"])
    ensure_list(pod, "volumes", _POD).append(volume)
    mounts.append({"name": volume["name"], "mountPath": path, **({"readOnly": True} if read_only else {})})


def _build_secret_source(job: TrainingJob, files: dict[str, str]) -> dict[str, Any]:
    """Return the job's Secret with the items that one pod may read: the certificate and `files` (item: file name)."""
    items = {contract.CERTIFICATE_FILE: contract.CERTIFICATE_FILE, **files}
    return {
        "secretName": names.name_secret(job.name),
        "defaultMode": 0o444,
        "items": [{"key": key, "path": path} for key, path in items.items()],
    }
