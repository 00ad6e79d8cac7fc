"""Why an attempt ended: the first pod or rank that failed, its reason, and whether the cluster caused it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from topkube.job import FirstFailure
from topkube.launch import contract
from topkube_operator.model.observed import Container, Observed, Pod
from topkube_operator.planning.causes.pod_failures import (
    FIRST_SIGNAL,
    Failure,
    build_removed_pod_failure,
    find_blocked_container,
    find_disruption,
    find_pod_failure,
    read_ending,
    read_log_tail,
    read_reported_failure,
)
from topkube_operator.planning.causes.rendezvous import describe_missing_workers

_TERMINATED = "Terminated"
"""The launcher's reason for a worker, or itself, that received SIGTERM."""
_DISRUPTION_REASONS = ("WorkerLost", _TERMINATED)
"""The launcher's reasons that name no failure of the run."""
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_CLOCK_DIFFERENCE = timedelta(seconds=2)
"""The clocks of nodes and of the API server may differ by this much."""
_FRESH = timedelta(seconds=15)
"""A launcher's report that is younger than this shows that the launcher lives."""
_SETTLE = timedelta(seconds=5)
"""How long the cluster may take to report why a launcher has lost a worker."""
_AFTER_DELETION = timedelta(seconds=5)
"""How long a deleted pod may remain after the end of its grace period. Then it counts as dead."""
_AFTER_SUCCESS = timedelta(seconds=60)
"""How long an attempt may continue after a worker has ended with exit code 0."""


@dataclass(frozen=True)
class AttemptPods:
    """The pods of one attempt. `workers` is in the order of their index; None stands for a missing worker."""

    number: int
    launcher: Pod | None
    workers: tuple[Pod | None, ...]
    names: tuple[str, ...]
    """The names of the workers' pods, missing pods included."""

    @property
    def launcher_container(self) -> Container:
        """The launcher's container; an empty Container if there is no launcher."""
        return self.launcher.launcher_container if self.launcher is not None else Container()


@dataclass(frozen=True)
class Verdict:
    """The state of an attempt. `until` is the time to check again, if no event will cause it."""

    state: Literal["running", "succeeded", "failed"]
    failure: Failure | None = None
    until: datetime | None = None
    ending: contract.Ending | None = None


def assess_attempt(attempt: AttemptPods, observed: Observed, now: datetime) -> Verdict:
    """Return the state of an attempt whose pods have all been made."""
    launcher, container = attempt.launcher, attempt.launcher_container
    if launcher is None:
        last = next((pod for pod in observed.last_seen.values() if pod.is_launcher_of(attempt.number)), None)
        if last is not None and last.launcher_container.exit_code is not None:  # the pod was removed before this check
            return assess_attempt(replace(attempt, launcher=last), observed, now)
        first = _find_first_worker_failure(attempt, observed, now)
        return _build_failed_verdict(first or build_removed_pod_failure("the launcher", "", observed))
    if container.exit_code is not None:
        ending = read_ending(container)
        if container.exit_code == 0:
            return Verdict("succeeded", ending=ending)
        return _assess_failed_launcher(attempt, observed, now, ending)
    if not launcher.is_active:
        return _build_failed_verdict(find_pod_failure(launcher, observed))
    report = observed.report
    has_report = report is not None and report.attempt == attempt.number
    is_fresh = has_report and report is not None and now - report.heard < _FRESH
    if launcher.node in observed.lost_nodes and not is_fresh:
        return _build_failed_verdict(find_pod_failure(launcher, observed))
    if launcher.deletion is not None:
        due = launcher.deletion + _AFTER_DELETION
        return (
            _build_failed_verdict(find_pod_failure(launcher, observed)) if now >= due else Verdict("running", until=due)
        )
    is_running = is_fresh and report is not None and report.state == "Running"
    dead_workers = list(_find_dead_workers(attempt, observed, now))
    if dead_workers:
        # The launcher reports which rank failed first. Wait for this report.
        if is_running and all(worker.pod is not None and not worker.pod.has_ended for worker in dead_workers):
            return Verdict("running", until=now + _FRESH)
        first_dead = min(dead_workers, key=lambda worker: worker.began)
        wait = timedelta(seconds=observed.policy.verdict_seconds if is_running else observed.policy.verdict_seconds / 4)
        has_succeeded = first_dead.pod is not None and first_dead.pod.has_succeeded
        due = first_dead.since + (_AFTER_SUCCESS if has_succeeded else wait)
        if _is_ahead(first_dead.since, now) and not has_succeeded:
            due = now
        return _build_failed_verdict(first_dead.failure) if now >= due else Verdict("running", until=due)
    return _assess_rendezvous(attempt, observed, now)


def _is_ahead(time: datetime, now: datetime) -> bool:
    """Return True if a node reports a time in the future, because its clock is ahead. A wait that begins at such a time
    could take hours."""
    return time > now + _CLOCK_DIFFERENCE


def build_deadline_failure(seconds: int, attempt: AttemptPods, observed: Observed) -> Failure:
    """Return the failure of a job whose activeDeadlineSeconds have passed. It names what the job waited for, if the job
    waited."""
    pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
    passed = f"activeDeadlineSeconds ({seconds}) have passed"
    blocked = find_blocked_container(pods)
    if blocked:
        reason, message = blocked
        return Failure(reason, f"{message}; {passed}", next(pod.name for pod in pods if message.startswith(pod.name)))
    waiting = next((pod for pod in pods if pod.scheduling_message), None)
    if waiting:
        return Failure(waiting.scheduling_reason, f"{waiting.scheduling_message}; {passed}", waiting.name)
    report = observed.report
    if report is not None and report.attempt == attempt.number and report.state == "Waiting" and report.missing:
        missing = describe_missing_workers(attempt.names, report.missing, with_causes=True)
        return Failure("RendezvousTimeout", f"{passed}: {missing}")
    return Failure("DeadlineExceeded", passed)


def _assess_failed_launcher(
    attempt: AttemptPods, observed: Observed, now: datetime, ending: contract.Ending | None
) -> Verdict:
    """Return the verdict on an attempt whose launcher ended with an error."""
    launcher, container = attempt.launcher, attempt.launcher_container
    assert launcher is not None
    ended = container.ended or now
    is_ahead = _is_ahead(ended, now)
    ended = now if is_ahead else ended
    reported = ending.first_failure if ending else None
    disruption = _find_causing_disruption(attempt, observed, ended, reported)
    if disruption is not None:
        return _build_failed_verdict(
            replace(disruption, log_tail=disruption.log_tail or read_log_tail(reported), at=ended)
        )
    if reported is None:
        earlier = _find_first_worker_failure(attempt, observed, now, until=ended + _CLOCK_DIFFERENCE)
        return _build_failed_verdict(replace(earlier or find_pod_failure(launcher, observed), at=ended))
    failure = read_reported_failure(reported, reported.pod or "", container)
    pod = next((pod for pod in attempt.workers if pod is not None and pod.name == reported.pod), None)
    if pod is not None and pod.has_ended and not pod.has_succeeded:
        pod_failure = find_pod_failure(pod, observed)
        if pod_failure.reason == "OOMKilled" and failure.reason != "OOMKilled":
            failure = replace(
                failure, reason=pod_failure.reason, message=pod_failure.message, exit_code=pod_failure.exit_code
            )
        elif failure.rank is None:
            failure = replace(pod_failure, log_tail=pod_failure.log_tail or failure.log_tail, at=ended)
    elif reported.reason == _TERMINATED:
        failure = replace(failure, disruption=True, lost=frozenset([pod.name] if pod else []))
    elif pod is not None and reported.reason == "WorkerLost":
        # The launcher lost a worker that its kubelet still reports as running. Within _SETTLE the kubelet reports the
        # end of the worker, or Kubernetes reports the node as lost. Otherwise the network was interrupted.
        if now < ended + _SETTLE and not is_ahead:
            return Verdict("running", until=ended + _SETTLE)
        failure = replace(failure, disruption=True, lost=frozenset([pod.name]))
    return _build_failed_verdict(failure)


def _find_causing_disruption(
    attempt: AttemptPods, observed: Observed, ended: datetime, reported: FirstFailure | None
) -> Failure | None:
    """Return the disruption that ended an attempt whose launcher ended with an error at `ended`; None if a failure did.

    The launcher orders all reports of its workers by time, and also when a worker was asked to end or became silent. So
    if it names a failure, only a disruption of the named pod counts: somebody may delete a pod after a failure, or
    independently of it. A deletion of the named pod counts if a signal ended the rank. If the launcher reported
    nothing, disruptions count that began before its end.
    """
    launcher = attempt.launcher
    assert launcher is not None
    named = reported.pod if reported is not None and reported.reason not in _DISRUPTION_REASONS else None
    disruptions: list[tuple[datetime, Failure]] = []
    for name, pod in zip(attempt.names, attempt.workers, strict=True):
        if named in (None, name):
            disruptions += _find_worker_disruptions(name, pod, observed)
    if named is not None and (reported is None or (reported.exit_code or 0) <= FIRST_SIGNAL):
        disruptions = [(began, failure) for began, failure in disruptions if failure.reason != "Deleted"]
    if launcher.deletion is not None or launcher.disruption:
        failure = find_pod_failure(launcher, observed)
        if failure.disruption and (reported is None or reported.reason in _DISRUPTION_REASONS):
            disruptions.append((launcher.deletion_requested or _LONG_AGO, failure))
    disruptions = [(began, failure) for began, failure in disruptions if began <= ended + _CLOCK_DIFFERENCE]
    return min(disruptions, key=lambda entry: entry[0])[1] if disruptions else None


def _find_worker_disruptions(name: str, pod: Pod | None, observed: Observed) -> list[tuple[datetime, Failure]]:
    """Return what the cluster did to a worker, and when that began if the time is known."""
    if pod is None:
        last = observed.last_seen.get(name)
        failure = build_removed_pod_failure(name, name, observed)
        requested = last.deletion_requested if last is not None else None
        return [(requested or observed.removed_at.get(name) or _LONG_AGO, failure)] if failure.disruption else []
    if not find_disruption(pod, observed):
        return []
    failure = find_pod_failure(pod, observed)
    return [(pod.deletion_requested or _LONG_AGO, failure)] if failure.disruption else []


@dataclass(frozen=True)
class _DeadWorker:
    """A worker that will not come back. `since` is when that became certain, `began` is when its end began."""

    pod: Pod | None
    failure: Failure
    since: datetime
    began: datetime


def _find_dead_workers(attempt: AttemptPods, observed: Observed, now: datetime) -> Iterator[_DeadWorker]:
    """Yield the workers that will not come back."""
    for name, pod in zip(attempt.names, attempt.workers, strict=True):
        if pod is None:  # without a time of removal, every worker that has a time was first
            removed = observed.removed_at.get(name)
            failure = build_removed_pod_failure(name, name, observed)
            yield _DeadWorker(None, failure, removed or _LONG_AGO, removed or now)
        elif pod.has_ended:
            # A pod that its node ended has no end time; its reason is sufficient.
            ended = pod.container.ended or _LONG_AGO
            yield _DeadWorker(pod, find_pod_failure(pod, observed), ended, ended)
        elif pod.node in observed.lost_nodes:
            yield _DeadWorker(pod, find_pod_failure(pod, observed), _LONG_AGO, _LONG_AGO)
        elif pod.deletion is not None and now >= pod.deletion + _AFTER_DELETION:
            yield _DeadWorker(
                pod, find_pod_failure(pod, observed), pod.deletion, pod.deletion_requested or pod.deletion
            )


def _find_first_worker_failure(
    attempt: AttemptPods, observed: Observed, now: datetime, until: datetime | None = None
) -> Failure | None:
    """Return the earliest failure among the workers' pods, not later than `until`; None if no worker failed."""
    failures: list[tuple[datetime, Failure]] = []
    for name, pod in zip(attempt.names, attempt.workers, strict=True):
        if pod is None:
            failures.append((observed.removed_at.get(name, now), build_removed_pod_failure(name, name, observed)))
        elif find_disruption(pod, observed) or (pod.has_ended and not pod.has_succeeded):
            failures.append((pod.container.ended or pod.deletion_requested or now, find_pod_failure(pod, observed)))
    failures = [(at, failure) for at, failure in failures if until is None or at <= until]
    return min(failures, key=lambda entry: entry[0])[1] if failures else None


def _build_failed_verdict(failure: Failure) -> Verdict:
    return Verdict("failed", failure)


def _assess_rendezvous(attempt: AttemptPods, observed: Observed, now: datetime) -> Verdict:
    """Return the verdict on an attempt whose pods run: failed if workers do not call the launcher in time."""
    report = observed.report
    if report is None or report.attempt != attempt.number or report.state != "Waiting" or not report.missing:
        return Verdict("running")
    starts = [attempt.launcher_container.started, *(pod.container.started if pod else None for pod in attempt.workers)]
    known_starts = [start for start in starts if start is not None]
    if len(known_starts) < len(starts):
        return Verdict("running")
    due = max(known_starts) + timedelta(seconds=observed.policy.rendezvous_seconds)
    if now < due:
        return Verdict("running", until=due)
    index = report.missing[0]
    missing = describe_missing_workers(attempt.names, report.missing, with_causes=True)
    return _build_failed_verdict(
        Failure(
            "RendezvousTimeout",
            f"all pods have run for {observed.policy.rendezvous_seconds:g} seconds: {missing}",
            attempt.names[index] if index < len(attempt.names) else "",
            lost=frozenset(attempt.names[index] for index in report.missing if index < len(attempt.names)),
            at=due,
        )
    )
