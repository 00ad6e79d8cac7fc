"""The pods of the current attempt: which pods exist, which pods are kept, and what must be made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topkube.job import TrainingJob
from topkube.job.fields.failure_policy import PENDING_TIMEOUT
from topkube.job.status import MOST_LOST_WORKERS
from topkube_operator.children import avoidance, objects, placement, pod_sets, pods, workloads
from topkube_operator.model import names
from topkube_operator.model.observed import Child, Observed, Pod, satisfies, select_compared_content
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning.causes.failures import AttemptPods
from topkube_operator.planning.causes.pod_failures import is_reusable

Stage = list[dict[str, Any]]


@dataclass(frozen=True)
class Creation:
    """The start of an attempt: manifests in stages, and the pods to delete because the attempt does not use them."""

    stages: list[Stage]
    outdated: tuple[Pod, ...]


def find_current_pods(job: str, uid: str, workers: int, draft: StatusDraft, observed: Observed) -> AttemptPods:
    """Return the pods of the attempt whose number is in the status. If a worker has several pods, the newest counts.
    `job` is the name of the job. Without a launcher, the attempt has `workers` workers."""
    number = draft.attempt
    launcher = next((pod for pod in observed.pods if pod.is_launcher_of(number)), None)
    count = launcher.workers if launcher is not None and launcher.workers else workers
    newest: dict[int, Pod] = {}

    def compute_preference(pod: Pod) -> tuple[bool, int]:
        """Prefer pods that are not newer than the launcher. A newer worker comes from a late call of a former leader
        and does not belong to the launcher."""
        return launcher is None or pod.created <= launcher.created, pod.attempt

    for pod in observed.pods:
        if pod.role == names.WORKER and 0 <= pod.index < count and pod.attempt <= number:
            current = newest.get(pod.index)
            if current is None or compute_preference(pod) > compute_preference(current):
                newest[pod.index] = pod
    return AttemptPods(
        number,
        launcher,
        tuple(newest.get(index) for index in range(count)),
        tuple(
            newest[index].name if index in newest else names.name_worker_pod(job, uid, index, number)
            for index in range(count)
        ),
    )


def plan_creation(job: TrainingJob, uid: str, draft: StatusDraft, observed: Observed) -> Creation:
    """Return the manifests that are missing until all pods of the current attempt exist. The launcher comes last: if it
    exists, all other pods have been made. Raises JobError if the templates make no valid pod."""
    number, colocate = draft.attempt, job.spec.launcher.colocate
    service = observed.children.get(("Service", job.name))
    address = str(service.content.get("clusterIP") or "") if service else ""
    kept = _find_kept_workers(job, uid, draft, observed, address or _find_known_address(observed))
    workers = [(index, kept[index].attempt if index in kept else number) for index in range(job.spec.workers)]
    stages = _plan_objects(job, uid, number, workers, observed)
    if address:
        missing = [index for index in range(job.spec.workers) if index not in kept and not (colocate and index == 0)]
        existing = {pod.name for pod in observed.pods}
        stage = [
            pods.build_worker(job, uid, index, number, address, observed.policy, observed.warm)
            for index in missing
            if names.name_worker_pod(job.name, uid, index, number) not in existing
        ]
        if colocate:
            launcher_pod = pods.build_colocated_worker(job, uid, number, workers, observed.policy, observed.warm)
        else:
            launcher_pod = pods.build_launcher(job, uid, number, workers, observed.policy)
        hostnames = [observed.hostnames.get(node, node) for node in _read_avoided_nodes(draft)]
        for pod in (*stage, launcher_pod):
            avoidance.avoid_nodes(pod, hostnames)
        _apply_admission(job, stage, launcher_pod, observed)
        stages += [[objects.add_owner(pod, job, uid) for pod in stage_pods] for stage_pods in (stage, [launcher_pod])]
    kept_names = {pod.name for pod in kept.values()}
    outdated = [pod for pod in observed.pods if pod.name not in kept_names and not pod.is_launcher_of(number)]
    return Creation(stages, tuple(outdated))


def _apply_admission(job: TrainingJob, workers: Stage, launcher_pod: dict[str, Any], observed: Observed) -> None:
    """Place pods as Kueue's admission requires, if Kueue admits the job as a whole."""
    if not placement.is_admitted_as_a_whole(job, observed.policy):
        return
    workload = workloads.find_workload(job, observed)
    assert workload is not None
    for name, set_pods in ((names.WORKER, workers), (names.LAUNCHER, [launcher_pod])):
        for pod in set_pods:
            workloads.apply_admission(pod, name, workload, observed.objects)


def find_replaced_pods(outdated: Sequence[Pod]) -> list[str]:
    """Return the names of replaced pods in a Kueue pod group that still count as running. Kueue deletes a replacement
    that exists beside such a pod."""
    return [pod.name for pod in outdated if pod.pod_group and pod.is_active and (pod.node or pod.deletion is None)]


def plan_objects(job: TrainingJob, uid: str, attempt: AttemptPods, observed: Observed) -> list[Stage]:
    """Return the manifests of the children, other than pods, that a running attempt lacks."""
    workers = [(index, pod.attempt) for index, pod in enumerate(attempt.workers) if pod is not None]
    return _plan_objects(job, uid, attempt.number, workers, observed)


def _plan_objects(
    job: TrainingJob, uid: str, number: int, workers: Sequence[tuple[int, int]], observed: Observed
) -> list[Stage]:
    key = ("Service", job.name)
    service, address = observed.children.get(key), _find_known_address(observed)
    trouble = observed.troubles.get(key)
    if service is not None or (trouble is not None and trouble.reason == "Refused"):
        address = ""  # a Service keeps its address; a refused address may belong to another Service by now
    manifests = [
        objects.build_secret(job, uid, workers, observed.policy),
        objects.build_service(job, uid, number, address),
        *objects.build_network_policies(job, uid, observed.policy),
    ]
    if observed.policy.gang and placement.asks_for_gang(job):
        resources = pod_sets.sum_member_requests(job, uid, observed.policy)
        manifests.append(objects.build_pod_group(job, uid, observed.policy.gang, resources))
    return [[manifest for manifest in manifests if not _is_unchanged(manifest, observed)]]


def _is_unchanged(manifest: dict[str, Any], observed: Observed) -> bool:
    """Return True if a child has the content of its manifest, or must stay unchanged for now."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if (kind, name) in observed.paused:
        return True
    child: Child | None = observed.children.get((kind, name))
    return child is not None and satisfies(child.content, select_compared_content(kind, manifest))


def _find_known_address(observed: Observed) -> str:
    """Return the Service's address that the environment of living workers contains; empty if there is none. A new
    Service must have this address again."""
    living_workers = [pod for pod in observed.pods if pod.launcher_address and is_reusable(pod, observed)]
    return max(living_workers, key=lambda pod: pod.attempt).launcher_address if living_workers else ""


def _find_kept_workers(
    job: TrainingJob, uid: str, draft: StatusDraft, observed: Observed, address: str
) -> dict[int, Pod]:
    """Return the existing workers that stay part of the attempt, by index."""
    shape, lost, left_nodes = (
        pods.hash_worker(job),
        frozenset(draft.lost_workers),
        _find_nodes_to_leave(draft, observed),
    )
    replaces_all = (draft.first_failure or {}).get("reason") == PENDING_TIMEOUT
    replaces_all = replaces_all or len(lost) >= MOST_LOST_WORKERS
    kept: dict[int, Pod] = {}
    for pod in observed.pods:
        if pod.role != names.WORKER or not 0 <= pod.index < job.spec.workers or pod.attempt > draft.attempt:
            continue
        if job.spec.launcher.colocate and pod.index == 0:
            continue
        if pod.attempt == draft.attempt:
            kept[pod.index] = pod
        elif pod.index not in kept or kept[pod.index].attempt < pod.attempt:
            fits = pod.shape == shape and pod.launcher_address == address and pod.index not in lost
            fits = fits and pod.name == names.name_worker_pod(job.name, uid, pod.index, pod.attempt)
            fits = fits and not replaces_all and pod.node not in left_nodes and (bool(pod.node) or not pod.avoids_nodes)
            if fits and is_reusable(pod, observed):
                kept[pod.index] = pod
    return kept


def _read_avoided_nodes(draft: StatusDraft) -> frozenset[str]:
    """Return the nodes on which no pod of the attempt may be."""
    return frozenset(str(entry["name"]) for entry in draft.avoided_nodes)


def _find_nodes_to_leave(draft: StatusDraft, observed: Observed) -> frozenset[str]:
    """Return the avoided nodes on which living workers are replaced: nodes with a fault, and nodes on which this job
    failed. Failures of other jobs are no reason to move a worker that runs."""
    own_nodes = {str(entry["name"]) for entry in draft.node_failures}
    return _read_avoided_nodes(draft) & (own_nodes | observed.node_faults.keys())
