"""The pods of the current attempt: which there are, which live on, and what has to be made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topkube.job import TrainingJob
from topkube_operator import failures, names, objects, placement, pods
from topkube_operator.failures import Attempt
from topkube_operator.observed import Child, Observed, Pod, comparable, satisfies
from topkube_operator.status import Record

Stage = list[dict[str, Any]]


@dataclass(frozen=True)
class Making:
    """What starts an attempt: manifests in stages, and the pods that are of no use any more."""

    stages: list[Stage]
    outdated: tuple[Pod, ...]


def current(job: TrainingJob, record: Record, observed: Observed) -> Attempt:
    """The attempt whose number is in the status. Of several pods of a worker the newest counts."""
    number = record.attempt
    launcher = next((pod for pod in observed.pods if launches(pod, number)), None)
    count = launcher.workers if launcher is not None and launcher.workers else job.spec.workers
    newest: dict[int, Pod] = {}
    for pod in observed.pods:
        if pod.role == names.WORKER and 0 <= pod.index < count and pod.attempt <= number:
            known = newest.get(pod.index)
            if known is None or pod.attempt > known.attempt:
                newest[pod.index] = pod
    return Attempt(
        number,
        launcher,
        tuple(newest.get(index) for index in range(count)),
        tuple(
            newest[index].name if index in newest else names.worker_name(job.name, index, number)
            for index in range(count)
        ),
    )


def launches(pod: Pod, number: int) -> bool:
    """Whether the pod holds the launcher of this attempt."""
    return pod.attempt == number and (pod.role == names.LAUNCHER or (pod.role == names.WORKER and pod.workers > 0))


def create(job: TrainingJob, uid: str, record: Record, observed: Observed) -> Making:
    """The way from what there is to all pods of the current attempt. The launcher comes last: where it exists, all
    others have been made. Raises JobError for templates that no pod can be made from."""
    number, colocate = record.attempt, job.spec.launcher.colocate
    service = observed.children.get(("Service", job.name))
    address = str(service.content.get("clusterIP") or "") if service else ""
    kept = _kept(job, record, observed, address or _known_address(observed))
    workers = [(index, kept[index].attempt if index in kept else number) for index in range(job.spec.workers)]
    stages = _surroundings(job, uid, number, workers, observed)
    if address:
        missing = [index for index in range(job.spec.workers) if index not in kept and not (colocate and index == 0)]
        there = {pod.name for pod in observed.pods}
        stage = [
            objects.adopted(pods.worker(job, uid, index, number, address, observed.policy, observed.warm), job, uid)
            for index in missing
            if names.worker_name(job.name, index, number) not in there
        ]
        if colocate:
            head = pods.colocated(job, uid, number, workers, observed.policy, observed.warm)
        else:
            head = pods.launcher(job, uid, number, workers, observed.policy)
        stages += [stage, [objects.adopted(head, job, uid)]]
    names_kept = {pod.name for pod in kept.values()}
    useless = [pod for pod in observed.pods if pod.name not in names_kept and not launches(pod, number)]
    return Making(stages, tuple(useless))


def surroundings(job: TrainingJob, uid: str, attempt: Attempt, observed: Observed) -> list[Stage]:
    """What a running attempt lacks besides pods."""
    workers = [(index, pod.attempt) for index, pod in enumerate(attempt.workers) if pod is not None]
    return _surroundings(job, uid, attempt.number, workers, observed)


def _surroundings(
    job: TrainingJob, uid: str, number: int, workers: Sequence[tuple[int, int]], observed: Observed
) -> list[Stage]:
    key = ("Service", job.name)
    service, address = observed.children.get(key), _known_address(observed)
    trouble = observed.troubles.get(key)
    if service is not None or (trouble is not None and trouble.reason == "Refused"):
        address = ""  # it cannot be moved; or somebody else has the address by now
    wanted = [
        objects.secret(job, uid, workers, observed.policy),
        objects.service(job, uid, number, address),
        *objects.network_policies(job, uid, observed.policy),
    ]
    if observed.policy.gang and placement.wants_gang(job):
        wanted.append(objects.pod_group(job, uid, observed.policy.gang))
    return [[manifest for manifest in wanted if not _is_there(manifest, observed)]]


def _is_there(manifest: dict[str, Any], observed: Observed) -> bool:
    kind = manifest["kind"]
    found: Child | None = observed.children.get((kind, manifest["metadata"]["name"]))
    return found is not None and satisfies(found.content, comparable(kind, manifest))


def _known_address(observed: Observed) -> str:
    """The Service's address that living workers were told: a Service made anew has to take it again."""
    found = [pod for pod in observed.pods if pod.launcher_address and failures.living(pod, observed)]
    return max(found, key=lambda pod: pod.attempt).launcher_address if found else ""


def _kept(job: TrainingJob, record: Record, observed: Observed, address: str) -> dict[int, Pod]:
    """The workers that are part of the attempt as they are, by index."""
    shape, lost = pods.shape(job), _lost(record)
    kept: dict[int, Pod] = {}
    for pod in observed.pods:
        if pod.role != names.WORKER or not 0 <= pod.index < job.spec.workers or pod.attempt > record.attempt:
            continue
        if job.spec.launcher.colocate and pod.index == 0:
            continue
        if pod.attempt == record.attempt:
            kept[pod.index] = pod
        elif pod.index not in kept or kept[pod.index].attempt < pod.attempt:
            usable = pod.shape == shape and pod.launcher_address == address and pod.name not in lost
            if usable and failures.living(pod, observed):
                kept[pod.index] = pod
    return kept


def _lost(record: Record) -> tuple[str, ...]:
    """Pods that the last failure declared useless, though they look alive."""
    failure = record.first_failure or {}
    if failure.get("reason") in failures.LOST_REASONS:
        return (str(failure.get("pod")),)
    return ()
