"""Who was first: on a dead worker's peers everything fails at once, and one cause is to be named.

Also what a member of the run is, as far as that question needs it. No I/O: times are given, or read from the clock.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from topkube.job import FirstFailure
from topkube.launch.contract import LaunchPlan
from topkube.launch.ending import TERMINATED, describe, tail_of
from topkube.launch.link import Link
from topkube.launch.messages import Hello, Look, ProxyEnded, Report
from topkube.launch.report import RankReport, first_failure, killed_for_memory
from topkube.launch.tunnel import Tunnel

CLOSED_SECONDS = 1.0
"""A worker whose connection was closed, not cut, has so long to come back: a killed pod closes its connections."""
_SILENT_SECONDS = 4.0
"""A worker that has said nothing for so long is a suspect when something else fails."""
_SETTLE_SECONDS = 0.7
"""Between a failure and the verdict: reports of other workers are on their way."""
_REPORTS_SECONDS = 2.5
"""The same where a worker has not said yet that its other ranks live: on a crowded machine the one that was first may
come late."""
ENDED_SECONDS = 3.0
"""For the workers to say that their ranks have ended."""
ASKED = FirstFailure(
    reason="Terminated", exit_code=TERMINATED, message="the launcher was asked to end: its pod was deleted or drained"
)
_CLOCK_SECONDS = 2.0
"""Clocks of nodes that differ by less are taken as equal: so long may a call itself take on a crowded machine."""
_MESSAGE_CHARACTERS = 1024


@dataclass
class Member:
    """One worker, from its first call on."""

    index: int
    hello: Hello
    link: Link
    tunnel: Tunnel | None = None
    clock: float = 0.0
    """What to add to its clock to get ours, seconds."""
    closed: float | None = None
    """Since when its connection is closed (monotonic)."""
    running: bool = False
    ended: bool = False
    asked: bool = False
    looked: bool = False
    """Whether it was asked to look at its ranks after a failure, and has."""
    terminating: float | None = None
    """When it was asked to end (Unix time)."""
    proxy: ProxyEnded | None = None
    proxy_ended: float = 0.0
    """When it said so (monotonic)."""
    oom_kills: int = 0
    reports: dict[int, RankReport] = field(default_factory=dict)

    def silent(self) -> float:
        """Seconds since it last said anything."""
        return time.monotonic() - self.link.heard

    def gone(self, now: float) -> bool:
        """Whether its connection was closed and did not come back."""
        return not self.link.connected and self.closed is not None and now - self.closed > CLOSED_SECONDS

    def suspect(self, now: float, lost_seconds: float) -> bool:
        """Whether it may be lost, but may also come back."""
        if self.proxy is not None and self.proxy.problem:
            return False
        if not self.link.connected and self.closed is not None:
            return now - self.closed <= CLOSED_SECONDS
        return _SILENT_SECONDS < self.silent() <= lost_seconds

    def owes_reports(self, slots: int) -> bool:
        """Whether a rank of it may have ended without our knowing."""
        return self.link.connected and self.proxy is None and len(self.reports) < slots and not self.looked

    def ask(self, slots: int) -> None:
        """Once: to look at its ranks, where one of them may have ended without our knowing."""
        if not self.asked and self.owes_reports(slots):
            self.asked = True
            self.link.send(Look())

    def take(self, said: Report) -> RankReport:
        """Keeps a rank's report, with our times. A rank that was killed, or a process of it, where the kernel kills for
        memory was killed for it."""
        report = RankReport.of(said.report)
        killed = said.oom_kills > 0 and not report.told_to_end
        killed = killed and killed_for_memory(report.signal, report.exit_code, report.tail)
        report = dataclasses.replace(
            report,
            started=report.started + self.clock,
            ended=report.ended + self.clock,
            out_of_memory=report.out_of_memory or killed,
        )
        self.reports[report.rank] = report
        self.oom_kills = max(self.oom_kills, said.oom_kills)
        return report


def clock_offset(theirs: float, ours: float) -> float:
    """What to add to a worker's clock, seconds, when its call of time `theirs` is read at `ours`."""
    offset = ours - theirs
    return offset if abs(offset) > _CLOCK_SECONDS else 0.0


def late(plan: LaunchPlan, present: Collection[int]) -> FirstFailure:
    """The rendezvous took too long."""
    missing = [worker for worker in plan.workers if worker.index not in present]
    names = ", ".join(worker.pod for worker in missing[:8]) + (", …" if len(missing) > 8 else "")
    return FirstFailure(
        pod=missing[0].pod if missing else None,
        reason="RendezvousTimeout",
        exit_code=1,
        message=f"{len(missing)} of {len(plan.workers)} workers did not call within {plan.rendezvous_seconds:g} s: "
        f"{names}. Likely cause: their pods do not run yet, or the network policy keeps them from the launcher. "
        "Next: kubectl describe the pods",
    )


def unfit(plan: LaunchPlan, member: Member, first: Member, mpi: str) -> FirstFailure | None:
    """Why a worker cannot take part in a run of this MPI; None where it can. `first` is worker 0."""
    hello, wrong = member.hello, ""
    if hello.problem:
        wrong = hello.problem
    elif hello.slots != plan.slots:
        wrong = f"it has {hello.slots} slots, not {plan.slots}"
    elif _release(hello.mpi) != _release(mpi):
        wrong = f"its image has {hello.mpi}, the launcher's {mpi}: they must be of one release"
    elif hello.python != first.hello.python:
        wrong = f"its Python is {hello.python}, worker 0's {first.hello.python}: use one image"
    elif ":" in hello.ip:
        wrong = (
            f"its address is {hello.ip}: the host lists of mpiexec hold no IPv6 addresses; use IPv4 or dual-stack pods"
        )
    if not wrong:
        return None
    return FirstFailure(
        pod=plan.workers[member.index].pod,
        reason="WorkerUnfit",
        exit_code=hello.problem_code if hello.problem else 1,
        message=f"worker {member.index} cannot take part: {wrong}"[:_MESSAGE_CHARACTERS],
    )


def settled(plan: LaunchPlan, members: Collection[Member], first_trouble: float, now: float) -> bool:
    """Whether it is clear what happened first. Times are monotonic."""
    first_trouble = min([first_trouble, *(one.closed for one in members if one.closed is not None and one.gone(now))])
    if now - first_trouble < _SETTLE_SECONDS:
        return False
    if now - first_trouble < _REPORTS_SECONDS and any(member.owes_reports(plan.slots) for member in members):
        return False
    if any(member.terminating is not None and not member.ended for member in members):
        return now - first_trouble > plan.grace_seconds + ENDED_SECONDS
    return not any(member.suspect(now, plan.lost_seconds) for member in members)


def verdict(plan: LaunchPlan, members: Iterable[Member]) -> FirstFailure | None:
    """What happened first; None where nobody says."""
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
        elif member.gone(now) or member.silent() > plan.lost_seconds:
            how = f"nothing was heard of it for {member.silent():.0f} s"
            if member.gone(now):
                how = "its connection was closed and did not come back"
            message = f"worker {member.index} is lost: {how}"
            candidates.append((clock - member.silent(), FirstFailure(pod=pod, reason="WorkerLost", message=message)))
        if member.proxy is not None and member.proxy.problem:
            message = f"worker {member.index} could not start its ranks: {member.proxy.problem}"[:_MESSAGE_CHARACTERS]
            code = member.proxy.exit_code or 1
            candidates.append((0.0, FirstFailure(pod=pod, reason="LaunchFailed", exit_code=code, message=message)))
    report = first_failure(reports)
    if report is not None:
        failure = describe(report, lambda rank: pod_of(plan, rank), report.rank // plan.slots)
        candidates.append((report.ended, failure))
    return min(candidates, key=lambda one: one[0])[1] if candidates else None


def unexplained(code: int | None, members: Iterable[Member], said: Iterable[str]) -> FirstFailure:
    """mpiexec ended with `code`, having printed `said`, or it still waits (None) for proxies that have ended; and no
    rank reports why."""
    codes = [member.proxy.exit_code for member in members if member.proxy is not None]
    what = f"mpiexec ended with exit code {code}"
    if code is None:
        what = f"{len(codes)} of mpiexec's proxies ended with exit code {max(codes, default=0)}"
    return FirstFailure(
        reason="LaunchFailed",
        exit_code=code or max(codes, default=0) or 1,
        message=f"{what}, and no rank says why. Likely cause: the ranks could not be started, or were killed together "
        "with their shims. Next: read the launcher's and the workers' logs",
        log_tail=tail_of(said),
    )


def pod_of(plan: LaunchPlan, rank: int) -> str:
    """The pod in which `rank` runs."""
    return plan.workers[min(rank // plan.slots, len(plan.workers) - 1)].pod


def _release(text: str) -> list[str]:
    """'MPICH 5.0.2' → ['MPICH', '5', '0']: proxies of another minor release speak another protocol."""
    name, _, version = text.partition(" ")
    return [name, *version.split(".")[:2]]
