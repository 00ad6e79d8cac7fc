"""The verdict: the failure that came first. When a worker dies, the ranks of all other workers fail at the same time,
and the status must name the cause."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from topkube.job import FirstFailure
from topkube.launch.contract import LaunchPlan
from topkube.launch.members import Member
from topkube.launch.output.rank_report import RankReport, diagnose_leaver, select_first_failure, select_leaver
from topkube.launch.termination_message import TERMINATED, describe_failure, join_last_lines

_SETTLE_SECONDS = 0.7
"""The time from the first failure to the verdict: reports of other workers may be on their way."""
_REPORTS_SECONDS = 2.5
"""The same time if a worker has not confirmed yet that its other ranks live. On a crowded machine, the report of the
rank that failed first may come late."""
ENDED_SECONDS = 3.0
"""The longest time that the workers may take to report that their ranks have ended."""
ASKED_TO_END = FirstFailure(
    reason="Terminated", exit_code=TERMINATED, message="the launcher was asked to end: its pod was deleted or drained"
)
_MESSAGE_CHARACTERS, _REASON_CHARACTERS = 1024, 400
_MOST_NAMED = 8
"""The most pods that a message names."""


def describe_missing_workers(plan: LaunchPlan, present: Collection[int], refused: Mapping[int, str]) -> FirstFailure:
    """Return the failure of a rendezvous that took too long. `refused` holds, by index, why workers that did call were
    rejected."""
    missing = [worker for worker in plan.workers if worker.index not in present]
    names = ", ".join(worker.pod for worker in missing[:_MOST_NAMED]) + (", …" if len(missing) > _MOST_NAMED else "")
    rejected = next((worker.index for worker in missing if worker.index in refused), None)
    cause = "their pods do not run yet, or a NetworkPolicy blocks the launcher. Next: kubectl describe the pods"
    if rejected is not None:
        cause = f"the launcher rejects them: worker {rejected}: {refused[rejected][:_REASON_CHARACTERS]}"
    return FirstFailure(
        pod=missing[0].pod if missing else None,
        reason="RendezvousTimeout",
        exit_code=1,
        message=f"{len(missing)} of {len(plan.workers)} workers did not {'call' if rejected is None else 'join'} within"
        f" {plan.rendezvous_seconds:g} s: {names}. Likely cause: {cause}",
    )


def describe_unfit_worker(plan: LaunchPlan, member: Member, first: Member, mpi: str) -> FirstFailure | None:
    """Return why a worker cannot run ranks of this MPI; None if it can. `first` is worker 0."""
    hello, problem = member.hello, ""
    if hello.problem:
        problem = hello.problem
    elif hello.slots != plan.slots:
        problem = f"it has {hello.slots} slots instead of {plan.slots}"
    elif _parse_release(hello.mpi) != _parse_release(mpi):
        problem = f"its image has {hello.mpi} and the launcher has {mpi}: both must be the same release"
    elif hello.python != first.hello.python:
        problem = f"its Python is {hello.python} and worker 0's is {first.hello.python}: use one image"
    elif hello.source != first.hello.source:
        problem = (
            f"its source has the digest {hello.source[:12] or 'none'} and worker 0's has "
            f"{first.hello.source[:12] or 'none'}: the source was changed after worker 0 had fetched it. "
            "Delete the job and submit it again, or name a checksum in spec.source"
        )
    elif ":" in hello.ip:
        problem = f"its address is {hello.ip}: mpiexec takes no IPv6 addresses; use IPv4 or dual-stack pods"
    if not problem:
        return None
    return FirstFailure(
        pod=plan.workers[member.index].pod,
        reason="WorkerUnfit",
        exit_code=hello.problem_code if hello.problem else 1,
        message=f"worker {member.index} cannot take part: {problem}"[:_MESSAGE_CHARACTERS],
    )


def is_settled(plan: LaunchPlan, members: Collection[Member], first_failure_at: float, now: float) -> bool:
    """Return True if no later message can change what failed first. Times are monotonic."""
    closed = (member.closed for member in members if member.closed is not None and member.is_gone(now))
    waited = now - min([first_failure_at, *closed])
    if waited < _SETTLE_SECONDS:
        return False
    if waited < _REPORTS_SECONDS and any(member.owes_reports(plan.slots) for member in members):
        return False
    if any(member.terminating is not None and member.may_send(now, plan.lost_seconds) for member in members):
        return waited > plan.grace_seconds + ENDED_SECONDS
    return not any(member.may_be_lost(now, plan.lost_seconds) for member in members)


def find_first_failure(plan: LaunchPlan, members: Iterable[Member]) -> FirstFailure | None:
    """Return what failed first; None if no worker and no rank reports a failure."""
    now, clock = time.monotonic(), time.time()
    candidates: list[tuple[float, FirstFailure]] = []
    reports: list[RankReport] = []
    for member in members:
        pod = plan.workers[member.index].pod
        reports += member.reports.values()
        if member.terminating is not None:
            message = f"worker {member.index} was asked to end: its pod was deleted, drained or preempted"
            failure = FirstFailure(pod=pod, reason="Terminated", exit_code=TERMINATED, message=message)
            candidates.append((member.terminating, failure))
        elif member.is_lost(now, plan.lost_seconds):
            silent = member.count_silent_seconds()
            state = f"it has been silent for {silent:.0f} s"
            if member.is_gone(now):
                state = "its connection was closed and did not come back"
            message = f"worker {member.index} is lost: {state}"
            candidates.append((clock - silent, FirstFailure(pod=pod, reason="WorkerLost", message=message)))
        if member.proxy is not None and member.proxy.problem:
            message = f"worker {member.index} could not start its ranks: {member.proxy.problem}"[:_MESSAGE_CHARACTERS]
            code = member.proxy.exit_code or 1
            candidates.append((0.0, FirstFailure(pod=pod, reason="LaunchFailed", exit_code=code, message=message)))
    report = select_first_failure(reports)
    leaver = select_leaver(reports, report) if not candidates else None
    if leaver is not None:
        ranks = plan.slots * len(plan.workers)
        place = f"worker {plan.find_worker(leaver.rank).index}"
        what, cause, next_step = diagnose_leaver(leaver, reports, ranks, place)
        message = f"{what}. Likely cause: {cause}. Next: {next_step}"[:_MESSAGE_CHARACTERS]
        pod = find_pod_name(plan, leaver.rank)
        return FirstFailure(pod=pod, rank=leaver.rank, reason="Error", exit_code=1, message=message)
    if report is not None:
        failure = describe_failure(
            report, lambda rank: find_pod_name(plan, rank), f"worker {plan.find_worker(report.rank).index}"
        )
        candidates.append((report.ended, failure))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def describe_early_end(plan: LaunchPlan, members: Iterable[Member]) -> str:
    """Return which rank ended with exit code 0 first, if other ranks still run; "" otherwise. That may be right: a rank
    may save for minutes after the others have ended, and the launcher does not know if a rank has called MPI_Finalize.
    But others may wait for a rank that has left without it."""
    reports = [report for member in members for report in member.reports.values()]
    left = plan.slots * len(plan.workers) - len(reports)
    ended = min((report for report in reports if not report.exit_code), key=lambda report: report.ended, default=None)
    if ended is None or not left:
        return ""
    return (
        f"rank {ended.rank} ({find_pod_name(plan, ended.rank)}) has ended with exit code 0, and {left} other"
        f" rank{'s' if left > 1 else ''} still run{'' if left > 1 else 's'}"
    )


def describe_unexplained_end(code: int | None, members: Iterable[Member], lines: Iterable[str]) -> FirstFailure:
    """Return the failure of an attempt whose end no rank explains. mpiexec printed `lines` and ended with `code`, or it
    still waits (None) for proxies that have ended."""
    codes = [member.proxy.exit_code for member in members if member.proxy is not None]
    what = f"mpiexec ended with exit code {code}"
    if code is None:
        what = f"{len(codes)} of mpiexec's proxies ended with exit code {max(codes, default=0)}"
    return FirstFailure(
        reason="LaunchFailed",
        exit_code=code or max(codes, default=0) or 1,
        message=f"{what}, and no rank reports why. Likely cause: the ranks could not be started, or were killed"
        " together with their shims. Next: read the logs of the launcher and the workers",
        log_tail=join_last_lines(lines),
    )


def find_pod_name(plan: LaunchPlan, rank: int) -> str:
    """Return the name of the pod in which `rank` runs."""
    return plan.find_worker(rank).pod


def _parse_release(text: str) -> list[str]:
    """Return the release of an MPI: 'MPICH 5.0.2' → ['MPICH', '5', '0']. Proxies of another minor release speak another
    protocol."""
    name, _, version = text.partition(" ")
    return [name, *version.split(".")[:2]]
