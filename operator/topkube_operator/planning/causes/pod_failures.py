"""Why one pod ended, failed or does not start: the reason, the message, and whether the cluster caused it. Pure.

A disruption is something that the cluster did to the job (preemption, drain, eviction, a lost node, a pod that somebody
deleted). Disruptions do not count against backoffLimit. Everything else is a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from topkube.errors import TopKubeError
from topkube.job import FirstFailure
from topkube.launch import contract
from topkube_operator.model import names
from topkube_operator.model.observed import Container, Observed, Pod

# The reasons that kubelets and controllers set on a pod that they end because of the node.
_NODE_REASONS = (
    "Evicted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "NodeAffinity",
    "UnexpectedAdmissionError",
    "TopologyAffinityError",
    "Preempting",
    "TaintManagerEviction",
)
_LOST_CONTAINER_REASONS = ("ContainerStatusUnknown", "Unknown")
"""The reasons of a container that ended without its kubelet, such as at a restart of the node. The kubelet did not find
the container again (137), or containerd did not find its process (255)."""
# Our names for reasons of the DisruptionTarget condition. Other reasons keep their names.
_DISRUPTIONS = {
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "EvictionByEvictionAPI": "Evicted",
    "DeletionByTaintManager": "Evicted",
    "DeletionByPodGC": "NodeLost",
}
# Parts of the message of an eviction that the pod caused by its own use of resources.
_OWN_FAULT = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
_IMAGE_REASONS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_CRASHES = "CrashLoopBackOff"
"""The reason of a native sidecar (an init container with restartPolicy Always). Nothing else in a pod starts again."""
FIRST_SIGNAL = 128
"""An exit code above this number means that a signal (the difference) ended the process."""
LOG_TAIL_BYTES, LOG_TAIL_LINES = 4096, 20
_LONGEST_MESSAGE = 2048


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt."""

    reason: str
    message: str
    pod: str = ""
    rank: int | None = None
    exit_code: int | None = None
    log_tail: str = ""
    disruption: bool = False
    lost: frozenset[str] = frozenset()
    """Pods to replace although they look alive."""
    at: datetime | None = None
    node: str = ""

    def to_status(self) -> dict[str, Any]:
        """Return the failure as `status.firstFailure`."""
        failure = FirstFailure(
            pod=self.pod or None,
            node=self.node or None,
            rank=self.rank,
            reason=self.reason,
            exit_code=self.exit_code,
            message=self.message[:_LONGEST_MESSAGE],
            log_tail=shorten_log(self.log_tail) or None,
        )
        return failure.model_dump(by_alias=True, exclude_none=True)

    def describe(self) -> str:
        """Return the failure as a sentence for conditions and Events."""
        subject = self.pod + (f" (rank {self.rank})" if self.rank is not None else "") if self.pod else ""
        return (f"{subject}: " if subject else "") + f"{self.reason}: {self.message}"


def read_ending(container: Container) -> contract.Ending | None:
    """Return the termination message of a launcher or worker; None if the container left none."""
    if not container.ended_message.lstrip().startswith("{"):
        return None
    try:
        return contract.Ending.read(container.ended_message)
    except TopKubeError:
        return None


def find_pod_failure(pod: Pod, observed: Observed) -> Failure:
    """Return why a pod ended or is useless, from its status alone."""
    container = pod.containers.get(names.LAUNCHER) or pod.container
    if pod.container.exit_code is not None:
        container = pod.container
    prefix = ""
    if container.exit_code is None and pod.failed_container:
        container, prefix = pod.containers[pod.failed_container], f"container {pod.failed_container}: "
    ending = read_ending(container)
    reported = ending.first_failure if ending else None
    code = container.exit_code
    if _is_own_eviction(pod):
        return Failure("Evicted", pod.message, pod.name, exit_code=code, at=container.ended)
    disruption = find_disruption(pod, observed)
    if disruption:
        reason, message = disruption
        return Failure(reason, message, pod.name, exit_code=code, disruption=True, at=container.ended)
    if container.ended_reason == "OOMKilled" or (ending is not None and ending.oom_kills):
        message = "exceeded its memory limit and the kernel killed it: raise resources.limits.memory"
        message = prefix + message if prefix else f"the container {message}"
        rank = reported.rank if reported else None
        return Failure("OOMKilled", message, pod.name, rank, code, read_log_tail(reported), at=container.ended)
    if reported is not None:
        return read_reported_failure(reported, pod.name, container)
    if code is not None:
        reason = container.ended_reason or "Error"
        message = prefix + (container.ended_message.strip() or describe_exit_code(code))
        return Failure(reason, message, pod.name, exit_code=code, at=container.ended)
    return Failure(pod.reason or "Failed", pod.message or "the pod failed", pod.name, at=container.ended)


def build_removed_pod_failure(subject: str, name: str, observed: Observed) -> Failure:
    """Return the failure of the removed pod `name`: its last known state if that explains the end, or a deletion.
    The message of a deletion begins with `subject`."""
    last = observed.last_seen.get(name)
    if last is not None and (find_disruption(last, observed) or (last.has_ended and not last.has_succeeded)):
        return replace(find_pod_failure(last, observed), at=observed.removed_at.get(name))
    message = f"{subject}: the pod was removed: a drain, a preemption, or by hand"
    return Failure("Deleted", message, name, disruption=True, at=observed.removed_at.get(name))


def read_reported_failure(reported: FirstFailure, pod: str, container: Container) -> Failure:
    """Return the failure that a launcher or worker reported. `pod` names the pod if the report does not."""
    code = reported.exit_code if reported.exit_code is not None else 1
    return Failure(
        reason=reported.reason or container.ended_reason or "Error",
        message=reported.message or describe_exit_code(code),
        pod=reported.pod or pod,
        rank=reported.rank,
        exit_code=reported.exit_code,
        log_tail=read_log_tail(reported),
        at=container.ended,
    )


def read_log_tail(reported: FirstFailure | None) -> str:
    """Return the log tail in a report; empty if there is none."""
    return (reported.log_tail if reported else None) or ""


def find_disruption(pod: Pod, observed: Observed) -> tuple[str, str] | None:
    """Return what the cluster did to a pod as (reason, message); None if the cluster did nothing."""
    if pod.reason in _NODE_REASONS or pod.reason.startswith("OutOf"):
        return pod.reason, pod.message or pod.disruption_message or f"its node ended the pod: {pod.reason}"
    if pod.disruption:
        message = pod.message or pod.disruption_message or f"the cluster took the pod away ({pod.disruption})"
        return _DISRUPTIONS.get(pod.disruption, pod.disruption), message
    if pod.node in observed.lost_nodes and not pod.has_ended:
        return "NodeLost", f"its node, {pod.node}, is lost"
    if pod.deletion is not None:
        return "Deleted", "the pod was deleted: a drain, a preemption, or by hand"
    if pod.container.ended_reason in _LOST_CONTAINER_REASONS:
        return "NodeLost", f"its node, {pod.node}, lost the container, as at a restart of the node"
    return None


def find_blocked_container(pods: Iterable[Pod]) -> tuple[str, str] | None:
    """Return why existing pods do not run, as (reason, message): an image, a container's configuration, or a native
    sidecar that ends before the ranks may start. None if no container is blocked."""
    for pod in pods:
        for name, container in pod.containers.items():
            if container.waiting in _IMAGE_REASONS:
                text = " ".join(f"{pod.name}, container {name}: the image {container.image} cannot be pulled".split())
                detail = container.waiting_message if container.waiting != "ImagePullBackOff" else ""
                return "ImagePullBackOff", f"{text}: {detail}" if detail else text
            is_crashing = container.waiting == _CRASHES and pod.container.started is None
            if container.waiting in _CONFIG_REASONS or is_crashing:
                return container.waiting, f"{pod.name}, container {name}: {container.waiting_message}"
    return None


def is_reusable(pod: Pod, observed: Observed) -> bool:
    """Return True if a worker's pod can be part of the next attempt."""
    return not pod.has_ended and pod.deletion is None and pod.node not in observed.lost_nodes


def describe_exit_code(code: int) -> str:
    """Return an exit code as text."""
    if code > FIRST_SIGNAL:
        return f"ended by signal {code - FIRST_SIGNAL} (exit code {code})"
    return f"ended with exit code {code}"


def shorten_log(tail: str) -> str:
    """Return at most the last 20 lines and 4 KiB of a log."""
    lines = tail.rstrip().splitlines()[-LOG_TAIL_LINES:]
    text = "\n".join(lines).encode()[-LOG_TAIL_BYTES:]
    return text.decode(errors="ignore")


def _is_own_eviction(pod: Pod) -> bool:
    return pod.reason == "Evicted" and any(phrase in pod.message for phrase in _OWN_FAULT)
