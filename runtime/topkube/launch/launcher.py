"""`topkube launch`: one attempt of a job, from the first worker's call to the last words.

It waits for the workers, starts mpiexec so that it starts nothing itself, hands each worker the parameters of its
proxy, and then watches: what ranks report, which workers are silent, whether steps go on. The first failure ends the
attempt; which one was first is decided when the dust has settled: on a dead worker's peers everything fails at once.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from aiohttp import web

from topkube.errors import LaunchError, TopKubeError
from topkube.job import FirstFailure
from topkube.launch import mpi
from topkube.launch.contract import Ending, LauncherStatus, LaunchPlan, State
from topkube.launch.credentials import LauncherCredentials
from topkube.launch.ending import leave, refused
from topkube.launch.link import Link
from topkube.launch.messages import (
    Close,
    End,
    Ended,
    Hello,
    Looked,
    NodeCache,
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
from topkube.launch.steps import Steps, together
from topkube.launch.tunnel import Tunnel
from topkube.launch.verdict import (
    ASKED,
    ENDED_SECONDS,
    Member,
    clock_offset,
    late,
    pod_of,
    settled,
    unexplained,
    unfit,
    verdict,
)
from topkube.settings import Settings
from topkube.telemetry.progress import StepRecord

_TICK_SECONDS = 0.05
_REPORTS_SECONDS = 5.0
"""Between mpiexec's end and the verdict, for the ranks' reports."""


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
        self._caches: dict[int, NodeCache] = {}
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
            cache=together(self._caches.values()),
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
            cache=together(self._caches.values()),
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
            if hello.busy:
                # It still runs ranks of an attempt whose launcher is gone. Told of this one it ends them and calls
                # again; taken in now it would be counted as here, and leave at once.
                await socket.send_str(self._welcome(0, resumed=False).text())
                await socket.close(code=1013, message=b"end what you run, then call again")
                return
            if member is not None:
                await member.link.drop()
            member = self._admit(index, hello)
            has, resumed = 0, False
        try:
            await socket.send_str(self._welcome(member.link.received, resumed).text())
            member.closed = None
            await member.link.run(socket, has)
        except (LaunchError, ConnectionError) as error:
            _say(f"worker {index}: {error}")
        finally:
            if not member.link.connected:
                member.closed = time.monotonic()
                if self._state == "Waiting" and self._members.get(index) is member:
                    del self._members[index]

    def _welcome(self, received: int, resumed: bool) -> Welcome:
        return Welcome(
            run=self._run,
            attempt=self.plan.attempt,
            received=received,
            resumed=resumed,
            lost_seconds=self.plan.lost_seconds,
        )

    def _admit(self, index: int, hello: Hello) -> Member:
        link = Link(
            lambda said: self._on_message(member, said), lambda stream, data: self._on_bytes(member, stream, data)
        )
        member = Member(index, hello, link, clock=clock_offset(hello.time, time.time()))
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
            if member.take(said).exit_code:
                self._trouble()
        elif isinstance(said, StepDone):
            if said.record:
                self._steps.add(StepRecord.from_json(json.dumps(said.record)))
            self._steps.heard(said.collectives, said.printed)
            if said.cache is not None:
                self._caches[member.index] = said.cache
        elif isinstance(said, Looked):
            member.looked = True
        elif isinstance(said, Terminating):
            member.terminating = time.time()
        elif isinstance(said, ProxyEnded):
            member.proxy, member.proxy_ended = said, time.monotonic()
            if said.problem:
                self._trouble()
        elif isinstance(said, Ended):
            member.ended = True

    def _on_bytes(self, member: Member, stream: int, data: bytes) -> None:
        if member.tunnel is not None:
            member.tunnel.take(stream, data)

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
                raise Failed(ASKED)
            if time.monotonic() > end:
                raise Failed(late(self.plan, self._members))
            await asyncio.sleep(0.02)
        self._state = "Starting"
        for member in self._in_order():
            if problem := unfit(self.plan, member, self._in_order()[0], str(self._mpi)):
                raise Failed(problem)
        addresses: dict[str, int] = {}
        for member in self._in_order():
            other = addresses.setdefault(member.hello.ip, member.index)
            if other != member.index:
                raise LaunchError(
                    f"workers {other} and {member.index} have the same address, {member.hello.ip}",
                    cause="hostNetwork with two workers on one node",
                    next_step="leave hostNetwork away, or use spread: Node",
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
                if member.gone(now) or member.silent() > self.plan.lost_seconds:
                    self._trouble()
                # mpiexec may wait for ever for a proxy that ended before it was connected
                missing = member.proxy is not None and len(member.reports) < self.plan.slots
                if missing and now - member.proxy_ended > _REPORTS_SECONDS:
                    self._trouble()
            if self._mpiexec.code is not None and ended_at is None:
                ended_at = now
            everything = sum(len(member.reports) for member in members) == len(members) * self.plan.slots
            if everything and self._first_trouble is None and (ended_at is not None or all(m.proxy for m in members)):
                return
            if ended_at is not None and now - ended_at > _REPORTS_SECONDS:
                self._trouble()
            for member in members if self._first_trouble is not None else ():
                member.ask(self.plan.slots)
            self._look_for_stalls()
            if self._stop_asked is not None and (
                all(member.ended for member in members)
                or now - self._stop_asked > self.plan.grace_seconds + ENDED_SECONDS
            ):
                raise Failed(ASKED)
            if self._first_trouble is not None and settled(self.plan, members, self._first_trouble, now):
                if self._stop_asked is not None:
                    raise Failed(ASKED)
                code, said = self._mpiexec.code, self._mpiexec.tail
                raise Failed(verdict(self.plan, members) or unexplained(code, members, said))

    def _look_for_stalls(self) -> None:
        stalled = self._steps.stalled(self.plan.stall_seconds, self.plan.startup_seconds)
        if stalled:
            rank = next(iter(self._steps.behind()), None)
            pod = pod_of(self.plan, rank) if rank is not None else None
            raise Failed(FirstFailure(pod=pod, rank=rank, reason="Stalled", exit_code=1, message=stalled))

    async def _end_all(self) -> None:
        """Tells the workers, and waits a little for them to be done."""
        over = self._failure is None
        for member in self._members.values():
            if member.tunnel is not None and over is False:
                member.link.send(End(grace_seconds=0.0))
            else:
                member.link.send(End(grace_seconds=0.0, over=over))
        end = time.monotonic() + ENDED_SECONDS
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


def _say(text: str) -> None:
    print(f"topkube launch: {text}", flush=True)
