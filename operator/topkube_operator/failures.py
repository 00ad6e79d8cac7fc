"""Why an attempt ended: the first pod or rank that failed, its reason, and whose fault it was. Pure.

A disruption is what the cluster did to the job (preemption, drain, eviction, a lost node, a pod that somebody deleted);
it is not counted against backoffLimit. Everything else is a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from topkube.errors import TopKubeError
from topkube.job import FirstFailure
from topkube.launch import contract
from topkube_operator import names
from topkube_operator.observed import Container, Observed, Pod

# Reasons that kubelets and controllers give for a pod that they ended for the node's sake.
_NODE_REASONS = (
    "Evicted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "NodeAffinity",
    "UnexpectedAdmissionError",
    "Preempting",
    "TaintManagerEviction",
)
# What the DisruptionTarget condition's reasons are called here; the others keep their names.
_DISRUPTIONS = {
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "EvictionByEvictionAPI": "Evicted",
    "DeletionByTaintManager": "Evicted",
    "DeletionByPodGC": "NodeLost",
}
# An eviction with one of these words is for what the pod itself used.
_OWN_FAULT = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
_IMAGE_REASONS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
LOST_REASONS = ("WorkerLost", "RendezvousTimeout")
"""The named pod looks alive and is of no use."""
_ASKED_TO_END = "Terminated"
"""The launcher's word for a worker, or itself, that was sent SIGTERM."""
_FRESH = timedelta(seconds=15)
_SETTLE = timedelta(seconds=5)
_AFTER_DELETION = timedelta(seconds=5)
_AFTER_SUCCESS = timedelta(seconds=60)
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

    def to_status(self) -> dict[str, Any]:
        """status.firstFailure."""
        failure = FirstFailure(
            pod=self.pod or None,
            rank=self.rank,
            reason=self.reason,
            exit_code=self.exit_code,
            message=self.message[:_LONGEST_MESSAGE],
            log_tail=shortened(self.log_tail) or None,
        )
        return failure.model_dump(by_alias=True, exclude_none=True)

    def sentence(self) -> str:
        """For conditions and Events."""
        who = self.pod + (f" (rank {self.rank})" if self.rank is not None else "") if self.pod else ""
        return (f"{who}: " if who else "") + f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class Attempt:
    """The pods of one attempt. `workers`: by index, None where there is none."""

    number: int
    launcher: Pod | None
    workers: tuple[Pod | None, ...]
    names: tuple[str, ...]
    """What the workers are called, also those that are gone."""

    @property
    def launching(self) -> Container:
        """The launcher's container."""
        return self.launcher.launching if self.launcher is not None else Container()


@dataclass(frozen=True)
class Verdict:
    """How an attempt stands. `until`: when to look again, where nothing else would wake us."""

    state: Literal["running", "succeeded", "over"]
    failure: Failure | None = None
    until: datetime | None = None
    ending: contract.Ending | None = None


def judge(attempt: Attempt, observed: Observed, now: datetime) -> Verdict:
    """How an attempt stands whose pods have all been made."""
    launcher, container = attempt.launcher, attempt.launching
    if launcher is None:
        last = next((pod for pod in observed.last.values() if _launched(pod, attempt)), None)
        if last is not None and last.launching.exit_code is not None:  # its pod went before we looked
            return judge(replace(attempt, launcher=last), observed, now)
        return _over(_first_of_workers(attempt, observed, now) or _gone("the launcher", "", observed))
    if container.exit_code is not None:
        ending = ending_of(container)
        if container.exit_code == 0:
            return Verdict("succeeded", ending=ending)
        return _ended(attempt, observed, now, ending)
    if not launcher.active:
        return _over(pod_failure(launcher, observed))
    heard = observed.report is not None and observed.report.attempt == attempt.number
    fresh = heard and observed.report is not None and now - observed.report.heard < _FRESH
    if launcher.node in observed.lost_nodes and not fresh:
        return _over(pod_failure(launcher, observed))
    if launcher.deletion is not None:
        gone = launcher.deletion + _AFTER_DELETION
        return _over(pod_failure(launcher, observed)) if now >= gone else Verdict("running", until=gone)
    running = fresh and observed.report is not None and observed.report.state == "Running"
    dead = list(_dead(attempt, observed, now))
    if dead:
        # The launcher sees more: it says which rank came first. Give it the time to notice.
        if running and all(not pod.over for pod, _, _ in dead if pod) and all(pod for pod, _, _ in dead):
            return Verdict("running", until=now + _FRESH)
        pod, failure, since = min(dead, key=lambda one: one[2])
        wait = timedelta(seconds=observed.policy.verdict_seconds if running else observed.policy.verdict_seconds / 4)
        due = since + (_AFTER_SUCCESS if pod is not None and pod.succeeded else wait)
        return _over(failure) if now >= due else Verdict("running", until=due)
    return _rendezvous(attempt, observed, now)


def ending_of(container: Container) -> contract.Ending | None:
    """The last words of a launcher or worker; None where it had none."""
    if not container.ended_message.lstrip().startswith("{"):
        return None
    try:
        return contract.Ending.read(container.ended_message)
    except TopKubeError:
        return None


def pod_failure(pod: Pod, observed: Observed) -> Failure:
    """Why a pod ended or is useless, from its status alone."""
    container = pod.containers.get(names.LAUNCHER) or pod.container
    if pod.container.exit_code is not None:
        container = pod.container
    where = ""
    if container.exit_code is None and pod.failed_container:
        container, where = pod.containers[pod.failed_container], f"container {pod.failed_container}: "
    ending = ending_of(container)
    known = ending.first_failure if ending else None
    code = container.exit_code
    if _own_eviction(pod):
        return Failure("Evicted", pod.message, pod.name, exit_code=code, at=container.ended)
    disruption = _disruption(pod, observed)
    if disruption:
        reason, message = disruption
        return Failure(reason, message, pod.name, exit_code=code, disruption=True, at=container.ended)
    if container.ended_reason == "OOMKilled" or (ending is not None and ending.oom_kills):
        message = "went over its memory limit and the kernel killed it: raise resources.limits.memory"
        message = where + message if where else f"the container {message}"
        rank = known.rank if known else None
        return Failure("OOMKilled", message, pod.name, rank, code, _tail(known), at=container.ended)
    if known is not None:
        return _known(known, pod.name, container)
    if code is not None:
        reason = container.ended_reason or "Error"
        message = where + (container.ended_message.strip() or exit_words(code))
        return Failure(reason, message, pod.name, exit_code=code, at=container.ended)
    return Failure(pod.reason or "Failed", pod.message or "the pod failed", pod.name, at=container.ended)


def living(pod: Pod, observed: Observed) -> bool:
    """Whether a worker's pod can be part of the next attempt."""
    return not pod.over and pod.deletion is None and pod.node not in observed.lost_nodes


def blocked(pods: Iterable[Pod]) -> tuple[str, str] | None:
    """Why pods that exist do not run yet, as (reason, message): the image, the container's configuration."""
    for pod in pods:
        for name, container in pod.containers.items():
            if container.waiting in _IMAGE_REASONS:
                text = " ".join(f"{pod.name}, container {name}: the image {container.image} cannot be pulled".split())
                detail = container.waiting_message if container.waiting != "ImagePullBackOff" else ""
                return "ImagePullBackOff", f"{text}: {detail}" if detail else text
            if container.waiting in _CONFIG_REASONS:
                return container.waiting, f"{pod.name}, container {name}: {container.waiting_message}"
    return None


def deadline(seconds: int, attempt: Attempt, observed: Observed) -> Failure:
    """The failure of a job whose activeDeadlineSeconds have passed: what it was waiting for, if for anything."""
    pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
    passed = f"activeDeadlineSeconds ({seconds}) have passed"
    found = blocked(pods)
    if found:
        pod = next(pod.name for pod in pods if found[1].startswith(pod.name))
        return Failure(found[0], f"{found[1]}; {passed}", pod)
    waiting = next((pod for pod in pods if pod.unschedulable), None)
    if waiting:
        return Failure(waiting.unscheduled, f"{waiting.unschedulable}; {passed}", waiting.name)
    report = observed.report
    if report is not None and report.attempt == attempt.number and report.state == "Waiting" and report.missing:
        return Failure("RendezvousTimeout", f"{missing_words(attempt, report.missing)}; {passed}")
    return Failure("DeadlineExceeded", passed)


def missing_words(attempt: Attempt, missing: tuple[int, ...]) -> str:
    """Names the workers that have not called."""
    called = [attempt.names[index] for index in missing if index < len(attempt.names)]
    shown = ", ".join(called[:8]) + (f" and {len(called) - 8} more" if len(called) > 8 else "")
    return f"{len(missing)} of {len(attempt.names)} workers have not called the launcher: {shown}"


def exit_words(code: int) -> str:
    """An exit code in words."""
    if code > 128:
        return f"ended by signal {code - 128} (exit code {code})"
    return f"ended with exit code {code}"


def shortened(tail: str) -> str:
    """At most the last 20 lines and 4 KiB of a log."""
    lines = tail.rstrip().splitlines()[-LOG_TAIL_LINES:]
    text = "\n".join(lines).encode()[-LOG_TAIL_BYTES:]
    return text.decode(errors="ignore")


def _ended(attempt: Attempt, observed: Observed, now: datetime, ending: contract.Ending | None) -> Verdict:
    """The verdict on an attempt whose launcher ended with an error."""
    launcher, container = attempt.launcher, attempt.launching
    assert launcher is not None
    ended = container.ended or now
    known = ending.first_failure if ending else None
    disrupted = _first_of_workers(attempt, observed, now, disruptions_only=True)
    if disrupted is None and (launcher.deletion is not None or launcher.disruption):
        disrupted = pod_failure(launcher, observed)
    if disrupted is not None:
        return _over(replace(disrupted, log_tail=disrupted.log_tail or _tail(known), at=ended))
    if known is None:
        earlier = _first_of_workers(attempt, observed, now)
        return _over(replace(earlier or pod_failure(launcher, observed), at=ended))
    failure = _known(known, known.pod or "", container)
    pod = next((pod for pod in attempt.workers if pod is not None and pod.name == known.pod), None)
    if pod is not None and pod.over and not pod.succeeded:
        seen = pod_failure(pod, observed)
        if seen.reason == "OOMKilled" and failure.reason != "OOMKilled":
            failure = replace(failure, reason=seen.reason, message=seen.message, exit_code=seen.exit_code)
        elif failure.rank is None:
            failure = replace(seen, log_tail=seen.log_tail or failure.log_tail, at=ended)
    elif known.reason == _ASKED_TO_END:
        failure = replace(failure, disruption=True, lost=frozenset([pod.name] if pod else []))
    elif pod is not None and known.reason == "WorkerLost":
        # The launcher lost a worker that its kubelet still reports as running. Soon that is known to be dead or its
        # node lost; if not, the network was cut.
        if now < ended + _SETTLE:
            return Verdict("running", until=ended + _SETTLE)
        failure = replace(failure, disruption=True, lost=frozenset([pod.name]))
    return _over(failure)


def _known(known: FirstFailure, pod: str, container: Container) -> Failure:
    return Failure(
        reason=known.reason or container.ended_reason or "Error",
        message=known.message or exit_words(known.exit_code if known.exit_code is not None else 1),
        pod=known.pod or pod,
        rank=known.rank,
        exit_code=known.exit_code,
        log_tail=_tail(known),
        at=container.ended,
    )


def _tail(known: FirstFailure | None) -> str:
    return (known.log_tail if known else None) or ""


def _dead(attempt: Attempt, observed: Observed, now: datetime) -> Iterator[tuple[Pod | None, Failure, datetime]]:
    """The workers that will not come back, with why and since when."""
    for name, pod in zip(attempt.names, attempt.workers, strict=True):
        if pod is None:
            yield (
                None,
                _gone(name, name, observed),
                observed.gone.get(name, datetime.min.replace(tzinfo=now.tzinfo)),
            )
        elif pod.over:
            # A pod that its node ended has no time of its end, and its reason says it all.
            yield pod, pod_failure(pod, observed), pod.container.ended or datetime.min.replace(tzinfo=now.tzinfo)
        elif pod.node in observed.lost_nodes:
            yield pod, pod_failure(pod, observed), datetime.min.replace(tzinfo=now.tzinfo)
        elif pod.deletion is not None and now >= pod.deletion + _AFTER_DELETION:
            yield pod, pod_failure(pod, observed), pod.deletion


def _first_of_workers(
    attempt: Attempt, observed: Observed, now: datetime, *, disruptions_only: bool = False
) -> Failure | None:
    """The earliest failure among the workers' pods; with `disruptions_only`, those also that are under way."""
    found: list[tuple[datetime, Failure]] = []
    for name, pod in zip(attempt.names, attempt.workers, strict=True):
        if pod is None:
            found.append((observed.gone.get(name, now), _gone(name, name, observed)))
        elif _disruption(pod, observed) or (pod.over and not pod.succeeded):
            found.append((pod.container.ended or now, pod_failure(pod, observed)))
    if disruptions_only:
        found = [one for one in found if one[1].disruption]
    return min(found, key=lambda one: one[0])[1] if found else None


def _disruption(pod: Pod, observed: Observed) -> tuple[str, str] | None:
    """What the cluster did to a pod, as (reason, message)."""
    if pod.reason in _NODE_REASONS or pod.reason.startswith("OutOf"):
        return pod.reason, pod.message or pod.disruption_message or f"ended by its node: {pod.reason}"
    if pod.disruption:
        words = pod.message or pod.disruption_message or f"the cluster took the pod away ({pod.disruption})"
        return _DISRUPTIONS.get(pod.disruption, pod.disruption), words
    if pod.node in observed.lost_nodes and not pod.over:
        return "NodeLost", f"its node, {pod.node}, is lost"
    if pod.deletion is not None:
        return "Deleted", "the pod was deleted: a drain, a preemption, or by hand"
    return None


def _own_eviction(pod: Pod) -> bool:
    return pod.reason == "Evicted" and any(words in pod.message for words in _OWN_FAULT)


def _launched(pod: Pod, attempt: Attempt) -> bool:
    return pod.attempt == attempt.number and (pod.role == names.LAUNCHER or pod.workers > 0)


def _gone(what: str, name: str, observed: Observed) -> Failure:
    """The failure of a pod that is not there any more: what was seen of it last, where that says something."""
    last = observed.last.get(name)
    if last is not None and (_disruption(last, observed) or (last.over and not last.succeeded)):
        return replace(pod_failure(last, observed), at=observed.gone.get(name))
    words = f"{what}: the pod is gone: a drain, a preemption, or by hand"
    return Failure("Deleted", words, name, disruption=True, at=observed.gone.get(name))


def _over(failure: Failure) -> Verdict:
    return Verdict("over", failure)


def _rendezvous(attempt: Attempt, observed: Observed, now: datetime) -> Verdict:
    """Ends an attempt whose workers all run but do not all call."""
    report = observed.report
    if report is None or report.attempt != attempt.number or report.state != "Waiting" or not report.missing:
        return Verdict("running")
    starts = [attempt.launching.started, *(pod.container.started if pod else None for pod in attempt.workers)]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return Verdict("running")
    due = max(known) + timedelta(seconds=observed.policy.rendezvous_seconds)
    if now < due:
        return Verdict("running", until=due)
    index = report.missing[0]
    seconds = f"{observed.policy.rendezvous_seconds:g} seconds after all pods had started"
    pod = attempt.names[index] if index < len(attempt.names) else ""
    lost = frozenset(attempt.names[index] for index in report.missing if index < len(attempt.names))
    return _over(
        Failure("RendezvousTimeout", f"{missing_words(attempt, report.missing)}, {seconds}", pod, lost=lost, at=due)
    )
