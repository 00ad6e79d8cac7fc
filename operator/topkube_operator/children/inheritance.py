"""The fields that a launcher inherits from the workers' template: placement, security context, labels, some
annotations, resources. Pure.

A launcher without a template of its own must be admitted and scheduled wherever a worker is: on nodes of the same
architecture, under the same runtime class, in a namespace with a quota or a LimitRange.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube.job.base.quantity import parse_quantity
from topkube.job.template import find_worker_container, remove_nulls
from topkube_operator.children.templates import ensure_mapping, select_domains

_FIELDS = (
    "imagePullSecrets",
    "tolerations",
    "priorityClassName",
    "schedulerName",
    "serviceAccountName",
    "nodeSelector",
    "runtimeClassName",
    "securityContext",
)
"""Fields of a pod's spec that the launcher's pod has too, unless its own template sets them."""
_AFFINITY = ("nodeAffinity", "podAffinity")
"""The parts of `affinity` that the launcher inherits. An anti-affinity keeps workers apart: with it, the launcher would
need one more node."""
_ANNOTATION_DOMAINS = (
    "cluster-autoscaler.kubernetes.io",
    "descheduler.alpha.kubernetes.io",
    "karpenter.sh",
    "istio.io",
    "linkerd.io",
    "kuma.io",
    "openservicemesh.io",
)
"""The domains of annotations that the launcher's pod has too. They protect pods from autoscalers (if the launcher is
evicted, the attempt of all workers ends), and they tell service meshes what to do with a pod. Other annotations concern
the containers, networks and metrics of workers."""
_REQUESTS = {"cpu": "50m", "memory": "96Mi"}
_GUARANTEED_CPU, _LIMIT_CPU = "500m", "2"
_LIMIT_MIB, _LIMIT_MIB_PER_WORKER = 512, 1
"""The launcher's resources without spec.launcher.resources: its requests, the processors of a launcher in a Guaranteed
pod and of any other launcher, and the memory limit, which grows with the workers."""


def inherit_fields(launcher: dict[str, Any], workers: Mapping[str, Any]) -> None:
    """Add the fields that a launcher's template lacks and the workers' template has. Neither template contains
    nulls."""
    spec = ensure_mapping(launcher, "spec", "spec.launcher.template")
    source: Any = workers.get("spec") or {}
    for field in _FIELDS:
        if field in source:
            spec.setdefault(field, copy.deepcopy(source[field]))
    affinity = source.get("affinity")
    if isinstance(affinity, dict) and any(part in affinity for part in _AFFINITY):
        spec.setdefault("affinity", {part: copy.deepcopy(affinity[part]) for part in _AFFINITY if part in affinity})
    metadata = ensure_mapping(launcher, "metadata", "spec.launcher.template")
    own_annotations = ensure_mapping(metadata, "annotations", "spec.launcher.template.metadata")
    annotations: Any = (workers.get("metadata") or {}).get("annotations") or {}
    for key, value in select_domains(annotations, _ANNOTATION_DOMAINS).items():
        own_annotations.setdefault(key, value)
    own_labels = ensure_mapping(metadata, "labels", "spec.launcher.template.metadata")
    labels: Any = (workers.get("metadata") or {}).get("labels") or {}
    spreading_keys = set(_find_spreading_keys(source))
    for key, value in labels.items():
        if key not in spreading_keys:
            own_labels.setdefault(key, value)


def _find_spreading_keys(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels by which the template keeps its own pods apart. With these labels, a launcher would count as
    a worker and would take a node or a domain from the workers."""
    affinity = spec.get("affinity")
    anti_affinity = affinity.get("podAntiAffinity") if isinstance(affinity, dict) else None
    rules = (
        [rule for entries in anti_affinity.values() for rule in _list_mappings(entries)]
        if isinstance(anti_affinity, dict)
        else []
    )
    for rule in [*rules, *_list_mappings(spec.get("topologySpreadConstraints"))]:
        term = rule.get("podAffinityTerm", rule)
        selector = term.get("labelSelector") if isinstance(term, dict) else None
        if isinstance(selector, dict):
            matched = selector.get("matchLabels")
            yield from matched if isinstance(matched, dict) else ()
            yield from (str(entry.get("key")) for entry in _list_mappings(selector.get("matchExpressions")))


def _list_mappings(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def choose_launcher_resources(job: TrainingJob) -> dict[str, Any]:
    """Return the resources of the launcher's container, if its template has none.

    spec.launcher.resources wins. Otherwise the launcher has a limit if the worker has a limit: a quota on limits admits
    a pod only if all its containers have limits. If the worker's pod would be Guaranteed, a launcher inside the pod has
    equal requests and limits, so that the pod stays Guaranteed. It has none inside a pod with resources of its own.
    """
    if job.spec.launcher.resources is not None:
        own_resources = job.spec.launcher.resources
        own_amounts = {"requests": own_resources.requests, "limits": own_resources.limits}
        return {name: dict(amounts) for name, amounts in own_amounts.items() if amounts}
    if job.spec.launcher.colocate and _has_own_resources(job.spec.template):
        return {}  # the requests and limits of the containers may not exceed those of the pod, and would with ours
    memory = f"{_LIMIT_MIB + _LIMIT_MIB_PER_WORKER * job.spec.workers}Mi"
    if job.spec.launcher.colocate and is_guaranteed(job.spec.template):
        equal_amounts = {"cpu": _GUARANTEED_CPU, "memory": memory}
        return {"requests": dict(equal_amounts), "limits": equal_amounts}
    worker: Any = find_worker_container(job.spec.template)
    worker_limits = _read_resources(worker, "limits")
    limits = {name: value for name, value in (("cpu", _LIMIT_CPU), ("memory", memory)) if name in worker_limits}
    return {"requests": dict(_REQUESTS), **({"limits": limits} if limits else {})}


def requests_gpus(container: Mapping[str, Any]) -> bool:
    """Return True if the container requests GPUs: `nvidia.com/gpu`, or parts of GPUs (`nvidia.com/mig-...`)."""
    amounts = {**_read_resources(container, "requests"), **_read_resources(container, "limits")}
    return any(name.startswith("nvidia.com/") and parse_quantity(amount) for name, amount in amounts.items())


def is_guaranteed(template: Mapping[str, Any]) -> bool:
    """Return True if Kubernetes would put a pod of this template into the QoS class Guaranteed."""
    spec: Any = remove_nulls(template).get("spec") or {}
    containers = [*_list_mappings(spec.get("containers")), *_list_mappings(spec.get("initContainers"))]
    return bool(containers) and all(_is_guaranteed(container) for container in containers)


def _has_own_resources(template: Mapping[str, Any]) -> bool:
    """Return True if the template requests resources for the whole pod (Kubernetes 1.34)."""
    spec: Any = remove_nulls(template).get("spec") or {}
    return any(_read_resources(spec, kind) for kind in ("requests", "limits"))


def _is_guaranteed(container: Mapping[str, Any]) -> bool:
    requests, limits = _read_resources(container, "requests"), _read_resources(container, "limits")
    return all(
        (limit := parse_quantity(limits.get(name))) and limit == parse_quantity(requests.get(name, limits[name]))
        for name in ("cpu", "memory")
    )


def _read_resources(container: Any, kind: str) -> dict[str, Any]:
    resources = container.get("resources") if isinstance(container, Mapping) else None
    amounts = resources.get(kind) if isinstance(resources, Mapping) else None
    return dict(amounts) if isinstance(amounts, Mapping) else {}
