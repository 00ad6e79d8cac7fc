"""The refusals and warnings when a TrainingJob is created or changed. Pure: plain data in and out.

The webhook answers the API server with `review`. If no webhook is installed, or the webhook did not answer, the planner
calls `explain_refusal` on the stored object and writes the same message into the job's Failed condition.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from topkube.algorithms import DENSITY, compresses, reads_density
from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.algorithm_name import is_foreign
from topkube.job.changes import find_refused_changes
from topkube.job.fields.failure_policy import USUAL_REASONS
from topkube.job.template import find_worker_container
from topkube_operator.model import names

# The part of the metadata that people write. The rest belongs to Kubernetes and differs between its versions.
_WRITTEN_BY_USERS = ("name", "namespace", "labels", "annotations")
_LONGEST_WARNING = 256  # Kubernetes truncates longer warnings
_SHORT_GRACE = 15
_REASONS = {reason.lower(): reason for reason in USUAL_REASONS}


ReadClaim = Callable[[str, str], Mapping[str, Any] | None]
"""Reads a PersistentVolumeClaim by namespace and name. Returns None if that fails."""


def review(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to an AdmissionReview (admission.k8s.io/v1).

    A dry run gets the same answer, because a review writes nothing. It also reads nothing from the cluster, so a caller
    learns nothing except about the request itself.
    """
    admission_request = request["request"]
    if not isinstance(admission_request["uid"], str):
        raise TypeError("uid is not text")
    job, old = admission_request.get("object"), admission_request.get("oldObject")
    response: dict[str, Any] = {"uid": admission_request["uid"], "allowed": True}
    is_write = admission_request.get("operation") in ("CREATE", "UPDATE")
    if is_write and isinstance(job, Mapping) and not _has_same_spec(job, old):
        text = explain_refusal(job, old)
        if text:  # kubectl shows the message of a bad request, but not of an invalid object
            response |= {"allowed": False, "status": {"code": 400, "reason": "BadRequest", "message": text}}
        else:
            texts = list_warnings(TrainingJob.parse(_select_user_fields(job)))
            response["warnings"] = [text[:_LONGEST_WARNING] for text in texts]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def explain_refusal(job: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> str:
    """Return all mistakes in a stored job, one line per mistake; empty if there are none.

    `old` is the job before a change. A forbidden change is then a mistake too. An `old` that is itself invalid (created
    before this version) may be changed to any valid job.
    """
    try:
        new = TrainingJob.parse(_select_user_fields(job))
    except JobError as error:
        return str(error)
    if old is None:
        return ""
    try:
        before = TrainingJob.from_cluster(_select_user_fields(old))
    except JobError:
        return ""
    return explain_change_refusal(find_refused_changes(before.spec, new.spec))


def explain_change_refusal(problems: Sequence[str]) -> str:
    """Return the message about a forbidden change; empty if there are no problems."""
    return str(JobError("this cannot be changed in a job that exists", problems)) if problems else ""


def _has_same_spec(job: Mapping[str, Any], old: Any) -> bool:
    """Return True if only metadata changes. That is allowed for invalid objects too: they must be deletable."""
    return isinstance(old, Mapping) and job.get("spec") == old.get("spec")


def _select_user_fields(job: Mapping[str, Any]) -> dict[str, Any]:
    metadata = job.get("metadata")
    if isinstance(metadata, Mapping):
        metadata = {key: value for key, value in metadata.items() if key in _WRITTEN_BY_USERS}
    other_fields = {key: value for key, value in job.items() if key not in ("metadata", "status")}
    return {**other_fields, "metadata": metadata}


def list_warnings(job: TrainingJob) -> list[str]:
    """Return a sentence for each choice that is allowed but probably a mistake."""
    return [
        *_warn_of_template(job),
        *_warn_of_aggregation(job),
        *_warn_of_failure_policy(job),
        *_warn_of_other_fields(job),
    ]


def _warn_of_template(job: TrainingJob) -> Iterator[str]:
    template = job.spec.template
    pod: Any = template["spec"]
    for index, container in enumerate(pod["containers"]):
        image = str(container.get("image", ""))
        tag = image.rsplit("/", 1)[-1].partition("@")[0].partition(":")[2]
        if image and "@" not in image and tag in ("", "latest"):
            yield (
                f"spec.template.spec.containers[{index}].image: {image} may name another image after a restart: "
                "use a fixed version"
            )
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"spec.template.spec.restartPolicy: {pod['restartPolicy']} has no effect: the operator restarts workers"
    worker = find_worker_container(template)
    for field in ("restartPolicy", "restartPolicyRules"):
        if worker.get(field) is not None:
            yield f"spec.template: {field} of the worker's container has no effect: the operator restarts workers"
    if pod.get("hostNetwork"):
        yield "spec.template.spec.hostNetwork: no NetworkPolicy protects the ranks' ports on the node's own address"
    if worker.get("livenessProbe"):
        yield "spec.template: if a livenessProbe kills a worker, the attempt of all workers ends"


def _warn_of_aggregation(job: TrainingJob) -> Iterator[str]:
    aggregation = job.spec.aggregation
    if is_foreign(aggregation.algorithm):
        yield (
            f"spec.aggregation.algorithm: {aggregation.algorithm} is not known here: the workers' image must have its "
            "package, or the ranks fail when they start"
        )
        return
    stages = [aggregation.algorithm, *(stage.algorithm for stage in aggregation.schedule if stage.algorithm)]
    if compresses(aggregation.algorithm) and job.spec.workers == 1:
        yield f"spec.aggregation.algorithm: {aggregation.algorithm} with one worker loses values and saves no traffic"
    elif reads_density(aggregation.algorithm) and aggregation.density > 0.25:
        yield (
            f"spec.aggregation.density: {aggregation.density:g} with indices is about as much traffic as dense: "
            "use dense, or 0.01"
        )
    elif not any(map(reads_density, stages)) and aggregation.density != DENSITY.default:
        yield f"spec.aggregation.density: has no effect: {aggregation.algorithm} has no density"


def _warn_of_failure_policy(job: TrainingJob) -> Iterator[str]:
    for index, rule in enumerate(job.spec.run_policy.failure_policy.rules):
        for reason in rule.on_reasons or ():
            similar_reasons = difflib.get_close_matches(reason.lower(), _REASONS, 1, 0.8)
            if similar_reasons and reason != _REASONS[similar_reasons[0]]:
                yield (
                    f"spec.runPolicy.failurePolicy.rules[{index}].onReasons: {reason} is not a usual reason; "
                    f"did you mean {_REASONS[similar_reasons[0]]}?"
                )


def _warn_of_other_fields(job: TrainingJob) -> Iterator[str]:
    spec, pods = job.spec, job.spec.workers + (0 if job.spec.launcher.colocate else 1)
    min_available = spec.run_policy.scheduling_policy.min_available
    if min_available is not None and min_available < pods:
        yield (
            f"spec.runPolicy.schedulingPolicy.minAvailable: ranks start when all {pods} pods run; {min_available} pods "
            "hold their nodes while they wait for the others"
        )
    template: Any = spec.template
    grace = template["spec"].get("terminationGracePeriodSeconds")
    if spec.checkpoint and isinstance(grace, int) and grace < _SHORT_GRACE:
        yield (
            f"spec.template.spec.terminationGracePeriodSeconds: {grace} s may be too short for the checkpoint that is "
            "saved when a node is drained"
        )
    if spec.run_policy.ttl_seconds_after_finished == 0:
        yield "spec.runPolicy.ttlSecondsAfterFinished: 0 deletes the job, its status and its logs as soon as it ends"
    unpinned = [line for line in spec.setup.requirements if not _is_pinned(line)] if spec.setup else []
    if unpinned:
        yield (
            f"spec.setup.requirements: {', '.join(unpinned)[:100]}: pods may install different versions, also after a "
            "restart: write ==VERSION"
        )
    if spec.dataset and spec.dataset.cache.medium == "Memory" and spec.dataset.cache.memory_limit is None:
        yield "spec.dataset.cache.memoryLimit: without a limit the cache may use all the memory of the pod"
    check = job.metadata.annotations.get(names.CHECK_ADDRESS, "true")
    if check not in ("true", "false"):
        yield f'metadata.annotations["{names.CHECK_ADDRESS}"]: {check[:20]!r} has no effect: use "true" or "false"'
    if spec.workers >= 8 and spec.checkpoint is None:  # among many pods, some will end early
        yield "spec.checkpoint: without a checkpoint every restart begins at step 0"


def _is_pinned(requirement: str) -> bool:
    """Return True if a requirement of pip allows one version only, or names an address."""
    return "==" in requirement.partition(";")[0] or " @ " in requirement


def warn_of_claim(job: TrainingJob, read_claim: ReadClaim) -> str:
    """Return a warning if only one node can mount the checkpoint's claim; empty if there is no problem.

    The operator writes the warning as an Event on the stored job, in the job's own namespace. The webhook must not
    check claims: it would answer questions about any namespace's claims, with the operator's rights.
    """
    spec, namespace = job.spec, job.metadata.namespace
    if spec.checkpoint is None or spec.workers == 1 or namespace is None:
        return ""
    stored = read_claim(namespace, spec.checkpoint.claim_name)
    modes = ((stored or {}).get("spec") or {}).get("accessModes") or []
    if modes and "ReadWriteMany" not in modes:
        nodes = f"{spec.workers} nodes" if spec.spread == "Node" else "several nodes"
        return (
            f"spec.checkpoint.claimName: {spec.checkpoint.claim_name} is {', '.join(map(str, modes))}, "
            f"but the workers may be on {nodes}: they need ReadWriteMany"
        )
    return ""
