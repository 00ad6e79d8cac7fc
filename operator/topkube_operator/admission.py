"""What is refused when a TrainingJob is created or changed, and what is only warned of. Pure: plain data in and out.

The webhook answers the API server with `review`. Where no webhook is installed, or did not answer, the reconciler calls
`refusal` on the stored object and writes the same words into its Failed condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.changes import change_problems
from topkube.job.spec import Aggregation
from topkube.job.template import worker_container

# Of an object's metadata, what people write; the rest is Kubernetes' own and differs between its versions.
_WRITTEN = ("name", "namespace", "labels", "annotations")
_LONGEST_WARNING = 256  # Kubernetes cuts what is longer
_SHORT_GRACE = 15
_DENSE = ("dense", "flat", "hierarchical", "torus2d")


Claim = Callable[[str, str], Mapping[str, Any] | None]
"""Looks up a PersistentVolumeClaim by namespace and name; None where it cannot be had."""


def review(request: Mapping[str, Any], claim: Claim = lambda namespace, name: None) -> dict[str, Any]:
    """The answer to an AdmissionReview (admission.k8s.io/v1). The same for a dry run: nothing is written here."""
    asked = request["request"]
    job, old = asked.get("object"), asked.get("oldObject")
    response: dict[str, Any] = {"uid": asked["uid"], "allowed": True}
    if asked.get("operation") in ("CREATE", "UPDATE") and isinstance(job, Mapping) and not _untouched(job, old):
        text = refusal(job, old)
        if text:  # as a bad request: of an invalid one kubectl shows no message
            response |= {"allowed": False, "status": {"code": 400, "reason": "BadRequest", "message": text}}
        else:
            found = TrainingJob.parse(_written(job))
            texts = [*warnings(found), *_of_the_claim(found, str(asked.get("namespace") or ""), claim)]
            response["warnings"] = [text[:_LONGEST_WARNING] for text in texts]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def refusal(job: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> str:
    """All that is wrong with a job as a cluster holds it, one line per mistake; empty where nothing is.

    `old` is what it was before a change: what may not change is then a mistake too. An `old` that is itself invalid
    (made before this version) may become anything valid.
    """
    try:
        new = TrainingJob.parse(_written(job))
    except JobError as error:
        return str(error)
    if old is None:
        return ""
    try:
        before = TrainingJob.from_cluster(_written(old))
    except JobError:
        return ""
    return change_refusal(change_problems(before.spec, new.spec))


def change_refusal(problems: Sequence[str]) -> str:
    """The words of a refused change; empty where there are no problems."""
    return str(JobError("this cannot be changed in a job that exists", problems)) if problems else ""


def _untouched(job: Mapping[str, Any], old: Any) -> bool:
    """Finalizers, labels and owners can be changed on an object that is no longer valid: it must be deletable."""
    return isinstance(old, Mapping) and job.get("spec") == old.get("spec")


def _written(job: Mapping[str, Any]) -> dict[str, Any]:
    metadata = job.get("metadata")
    if isinstance(metadata, Mapping):
        metadata = {key: value for key, value in metadata.items() if key in _WRITTEN}
    rest = {key: value for key, value in job.items() if key not in ("metadata", "status")}
    return {**rest, "metadata": metadata}


def warnings(job: TrainingJob) -> list[str]:
    """What is allowed and rarely meant, one sentence each."""
    return [*_of_the_template(job), *_of_the_exchange(job), *_of_the_rest(job)]


def _of_the_template(job: TrainingJob) -> Iterator[str]:
    template = job.spec.template
    pod: Any = template["spec"]
    for index, container in enumerate(pod["containers"]):
        image = str(container.get("image", ""))
        tag = image.rsplit("/", 1)[-1].partition("@")[0].partition(":")[2]
        if image and "@" not in image and tag in ("", "latest"):
            yield (
                f"spec.template.spec.containers[{index}].image: {image} may be another image after a restart: "
                "name a version"
            )
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"spec.template.spec.restartPolicy: {pod['restartPolicy']} has no effect: the operator restarts workers"
    if pod.get("hostNetwork"):
        yield "spec.template.spec.hostNetwork: no NetworkPolicy protects MPI's ports on the node's own address"
    if worker_container(template).get("livenessProbe"):
        yield "spec.template: a livenessProbe that kills one worker ends the attempt of all of them"


def _of_the_exchange(job: TrainingJob) -> Iterator[str]:
    aggregation = job.spec.aggregation
    sparse = aggregation.algorithm in ("naive", "hitopk")
    if sparse and job.spec.workers == 1:
        yield f"spec.aggregation.algorithm: {aggregation.algorithm} with one worker loses entries and saves no traffic"
    elif sparse and aggregation.density > 0.25:
        yield (
            f"spec.aggregation.density: {aggregation.density:g} with indices is about as much traffic as dense: "
            "use dense, or 0.01"
        )
    elif aggregation.algorithm in _DENSE and aggregation.density != Aggregation().density:
        yield f"spec.aggregation.density: has no effect: {aggregation.algorithm} sends everything"


def _of_the_rest(job: TrainingJob) -> Iterator[str]:
    spec, pods = job.spec, job.spec.workers + (0 if job.spec.launcher.colocate else 1)
    least = spec.run_policy.scheduling_policy.min_available
    if least is not None and least < pods:
        yield (
            f"spec.runPolicy.schedulingPolicy.minAvailable: ranks start when all {pods} pods run; {least} of them hold "
            "their nodes while they wait for the rest"
        )
    template: Any = spec.template
    grace = template["spec"].get("terminationGracePeriodSeconds")
    if spec.checkpoint and isinstance(grace, int) and grace < _SHORT_GRACE:
        yield (
            f"spec.template.spec.terminationGracePeriodSeconds: {grace} s are little for the checkpoint that is taken "
            "when a node is drained"
        )
    if spec.run_policy.ttl_seconds_after_finished == 0:
        yield "spec.runPolicy.ttlSecondsAfterFinished: 0 deletes the job, its status and its logs the moment it ends"
    if spec.dataset and spec.dataset.cache.medium == "Memory" and spec.dataset.cache.memory_limit is None:
        yield "spec.dataset.cache.memoryLimit: without it the cache may take all the memory that the pod is allowed"
    if spec.workers >= 8 and spec.checkpoint is None:  # one of many pods ends sooner or later
        yield "spec.checkpoint: without it every restart begins at step 0"


def _of_the_claim(job: TrainingJob, namespace: str, claim: Claim) -> Iterator[str]:
    """A checkpoint on a volume that only one node can mount keeps all workers but one from starting."""
    spec = job.spec
    if spec.checkpoint is None or spec.workers == 1:
        return
    found = claim(namespace, spec.checkpoint.claim_name)
    modes = ((found or {}).get("spec") or {}).get("accessModes") or []
    if modes and "ReadWriteMany" not in modes:
        where = f"{spec.workers} nodes" if spec.spread == "Node" else "several nodes"
        yield (
            f"spec.checkpoint.claimName: {spec.checkpoint.claim_name} is {', '.join(map(str, modes))}, and the "
            f"workers may be on {where}: they need ReadWriteMany"
        )
