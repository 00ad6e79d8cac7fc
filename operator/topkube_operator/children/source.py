"""The code of a job in a worker's pod: an init container that fetches spec.source and installs spec.setup. Pure.

The init container has the worker's image, user, variables and volumes, so that it reads the same Secrets, uses the same
proxies and finds the same folders of wheels. It writes to an emptyDir that the worker mounts too.
"""

from __future__ import annotations

import copy
from typing import Any

from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator.children.templates import ensure_list, escape_variables

_VOLUME, _FILES, _SECRET = "topkube-code", "topkube-source-files", "topkube-source-credentials"
_CONTAINER, _POD = "the container", "the pod template's spec"
_RESOURCES = ("cpu", "memory", "ephemeral-storage")
"""The resources of the worker that its init container has too. Kubernetes counts the larger of the two, not the sum.
The init container needs no GPU."""
_USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
"""The fields of the worker's security context that its init container has too: it never gets more rights than it
needs."""
_DIRECTORIES = {
    "source": ("TOPKUBE_SOURCE_DIRECTORY", contract.SOURCE_DIRECTORY),
    "setup": ("TOPKUBE_PACKAGES_DIRECTORY", contract.PACKAGES_DIRECTORY),
}
"""By field of the job's spec: the variable that the worker gets, and the folder that is its value."""


def has_code(job: TrainingJob) -> bool:
    """Return True if the workers' pods fetch code or install packages before they start."""
    return job.spec.source is not None or job.spec.setup is not None


def build_source_container(
    job: TrainingJob, container: dict[str, Any], pod: str, index: int, attempt: int
) -> dict[str, Any]:
    """Return the init container. `container` is the worker's container as its template has it: without the fields that
    the operator adds, apart from its name."""
    plan = contract.SourcePlan(pod=pod, attempt=attempt, index=index, source=job.spec.source, setup=job.spec.setup)
    built: dict[str, Any] = {
        "name": contract.SOURCE_CONTAINER,
        "image": container["image"],
        "command": ["topkube", "fetch-source"],
    }
    copied_fields = ("imagePullPolicy", "env", "envFrom", "volumeMounts")
    built |= {field: copy.deepcopy(container[field]) for field in copied_fields if field in container}
    security = container.get("securityContext")
    user_fields = {
        field: value
        for field, value in (security if isinstance(security, dict) else {}).items()
        if field in _USER_FIELDS
    }
    built["securityContext"] = {**copy.deepcopy(user_fields), "readOnlyRootFilesystem": True}
    resources = container.get("resources")
    amounts_by_kind = {
        kind: {name: amount for name, amount in amounts.items() if name in _RESOURCES}
        for kind, amounts in (resources.items() if isinstance(resources, dict) else ())
        if kind in ("requests", "limits") and isinstance(amounts, dict)
    }
    if any(amounts_by_kind.values()):
        built["resources"] = {kind: amounts for kind, amounts in amounts_by_kind.items() if amounts}
    entries = ensure_list(built, "env", _CONTAINER)
    entries[:] = [
        entry for entry in entries if not (isinstance(entry, dict) and entry.get("name") == contract.SOURCE_VARIABLE)
    ]
    entries.append({"name": contract.SOURCE_VARIABLE, "value": escape_variables(plan.to_json())})
    archive = job.spec.source.archive if job.spec.source is not None else None
    if archive is not None and archive.secret_name:
        ensure_list(built, "envFrom", _CONTAINER).append({"secretRef": {"name": archive.secret_name}})
    return built


def add_source(pod: dict[str, Any], container: dict[str, Any], fetcher: dict[str, Any], job: TrainingJob) -> None:
    """Add the volumes of the code to the spec of a worker's pod, and `fetcher` as its last init container.

    `build_source_container` has returned `fetcher`. The ranks run in the folder of the source, unless the template sets
    workingDir. Raises JobError."""
    source = job.spec.source
    volumes = ensure_list(pod, "volumes", _POD)
    volumes.append({"name": _VOLUME, "emptyDir": {}})
    for each in (container, fetcher):
        ensure_list(each, "volumeMounts", _CONTAINER).append({"name": _VOLUME, "mountPath": contract.CODE_DIRECTORY})
    if source is not None and source.config_map is not None:
        config_map: dict[str, Any] = {"name": source.config_map.name}
        if source.config_map.items is not None:
            config_map["items"] = [{"key": item.key, "path": item.path} for item in source.config_map.items]
        elif source.config_map.archive is not None:
            config_map["items"] = [{"key": source.config_map.archive, "path": source.config_map.archive}]
        volumes.append({"name": _FILES, "configMap": config_map})
        _mount_read_only(fetcher, _FILES, contract.SOURCE_FILES_DIRECTORY)
    if source is not None and source.git is not None and source.git.secret_name:
        volumes.append({"name": _SECRET, "secret": {"secretName": source.git.secret_name, "defaultMode": 0o444}})
        _mount_read_only(fetcher, _SECRET, contract.SOURCE_SECRET_DIRECTORY)
    if source is not None:
        container.setdefault("workingDir", contract.SOURCE_DIRECTORY)
    entries = ensure_list(container, "env", _CONTAINER)
    set_variables = {entry.get("name") for entry in entries if isinstance(entry, dict)}
    entries += [
        {"name": variable, "value": directory}
        for field, (variable, directory) in _DIRECTORIES.items()
        if getattr(job.spec, field) is not None and variable not in set_variables
    ]
    ensure_list(pod, "initContainers", _POD).append(fetcher)


def _mount_read_only(container: dict[str, Any], volume: str, path: str) -> None:
    ensure_list(container, "volumeMounts", _CONTAINER).append({"name": volume, "mountPath": path, "readOnly": True})
