"""The pods of an attempt as queues and gang schedulers count them: sets of equal pods, and what they request. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from topkube.job import TrainingJob
from topkube.job.base.quantity import parse_quantity
from topkube_operator.children import placement, pods
from topkube_operator.model import names
from topkube_operator.model.observed import Policy

_ADDRESS = "0.0.0.0"
"""A placeholder for the address of the launcher's Service, on which no count depends."""


@dataclass(frozen=True)
class PodSet:
    """A set of equal pods."""

    name: str
    count: int
    pod: Mapping[str, Any]
    """The manifest of one of the pods."""


def build_pod_sets(job: TrainingJob, uid: str, policy: Policy) -> list[PodSet]:
    """Return the pods of one attempt. The set of the launcher comes first. Raises JobError if the templates make no
    valid pod."""
    attempt = 1  # no count depends on the attempt
    workers = [(index, attempt) for index in range(job.spec.workers)]
    last_worker = job.spec.workers - 1  # never the worker with a colocated launcher, unless there is only one worker
    worker = pods.build_worker(job, uid, last_worker, attempt, _ADDRESS, policy)
    if job.spec.launcher.colocate:
        launcher, worker_count = pods.build_colocated_worker(job, uid, attempt, workers, policy), job.spec.workers - 1
    else:
        launcher, worker_count = pods.build_launcher(job, uid, attempt, workers, policy), job.spec.workers
    sets = [PodSet(names.LAUNCHER, 1, launcher), PodSet(names.WORKER, worker_count, worker)]
    return [pod_set for pod_set in sets if pod_set.count]


def sum_member_requests(job: TrainingJob, uid: str, policy: Policy) -> dict[str, str]:
    """Return what the pods that must fit at the same time request together. The launcher is one of them."""
    total, remaining = dict[str, Decimal](), placement.count_members(job)
    for pod_set in build_pod_sets(job, uid, policy):
        count = min(pod_set.count, remaining)
        remaining -= count
        for name, amount in sum_pod_requests(pod_set.pod["spec"]).items():
            total[name] = total.get(name, Decimal(0)) + count * amount
    return {name: format_quantity(name, amount) for name, amount in sorted(total.items()) if amount}


def sum_pod_requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a pod requests, as the scheduler counts it: all containers and native sidecars together, or more if
    an init container and the sidecars before it need more; then the pod's own resources, which replace that; and the
    overhead."""
    sidecars, largest = dict[str, Decimal](), dict[str, Decimal]()
    for container in spec.get("initContainers") or ():
        requests = _read_requests(container)
        if isinstance(container, Mapping) and container.get("restartPolicy") == "Always":
            sidecars = _sum_amounts([sidecars, requests])
        else:
            largest = _choose_larger_amounts(largest, _sum_amounts([sidecars, requests]))
    running = _sum_amounts([sidecars, *(_read_requests(container) for container in spec.get("containers") or ())])
    total = _choose_larger_amounts(running, largest)
    pod_resources = spec.get("resources")
    if isinstance(pod_resources, Mapping):
        total = _read_amounts(pod_resources.get("limits")) | total | _read_amounts(pod_resources.get("requests"))
    return _sum_amounts([total, _read_amounts(spec.get("overhead"))])


def _read_requests(container: Any) -> dict[str, Decimal]:
    resources = container.get("resources") if isinstance(container, Mapping) else None
    if not isinstance(resources, Mapping):
        return {}
    return _read_amounts(resources.get("limits")) | _read_amounts(resources.get("requests"))


def _read_amounts(value: Any) -> dict[str, Decimal]:
    entries = value.items() if isinstance(value, Mapping) else ()
    parsed = ((str(name), parse_quantity(text)) for name, text in entries)
    return {name: amount for name, amount in parsed if amount is not None}


def _sum_amounts(parts: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    total = dict[str, Decimal]()
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _choose_larger_amounts(amounts: Mapping[str, Decimal], others: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {
        name: max(amounts.get(name, Decimal(0)), others.get(name, Decimal(0)))
        for name in dict.fromkeys([*amounts, *others])
    }


def format_quantity(name: str, amount: Decimal) -> str:
    """Return an amount as Kubernetes writes it: thousandths of processors, whole numbers of anything else."""
    thousandths = math.ceil(amount * 1000)
    if name == "cpu" and thousandths % 1000:
        return f"{thousandths}m"
    return str(math.ceil(amount))
