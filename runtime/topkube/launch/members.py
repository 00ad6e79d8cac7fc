"""The workers of an attempt as the launcher sees them: their connections, their messages and the ranks' reports."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from topkube.errors import LaunchError
from topkube.launch.connection.link import Link
from topkube.launch.connection.messages import (
    AnyMessage,
    CheckRanks,
    Close,
    End,
    Ended,
    Hello,
    NodeCache,
    Open,
    ProxyEnded,
    RanksChecked,
    Report,
    Running,
    StepDone,
    Terminating,
    Welcome,
)
from topkube.launch.connection.tunnel import Tunnel
from topkube.launch.contract import LaunchPlan, State
from topkube.launch.output.rank_report import RankReport, was_killed_for_memory
from topkube.launch.steps import Steps, parse_record

CLOSED_SECONDS = 1.0
"""The time in which a worker whose connection was closed, not cut, must come back. A killed pod closes its
connections."""
_SILENT_SECONDS = 4.0
"""If something fails, a worker that has been silent for longer may have failed first."""
_REPORTS_SECONDS = 5.0
"""The time in which the reports of a worker's ranks must arrive after its proxy has ended."""
_CLOCK_SECONDS = 2.0
"""Clocks that differ by less count as equal, because a call on a crowded machine may take this time."""


@dataclass
class Member:
    """A worker that has joined the attempt. Times are those of time.monotonic(), except Unix times."""

    index: int
    hello: Hello
    link: Link
    tunnel: Tunnel | None = None
    clock: float = 0.0
    """Seconds to add to the worker's clock to get the launcher's."""
    closed: float | None = None
    """When the worker's connection was closed; None while the worker is connected."""
    is_running: bool = False
    has_ended: bool = False
    was_asked: bool = False
    """True if the launcher has asked the worker to check its ranks, after a failure."""
    has_checked: bool = False
    """True if the worker has checked its ranks."""
    terminating: float | None = None
    """When the worker's pod was asked to end (Unix time)."""
    proxy: ProxyEnded | None = None
    """How the worker's MPI proxy ended; None while the proxy runs."""
    proxy_ended: float = 0.0
    """When the worker reported the end of its proxy."""
    oom_kills: int = 0
    lost_output_bytes: int = 0
    reports: dict[int, RankReport] = field(default_factory=dict)
    """How the worker's ranks ended, by rank."""

    def count_silent_seconds(self) -> float:
        """Return the seconds since the worker's last message."""
        return time.monotonic() - self.link.last_heard

    def is_gone(self, now: float) -> bool:
        """Return True if the worker's connection was closed and did not come back."""
        return not self.link.is_connected and self.closed is not None and now - self.closed > CLOSED_SECONDS

    def is_lost(self, now: float, lost_seconds: float) -> bool:
        """Return True if the worker is gone, or has been silent for longer than `lost_seconds`."""
        return self.is_gone(now) or self.count_silent_seconds() > lost_seconds

    def may_send(self, now: float, lost_seconds: float) -> bool:
        """Return True if the worker may still send a message: it has not reported its end, and it is not lost."""
        return not (self.has_ended or self.is_lost(now, lost_seconds))

    def may_be_lost(self, now: float, lost_seconds: float) -> bool:
        """Return True if the worker may be lost, but may also come back."""
        if self.proxy is not None and self.proxy.problem:
            return False
        if not self.link.is_connected and self.closed is not None:
            return now - self.closed <= CLOSED_SECONDS
        return _SILENT_SECONDS < self.count_silent_seconds() <= lost_seconds

    def owes_reports(self, slots: int) -> bool:
        """Return True if a rank of the worker may have ended without a report to the launcher."""
        return self.link.is_connected and self.proxy is None and len(self.reports) < slots and not self.has_checked

    def request_check(self, slots: int) -> None:
        """Ask the worker to check its ranks, if it owes reports and was not asked before."""
        if not self.was_asked and self.owes_reports(slots):
            self.was_asked = True
            self.link.send(CheckRanks())

    def add_report(self, message: Report) -> RankReport:
        """Keep the report of a rank, with times of the launcher's clock. If the kernel has killed processes of this
        worker for memory and the report fits that, the rank counts as killed for memory. Raises ValueError if the
        message holds no report."""
        report = RankReport.parse(message.report)
        killed = message.oom_kills > 0 and not report.told_to_end
        killed = killed and was_killed_for_memory(report.signal, report.exit_code, report.tail)
        report = dataclasses.replace(
            report,
            started=report.started + self.clock,
            ended=report.ended + self.clock,
            out_of_memory=report.out_of_memory or killed,
        )
        self.reports[report.rank] = report
        self.oom_kills = max(self.oom_kills, message.oom_kills)
        return report


class Members:
    """The workers that have joined, by index. `state` returns the state of the attempt.

    `first_failure_at` is the time (monotonic) of the first sign of a failure, None while there is none. What failed
    first is found later (`verdict.py`).
    """

    def __init__(self, plan: LaunchPlan, state: Callable[[], State], say: Callable[[str], None]) -> None:
        self.by_index: dict[int, Member] = {}
        self.steps = Steps()
        self.caches: dict[int, NodeCache] = {}
        self.first_failure_at: float | None = None
        self._plan, self._state, self._say = plan, state, say
        self._run = uuid.uuid4().hex

    # ---- the state of all workers

    def list_in_order(self) -> list[Member]:
        """Return the workers in the order of their indexes."""
        return [self.by_index[index] for index in sorted(self.by_index)]

    def are_all_connected(self) -> bool:
        """Return True if every worker of the plan has joined and is connected."""
        members = self.by_index.values()
        return len(members) == len(self._plan.workers) and all(member.link.is_connected for member in members)

    def are_all_running(self) -> bool:
        """Return True if all ranks of all workers run."""
        return all(member.is_running for member in self.by_index.values())

    def have_all_reported(self) -> bool:
        """Return True if the report of every rank has arrived."""
        members = self.by_index.values()
        return sum(len(member.reports) for member in members) == len(members) * self._plan.slots

    def have_all_proxies_ended(self) -> bool:
        """Return True if the MPI proxies of all workers have ended."""
        return all(member.proxy is not None for member in self.by_index.values())

    def may_any_send(self, now: float) -> bool:
        """Return True if a worker may still send a message."""
        return any(member.may_send(now, self._plan.lost_seconds) for member in self.by_index.values())

    # ---- failures

    def note_failure(self) -> None:
        """Note the time, if this is the first sign of a failure."""
        if self.first_failure_at is None:
            self.first_failure_at = time.monotonic()

    def note_lost(self, now: float) -> None:
        """Note a failure if a worker is lost, or if its proxy has ended without reports of all ranks. mpiexec itself
        may wait forever for a proxy that ended before it was connected."""
        for member in self.by_index.values():
            if member.is_lost(now, self._plan.lost_seconds):
                self.note_failure()
            lacks_reports = member.proxy is not None and len(member.reports) < self._plan.slots
            if lacks_reports and now - member.proxy_ended > _REPORTS_SECONDS:
                self.note_failure()

    def request_checks(self) -> None:
        """Ask each worker once to check its ranks, if one of them may have ended without a report."""
        for member in self.by_index.values():
            member.request_check(self._plan.slots)

    def end(self, grace_seconds: float, *, run_is_over: bool = False) -> None:
        """Ask all workers to end their ranks, and themselves if `run_is_over`."""
        for member in self.by_index.values():
            member.link.send(End(grace_seconds=grace_seconds, over=run_is_over))

    # ---- connections

    async def join(self, index: int, hello: Hello, socket: web.WebSocketResponse) -> None:
        """Serve a worker's connection until it breaks."""
        member = self.by_index.get(index)
        same_process = member is not None and member.hello.session == hello.session
        if member is not None and same_process and hello.run == self._run:
            received, resumed = hello.received, True
        else:
            if await self._reject(member, hello, socket):
                return
            if member is not None:
                await member.link.drop()
            member = self._admit(index, hello)
            received, resumed = 0, False
        try:
            await socket.send_str(self._build_welcome(member.link.received, resumed).to_json())
            member.closed = None
            await member.link.run(socket, received)
        except (LaunchError, ConnectionError) as error:
            self._say(f"worker {index}: {error}")
        finally:
            if not member.link.is_connected:
                member.closed = time.monotonic()
                if self._state() == "Waiting" and self.by_index.get(index) is member:
                    del self.by_index[index]

    async def _reject(self, member: Member | None, hello: Hello, socket: web.WebSocketResponse) -> bool:
        """Close the connection of a worker that cannot join now. Return True if it was closed."""
        if self._state() in ("Succeeded", "Failed") or (member is not None and member.has_ended):
            await socket.close(code=1013, message=b"this attempt is over")
            return True
        if member is not None and self._state() != "Waiting":
            # The worker's process has restarted, or it has ended the attempt: its ranks are gone.
            member.closed = member.closed or time.monotonic()
            problem = "it restarted in the middle of the attempt"
            member.proxy = member.proxy or ProxyEnded(exit_code=1, problem=problem)
            self.note_failure()
            await socket.close(code=1013, message=b"this attempt is about to end")
            return True
        if hello.busy:
            # It still runs ranks of an attempt whose launcher is gone. The welcome makes it end them and call again.
            # If it joined now, it would count as present and leave at once.
            await socket.send_str(self._build_welcome(0, resumed=False).to_json())
            await socket.close(code=1013, message=b"end what you run, then call again")
            return True
        return False

    def _build_welcome(self, received: int, resumed: bool) -> Welcome:
        return Welcome(
            run=self._run,
            attempt=self._plan.attempt,
            received=received,
            resumed=resumed,
            lost_seconds=self._plan.lost_seconds,
        )

    def _admit(self, index: int, hello: Hello) -> Member:
        link = Link(
            lambda message: self.receive(member, message),
            lambda stream, data: self._receive_bytes(member, stream, data),
        )
        member = Member(index, hello, link, clock=find_clock_offset(hello.time, time.time()))
        self.by_index[index] = member
        self._say(f"worker {index} ({self._plan.workers[index].pod}) joined from {hello.ip}")
        return member

    # ---- messages

    def receive(self, member: Member, message: AnyMessage) -> None:
        """Take a message of a worker."""
        if isinstance(message, Open) and member.tunnel is not None:
            member.tunnel.open_stream(message.stream)
        elif isinstance(message, Close) and member.tunnel is not None:
            member.tunnel.close_stream(message.stream)
        elif isinstance(message, Running):
            member.is_running = True
        elif isinstance(message, Report):
            self._receive_report(member, message)
        elif isinstance(message, StepDone):
            self._receive_step(member, message)
        elif isinstance(message, RanksChecked):
            member.has_checked = True
        elif isinstance(message, Terminating):
            member.terminating = time.time()
        elif isinstance(message, ProxyEnded):
            member.proxy, member.proxy_ended = message, time.monotonic()
            if message.problem:
                self.note_failure()
        elif isinstance(message, Ended):
            member.has_ended, member.lost_output_bytes = True, message.lost_output_bytes
            if message.lost_output_bytes:
                self._say(
                    f"{message.lost_output_bytes} bytes of the output of worker {member.index}'s ranks are lost. Likely"
                    " cause: its disk is full, or nobody reads its pod's output. Next: kubectl describe the pod's node"
                )

    def _receive_report(self, member: Member, message: Report) -> None:
        try:
            failed = member.add_report(message).exit_code != 0
        except ValueError as error:  # TopKube's workers never send such a report
            self._say(f"worker {member.index}: {error}")
            failed = True
        if failed:
            self.note_failure()

    def _receive_step(self, member: Member, message: StepDone) -> None:
        if (record := parse_record(message.record)) is not None:
            self.steps.add(record)
        self.steps.note_activity(message.collectives, message.printed)
        if message.cache is not None:
            self.caches[member.index] = message.cache

    def _receive_bytes(self, member: Member, stream: int, data: bytes) -> None:
        if member.tunnel is not None:
            member.tunnel.write_to_stream(stream, data)


def find_clock_offset(their_time: float, own_time: float) -> float:
    """Return the seconds to add to a worker's clock. The worker sent its hello at `their_time`, and it arrived at
    `own_time` (Unix seconds of both clocks). Return 0 if the clocks count as equal."""
    offset = own_time - their_time
    return offset if abs(offset) > _CLOCK_SECONDS else 0.0
