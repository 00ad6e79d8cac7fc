"""`topkube launch`: one attempt of a job, from the first worker's call to the last words.

It waits for the workers, starts mpiexec so that it starts nothing itself, hands each worker the parameters of its
proxy, and then watches: what ranks report, which workers are silent, whether steps go on. The first failure ends the
attempt; which one was first is decided when the dust has settled: on a dead worker's peers everything fails at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from topkube.errors import LaunchError, TopKubeError
from topkube.job import CacheStatus, FirstFailure
from topkube.launch import mpi
from topkube.launch.contract import Ending, LauncherStatus, LaunchPlan, State
from topkube.launch.credentials import LauncherCredentials
from topkube.launch.ending import TERMINATED, describe, leave, refused, tail_of
from topkube.launch.link import Link
from topkube.launch.messages import (
    Close,
    End,
    Ended,
    Hello,
    Open,
    ProxyEnded,
    Report,
    Running,
    Said,
    Start,
    StepDone,
    Terminating,
    Welcome,
)
from topkube.launch.mpiexec import Mpiexec
from topkube.launch.rendezvous import Rendezvous
from topkube.launch.report import RankReport, first_failure
from topkube.launch.steps import Steps
from topkube.launch.tunnel import Tunnel
from topkube.settings import Settings
from topkube.telemetry.progress import StepRecord

_TICK_SECONDS = 0.05
CLOSED_SECONDS = 2.0
"""A worker whose connection was closed, not cut, has so long to come back: a killed pod closes its connections."""
_SILENT_SECONDS = 4.0
"""A worker that has said nothing for so long is a suspect when something else fails."""
_SETTLE_SECONDS = 0.7
"""Between a failure and the verdict: reports of other workers are on their way."""
_ENDED_SECONDS = 3.0
"""For the workers to say that their ranks have ended."""
_REPORTS_SECONDS = 5.0
"""Between mpiexec's end and the verdict, for the ranks' reports."""
_ASKED = FirstFailure(
    reason="Terminated", exit_code=TERMINATED, message="the launcher was asked to end: its pod was deleted or drained"
)


def run_launcher() -> int:
    """What `topkube launch` does. Returns the exit code, after its last words."""
    settings = Settings.from_environment()
    termination_log = Path(settings.termination_log)
    attempt = 1
    try:
        plan = LaunchPlan.read(settings.launch_plan or "{}")
        attempt = plan.attempt
        credentials = LauncherCredentials.load(Path(settings.credentials_directory))
        found = _find_mpi(plan)
    except LaunchError as error:
        reason = "MpiNotFound" if error.exit_code == 127 else "BadPlan"
        leave(termination_log, refused(error, reason, attempt))
        raise
    ending = asyncio.run(Launcher(plan, credentials, found, settings.pod_ip).run())
    leave(termination_log, ending)
    if ending.first_failure is not None:
        print(f"topkube launch: {ending.first_failure.message}", file=sys.stderr, flush=True)
    return ending.exit_code


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
    terminating: float | None = None
    proxy: ProxyEnded | None = None
    oom_kills: int = 0
    reports: dict[int, RankReport] = field(default_factory=dict)

    def silent(self) -> float:
        """Seconds since it last said anything."""
        return time.monotonic() - self.link.heard


class Failed(Exception):
    """The attempt cannot go on, for a reason that is known."""

    def __init__(self, failure: FirstFailure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class Launcher:
    """One attempt."""

    def __init__(self, plan: LaunchPlan, credentials: LauncherCredentials, found: mpi.Mpi, own_address: str) -> None:
        self.plan, self._mpi = plan, found
        self._run = uuid.uuid4().hex
        self._door = Rendezvous(plan, credentials, own_address, self._joined, self.status)
        self._members: dict[int, Member] = {}
        self._state: State = "Waiting"
        self._steps = Steps()
        self._cache: CacheStatus | None = None
        self._failure: FirstFailure | None = None
        self._mpiexec: Mpiexec | None = None
        self._stop_asked: float | None = None
        self._first_trouble: float | None = None
        self.port = 0

    def status(self) -> LauncherStatus:
        """What the operator is told."""
        present = {member.index for member in self._members.values() if member.closed is None}
        return LauncherStatus(
            attempt=self.plan.attempt,
            state=self._state,
            joined=len(present),
            missing=tuple(worker.index for worker in self.plan.workers if worker.index not in present),
            progress=self._steps.progress(),
            first_failure=self._failure,
            cache=self._cache,
        )

    async def run(self) -> Ending:
        """The whole attempt. Never raises for what can go wrong in it: the ending says it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        code = 0
        with tempfile.TemporaryDirectory(prefix="topkube-launch-") as directory:
            try:
                self.port = await self._door.start()
                _say(f"attempt {self.plan.attempt} of {self.plan.name}: waiting for {len(self.plan.workers)} workers")
                await self._gather()
                await self._start(Path(directory))
                await self._watch()
                self._state = "Succeeded"
            except Failed as failed:
                self._failure, code = failed.failure, failed.failure.exit_code or 1
                self._state = "Failed"
            except (TopKubeError, OSError) as error:
                code = error.exit_code if isinstance(error, LaunchError) else 1
                self._failure = FirstFailure(reason="LaunchFailed", exit_code=code, message=str(error)[:1024])
                self._state = "Failed"
            await self._end_all()
            if self._mpiexec is not None:
                await self._mpiexec.end()
            await self._door.stop()
        return Ending(
            attempt=self.plan.attempt,
            state="Failed" if code else "Succeeded",
            exit_code=code,
            oom_kills=sum(member.oom_kills for member in self._members.values()),
            first_failure=self._failure,
            progress=self._steps.progress(),
        )

    def _stop(self) -> None:
        if self._stop_asked is None:
            self._stop_asked = time.monotonic()
            _say("asked to end: the ranks save their state and end")
            for member in self._members.values():
                member.link.send(End(grace_seconds=self.plan.grace_seconds))

    # ---- workers

    async def _joined(self, index: int, hello: Hello, socket: web.WebSocketResponse) -> None:
        """Owns a worker's connection until it breaks."""
        member = self._members.get(index)
        same = member is not None and member.hello.session == hello.session
        if member is not None and same and hello.run == self._run:
            has, resumed = hello.received, True
        else:
            if self._state in ("Succeeded", "Failed") or (member is not None and member.ended):
                await socket.close(code=1013, message=b"this attempt is over")
                return
            if member is not None and self._state != "Waiting":
                # Its process began anew, or it gave the attempt up: whatever ran there is gone.
                self._lose(member, "it started anew in the middle of the attempt")
                await socket.close(code=1013, message=b"this attempt is about to end")
                return
            if member is not None:
                await member.link.drop()
            member = self._admit(index, hello)
            has, resumed = 0, False
        welcome = Welcome(
            run=self._run,
            attempt=self.plan.attempt,
            received=member.link.received,
            resumed=resumed,
            lost_seconds=self.plan.lost_seconds,
        )
        try:
            await socket.send_str(welcome.text())
            member.closed = None
            await member.link.run(socket, has)
        except (LaunchError, ConnectionError) as error:
            _say(f"worker {index}: {error}")
        finally:
            if not member.link.connected:
                member.closed = time.monotonic()
                if self._state == "Waiting" and self._members.get(index) is member:
                    del self._members[index]

    def _admit(self, index: int, hello: Hello) -> Member:
        link = Link(
            lambda said: self._on_message(member, said), lambda stream, data: self._on_bytes(member, stream, data)
        )
        member = Member(index, hello, link, clock=time.time() - hello.time)
        self._members[index] = member
        _say(f"worker {index} ({self.plan.workers[index].pod}) has joined from {hello.ip}")
        return member

    def _on_message(self, member: Member, said: Said) -> None:
        if isinstance(said, Open) and member.tunnel is not None:
            member.tunnel.opened(said.stream)
        elif isinstance(said, Close) and member.tunnel is not None:
            member.tunnel.closed(said.stream)
        elif isinstance(said, Running):
            member.running = True
        elif isinstance(said, Report):
            report = _on_our_clock(said, member.clock)
            member.reports[report.rank] = report
            member.oom_kills = max(member.oom_kills, said.oom_kills)
            if report.exit_code:
                self._trouble()
        elif isinstance(said, StepDone):
            if said.record:
                self._steps.add(StepRecord.from_json(json.dumps(said.record)))
            if said.cache is not None:
                self._take_cache(said.cache)
        elif isinstance(said, Terminating):
            member.terminating = time.time()
        elif isinstance(said, ProxyEnded):
            member.proxy = said
            if said.problem:
                self._trouble()
        elif isinstance(said, Ended):
            member.ended = True

    def _on_bytes(self, member: Member, stream: int, data: bytes) -> None:
        if member.tunnel is not None:
            member.tunnel.take(stream, data)

    def _take_cache(self, said: dict[str, object]) -> None:
        try:
            self._cache = CacheStatus.model_validate(said, extra="ignore")
        except ValueError:
            self._cache = None

    def _trouble(self) -> None:
        if self._first_trouble is None:
            self._first_trouble = time.monotonic()

    def _lose(self, member: Member, why: str) -> None:
        member.closed = member.closed or time.monotonic()
        member.proxy = member.proxy or ProxyEnded(exit_code=1, problem=why)
        self._trouble()

    # ---- the attempt

    async def _gather(self) -> None:
        """Waits for all workers, and checks that they can run ranks of this MPI."""
        end = time.monotonic() + self.plan.rendezvous_seconds
        while len(self._members) < len(self.plan.workers) or not all(
            one.link.connected for one in self._members.values()
        ):
            if self._stop_asked is not None:
                raise Failed(_ASKED)
            if time.monotonic() > end:
                raise Failed(self._late())
            await asyncio.sleep(0.02)
        self._state = "Starting"
        for member in self._members.values():
            self._check(member)
        addresses: dict[str, int] = {}
        for member in self._in_order():
            other = addresses.setdefault(member.hello.ip, member.index)
            if other != member.index:
                raise LaunchError(
                    f"workers {other} and {member.index} have the same address, {member.hello.ip}",
                    cause="hostNetwork with two workers on one node",
                    next_step="leave hostNetwork away, or use spread: Node",
                )

    def _late(self) -> FirstFailure:
        missing = [worker for worker in self.plan.workers if worker.index not in self._members]
        names = ", ".join(worker.pod for worker in missing[:8]) + (", …" if len(missing) > 8 else "")
        return FirstFailure(
            pod=missing[0].pod if missing else None,
            reason="RendezvousTimeout",
            exit_code=1,
            message=f"{len(missing)} of {len(self.plan.workers)} workers did not call within "
            f"{self.plan.rendezvous_seconds:g} s: {names}. Likely cause: their pods do not run yet, or the network "
            "policy keeps them from the launcher. Next: kubectl describe the pods",
        )

    def _check(self, member: Member) -> None:
        hello, pod = member.hello, self.plan.workers[member.index].pod
        wrong = ""
        if hello.problem:
            wrong = hello.problem
        elif hello.slots != self.plan.slots:
            wrong = f"it has {hello.slots} slots, not {self.plan.slots}"
        elif _release(hello.mpi) != _release(str(self._mpi)):
            wrong = f"its image has {hello.mpi}, the launcher's {self._mpi}: they must be of one release"
        elif hello.python != self._in_order()[0].hello.python:
            wrong = f"its Python is {hello.python}, worker 0's {self._in_order()[0].hello.python}: use one image"
        if wrong:
            raise Failed(
                FirstFailure(
                    pod=pod,
                    reason="WorkerUnfit",
                    exit_code=hello.problem_code if hello.problem else 1,
                    message=f"worker {member.index} cannot take part: {wrong}"[:1024],
                )
            )

    def _in_order(self) -> list[Member]:
        return [self._members[index] for index in sorted(self._members)]

    async def _start(self, directory: Path) -> None:
        members = self._in_order()
        hosts = [member.hello.ip for member in members]
        shim = [members[0].hello.python, "-m", "topkube.launch.rank", "--no-echo"]
        self._mpiexec = Mpiexec(self._mpi, hosts, self.plan.slots, shim, directory)
        _say(f"all workers are here: starting {len(members) * self.plan.slots} ranks with {self._mpi}")
        slots = self.plan.slots
        environment = {
            **self.plan.environment,
            "TOPKUBE_ATTEMPT": str(self.plan.attempt),
            "TOPKUBE_RANKS_PER_NODE": ",".join([str(slots)] * len(members)),
            "TOPKUBE_EXPECTED_RANKS": str(slots * len(members)),
            "TOPKUBE_JOB_NAME": self.plan.name,
            "TOPKUBE_JOB_UID": self.plan.uid,
        }
        async for number, port, parameters in self._mpiexec.proxies():
            member = members[number]
            member.tunnel = Tunnel(member.link, port)
            ranks = tuple(range(number * slots, (number + 1) * slots))
            member.link.send(Start(proxy=parameters, ranks=ranks, environment=environment))
        for warning in self._mpiexec.exposed():
            _say(warning)
        self._steps.started()

    async def _watch(self) -> None:
        """Returns when all ranks have ended well. Raises Failed."""
        assert self._mpiexec is not None
        ended_at: float | None = None
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            members = self._members.values()
            if self._state == "Starting" and all(member.running for member in members):
                self._state = "Running"
                _say("all ranks run")
            for member in members:
                if member.closed is not None and not member.link.connected and now - member.closed > CLOSED_SECONDS:
                    self._trouble()
                if member.silent() > self.plan.lost_seconds:
                    self._trouble()
            if self._mpiexec.code is not None and ended_at is None:
                ended_at = now
            everything = sum(len(member.reports) for member in members) == len(members) * self.plan.slots
            if everything and self._first_trouble is None and (ended_at is not None or all(m.proxy for m in members)):
                return
            if ended_at is not None and now - ended_at > _REPORTS_SECONDS:
                self._trouble()
            self._look_for_stalls()
            if self._stop_asked is not None and (
                all(member.ended for member in members)
                or now - self._stop_asked > self.plan.grace_seconds + _ENDED_SECONDS
            ):
                raise Failed(_ASKED)
            if self._first_trouble is not None and self._settled(now):
                raise Failed(self._verdict())

    def _look_for_stalls(self) -> None:
        stalled = self._steps.stalled(self.plan.stall_seconds, self.plan.startup_seconds)
        if stalled:
            raise Failed(FirstFailure(reason="Stalled", exit_code=1, message=stalled))

    def _settled(self, now: float) -> bool:
        """Whether it is clear what happened first."""
        assert self._first_trouble is not None
        if now - self._first_trouble < _SETTLE_SECONDS:
            return False
        if any(member.terminating is not None and not member.ended for member in self._members.values()):
            return now - self._first_trouble > self.plan.grace_seconds + _ENDED_SECONDS
        return not any(self._suspect(member, now) for member in self._members.values())

    def _suspect(self, member: Member, now: float) -> bool:
        """Whether this worker may be lost, but may also come back."""
        if member.proxy is not None and member.proxy.problem:
            return False
        if not member.link.connected and member.closed is not None:
            return now - member.closed <= CLOSED_SECONDS
        return _SILENT_SECONDS < member.silent() <= self.plan.lost_seconds

    def _verdict(self) -> FirstFailure:
        """What happened first."""
        if self._stop_asked is not None:
            return _ASKED
        now, clock = time.monotonic(), time.time()
        candidates: list[tuple[float, FirstFailure]] = []
        for member in self._members.values():
            pod = self.plan.workers[member.index].pod
            gone = not member.link.connected and member.closed is not None and now - member.closed > CLOSED_SECONDS
            if member.terminating is not None:
                message = f"worker {member.index} was asked to end: its pod was deleted, drained or preempted"
                failure = FirstFailure(pod=pod, reason="Terminated", exit_code=TERMINATED, message=message)
                candidates.append((member.terminating, failure))
            elif gone or member.silent() > self.plan.lost_seconds:
                how = (
                    "its connection was closed and did not come back"
                    if gone
                    else f"nothing was heard of it for {member.silent():.0f} s"
                )
                message = f"worker {member.index} is lost: {how}"
                failure = FirstFailure(pod=pod, reason="WorkerLost", message=message)
                candidates.append((clock - member.silent(), failure))
            if member.proxy is not None and member.proxy.problem:
                message = f"worker {member.index} could not start its ranks: {member.proxy.problem}"[:1024]
                reason, code = "LaunchFailed", member.proxy.exit_code or 1
                candidates.append((0.0, FirstFailure(pod=pod, reason=reason, exit_code=code, message=message)))
        report = first_failure(report for member in self._members.values() for report in member.reports.values())
        if report is not None:
            candidates.append((report.ended, describe(report, self._pod, report.rank // self.plan.slots)))
        if candidates:
            return min(candidates, key=lambda one: one[0])[1]
        return self._unexplained()

    def _unexplained(self) -> FirstFailure:
        assert self._mpiexec is not None
        code = self._mpiexec.code
        codes = [member.proxy.exit_code for member in self._members.values() if member.proxy is not None]
        return FirstFailure(
            reason="LaunchFailed",
            exit_code=code or max(codes, default=0) or 1,
            message=f"mpiexec ended with exit code {code}, and no rank says why. Likely cause: the ranks could not be "
            "started, or were killed together with their shims. Next: read the launcher's log",
            log_tail=tail_of(self._mpiexec.tail),
        )

    def _pod(self, rank: int) -> str:
        return self.plan.workers[min(rank // self.plan.slots, len(self.plan.workers) - 1)].pod

    async def _end_all(self) -> None:
        """Tells the workers, and waits a little for them to be done."""
        over = self._failure is None
        for member in self._members.values():
            if member.tunnel is not None and over is False:
                member.link.send(End(grace_seconds=0.0))
            else:
                member.link.send(End(grace_seconds=0.0, over=over))
        end = time.monotonic() + _ENDED_SECONDS
        while time.monotonic() < end:
            if all(member.ended or not member.link.connected for member in self._members.values()):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * _TICK_SECONDS)  # the last confirmations leave
        for member in self._members.values():
            if member.tunnel is not None:
                member.tunnel.end()
            await member.link.drop()


def _find_mpi(plan: LaunchPlan) -> mpi.Mpi:
    try:
        found = mpi.find()
    except LaunchError as error:
        error.exit_code = 127
        raise
    if found.implementation != plan.mpi:
        raise LaunchError(
            f"the job asks for {plan.mpi}, and the launcher's image has {found}",
            exit_code=127,
            cause="spec.mpiImplementation names another MPI than the image holds",
            next_step=f"set spec.mpiImplementation to {found.implementation}, or use an image with {plan.mpi}",
        )
    return found


def _release(text: str) -> list[str]:
    """'MPICH 5.0.2' → ['MPICH', '5', '0']: proxies of another minor release speak another protocol."""
    name, _, version = text.partition(" ")
    return [name, *version.split(".")[:2]]


def _on_our_clock(said: Report, clock: float) -> RankReport:
    """The report with our times. A rank that was killed where the kernel kills for memory was killed for it."""
    report = RankReport.of(said.report)
    killed = report.signal == "SIGKILL" and said.oom_kills > 0 and not report.told_to_end
    return dataclasses.replace(
        report,
        started=report.started + clock,
        ended=report.ended + clock,
        out_of_memory=report.out_of_memory or killed,
    )


def _say(text: str) -> None:
    print(f"topkube launch: {text}", flush=True)
