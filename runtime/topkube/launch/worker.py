"""`topkube worker -- COMMAND`: the entry process of a worker's pod.

It keeps calling the launcher, starts the proxy that it is told to, passes on what the ranks print and how they end, and
outlives attempts: when a launcher vanishes or ends an attempt, it ends its ranks and calls again, until it is told that
the run is over. As PID 1 it reaps orphans and passes SIGTERM on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp

from topkube.errors import LaunchError, TopKubeError
from topkube.launch import mpi, shared_memory
from topkube.launch.attempt import Attempt
from topkube.launch.contract import JOIN_PATH, METRICS_PORT, Ending, WorkerPlan
from topkube.launch.credentials import WorkerCredentials
from topkube.launch.dataset import DatasetProcess
from topkube.launch.ending import first_failure_of, leave, refused
from topkube.launch.link import FRAME_BYTES, Link
from topkube.launch.messages import (
    Close,
    End,
    Ended,
    Hello,
    Look,
    Looked,
    ProxyEnded,
    Said,
    Start,
    Terminating,
    Welcome,
    read,
)
from topkube.launch.processes import adopt_orphans, reap_orphans
from topkube.launch.tunnel import Tunnel
from topkube.settings import Settings
from topkube.telemetry.endpoint import MetricsEndpoint

_TICK_SECONDS = 0.05
_CALL_SECONDS = (2.0, 10.0)
"""For one call: TCP, TLS, and the launcher's answer. The first are short: where a Service still names the last
launcher's address nobody answers, and only another call is sent elsewhere."""
_PAUSE_SECONDS = (0.1, 1.0)
"""Between two calls, growing."""
_REPEAT_SECONDS = 60.0
"""The same trouble is printed again after so long."""
_LAUNCHER_GONE_GRACE_SECONDS = 10.0
"""For a checkpoint, when the launcher is gone and the ranks are well."""


def run_worker(command: list[str]) -> int:
    """What `topkube worker` does. Returns the exit code; raises LaunchError where it cannot even begin."""
    settings = Settings.from_environment()
    termination_log = Path(settings.termination_log)
    try:
        plan = WorkerPlan.read(settings.worker_plan or "{}")
        credentials = WorkerCredentials.load(Path(settings.credentials_directory))
        if not command:
            raise LaunchError("there is no command", exit_code=2, next_step="topkube worker -- python train.py")
    except LaunchError as error:
        leave(termination_log, refused(error, "BadPlan"))
        raise
    worker = Worker(plan, credentials, command, settings)
    try:
        code = asyncio.run(worker.run())
    finally:
        worker.dataset.end()
        shutil.rmtree(worker.directory, ignore_errors=True)
        shared_memory.clean(worker.shared_before)
    leave(termination_log, worker.ending(code))
    return code


class Worker:
    """One worker: it is in at most one attempt at a time."""

    def __init__(self, plan: WorkerPlan, credentials: WorkerCredentials, command: list[str], settings: Settings):
        self.plan, self.command = plan, command
        self.directory = Path(tempfile.mkdtemp(prefix="topkube-"))
        self.dataset = DatasetProcess(settings, (plan.index, max(plan.workers, plan.index + 1)), self.directory)
        self._credentials = credentials
        self._ip = settings.pod_ip or _own_address(plan.launcher)
        self._bound = bool(settings.pod_ip)  # so that the launcher sees the address that we claim
        self._session = uuid.uuid4().hex
        self._mpi, self._problem = _find_mpi()
        self.shared_before = frozenset() if os.getpid() == 1 else shared_memory.names()
        self._welcome: Welcome | None = None
        self._link: Link | None = None
        self._tunnel: Tunnel | None = None
        self._attempt: Attempt | None = None
        self._ending: End | None = None
        self._asked = False
        """Whether the launcher waits for us to have looked at the ranks."""
        self._last: Attempt | None = None
        self._last_number = plan.attempt
        self._over = False
        self._terminated: float | None = None
        self._said: tuple[str, float] = ("", 0.0)
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Calls until the run is over or SIGTERM has come; returns the exit code."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)
        if self._problem is not None:
            self._say(str(self._problem))
        self._serve_metrics()
        self.dataset.look()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(doing) for doing in (self._tick(), self._call_forever(), self._done.wait())
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if self._attempt is not None:
            self._attempt.kill()
        for task in done:
            task.result()
        code = self._last.exit_code if self._last is not None else 0
        return code or (128 + signal.SIGTERM if self._terminated is not None and not self._over else 0)

    def _serve_metrics(self) -> None:
        """/metrics of the ranks that run now, to the end of this process. A job trains without it too."""
        try:
            MetricsEndpoint(self._run_directory, self.plan.name, METRICS_PORT, self._ip)
        except LaunchError as error:
            self._say(str(error))

    def _run_directory(self) -> Path:
        """Where the ranks of the newest attempt report."""
        return self.directory / f"attempt-{self._last_number}"

    def ending(self, code: int) -> Ending:
        """The last words."""
        last = self._last
        reports = [*last.reports.values()] if last is not None else []
        return Ending(
            attempt=self._last_number,
            state="Failed" if code else "Succeeded",
            exit_code=code,
            index=self.plan.index,
            oom_kills=last.oom_kills if last is not None else 0,
            first_failure=first_failure_of(reports, lambda _: self.plan.pod, self.plan.index),
        )

    # ---- calling

    async def _call_forever(self) -> None:
        pause = _PAUSE_SECONDS[0]
        own = (self._ip, 0) if self._bound else None
        connector = aiohttp.TCPConnector(ssl=self._credentials.tls, limit=0, force_close=True, local_addr=own)
        timeout, patience = aiohttp.ClientTimeout(total=None), _CALL_SECONDS[0]
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as client:
            while True:
                try:
                    if await self._call(client, patience):
                        pause, patience = _PAUSE_SECONDS[0], _CALL_SECONDS[0]
                except TimeoutError as error:
                    self._say(_why(error, self.plan.launcher))
                    patience = min(2 * patience, _CALL_SECONDS[1])
                except (aiohttp.ClientError, OSError, LaunchError) as error:
                    self._say(_why(error, self.plan.launcher))
                self._give_up_if_lost()
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _PAUSE_SECONDS[1])

    async def _call(self, client: aiohttp.ClientSession, patience: float) -> bool:
        """One connection, from the call to its end. False where it was refused. Raises TimeoutError where it was not
        made within `patience` seconds."""
        headers = {"Authorization": f"Bearer {self._credentials.token}"}
        query = {"index": str(self.plan.index), "attempt": str(self.plan.attempt)}
        url = f"https://{self.plan.launcher}{JOIN_PATH}"
        async with asyncio.timeout(patience):
            socket = await client.ws_connect(
                url, headers=headers, params=query, max_msg_size=FRAME_BYTES, autoping=True, timeout=_CLOSE
            )
            await socket.send_str(self._hello().text())
            incoming = await socket.receive()
        answer = read(incoming.data) if incoming.type == aiohttp.WSMsgType.TEXT else None
        if not isinstance(answer, Welcome):
            await socket.close()
            said = incoming.extra if incoming.type == aiohttp.WSMsgType.CLOSE else ""
            raise LaunchError(
                f"the launcher at {self.plan.launcher} sends this worker away: {said or 'no reason given'}"
            )
        if not answer.resumed:
            if self._attempt is not None:  # another launcher is there: what it does not know is over
                await socket.close()
                self._abandon("another launcher has taken over")
                await self._until_idle()
                return True
            self._begin_session(answer)
        assert self._link is not None
        await self._link.run(socket, answer.received)
        return True

    def _hello(self) -> Hello:
        in_session = self._link is not None and self._welcome is not None
        return Hello(
            session=self._session,
            run=self._welcome.run if in_session and self._welcome else None,
            received=self._link.received if self._link is not None else 0,
            busy=self._attempt is not None,
            ip=self._ip,
            slots=self.plan.slots,
            python=sys.executable,
            mpi=str(self._mpi) if self._mpi is not None else "",
            problem=str(self._problem) if self._problem is not None else "",
            problem_code=self._problem.exit_code if self._problem is not None else 1,
            time=time.time(),
        )

    def _begin_session(self, welcome: Welcome) -> None:
        self._welcome, self._ending, self._asked = welcome, None, False
        self._link = Link(self._on_message, self._on_bytes)
        self._tunnel = Tunnel(self._link)
        self._say(f"joined attempt {welcome.attempt} of {self.plan.name} as worker {self.plan.index}")

    def _give_up_if_lost(self) -> None:
        """Ends the attempt when the launcher has been silent for too long."""
        if self._link is not None and self._welcome is not None:
            silent = time.monotonic() - self._link.heard
            if silent > self._welcome.lost_seconds:
                self._abandon(f"the launcher has been silent for {silent:.0f} s")

    def _abandon(self, reason: str) -> None:
        if self._attempt is not None:
            if self._terminated is None:  # else they end already, and have the pod's own time for it
                self._say(f"{reason}: ending the ranks of attempt {self._last_number}")
                self._attempt.stop(min(self.plan.grace_seconds, _LAUNCHER_GONE_GRACE_SECONDS))
        else:
            self._end_session()

    async def _until_idle(self) -> None:
        while self._attempt is not None:
            await asyncio.sleep(_TICK_SECONDS)

    def _end_session(self) -> None:
        if self._tunnel is not None:
            self._tunnel.end()
        self._link = self._tunnel = self._welcome = None

    # ---- what the launcher says

    def _on_message(self, said: Said) -> None:
        if isinstance(said, Start):
            self._hold(self._start(said))
        elif isinstance(said, End):
            self._hold(self._end(said))
        elif isinstance(said, Look):
            self._asked = True
        elif isinstance(said, Close) and self._tunnel is not None:
            self._tunnel.closed(said.stream)

    def _on_bytes(self, stream: int, data: bytes) -> None:
        if self._tunnel is not None:
            self._tunnel.take(stream, data)

    def _hold(self, doing: Any) -> None:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, start: Start) -> None:
        assert self._link is not None
        assert self._tunnel is not None
        assert self._welcome is not None
        try:
            if self._mpi is None:
                raise self._problem or LaunchError("there is no MPI")
            if self._attempt is not None or self._terminated is not None:
                raise LaunchError("this worker still ends what it ran before")
            stale = shared_memory.clean(self.shared_before)
            if stale:
                self._say(f"removed {len(stale)} stale shared-memory segments")
            self._last_number = self._welcome.attempt
            directory = self._run_directory()
            shutil.rmtree(directory, ignore_errors=True)
            port = await self._tunnel.listen()
            self._attempt = Attempt(start, directory, self.command, self._mpi, port, _inherited(), self.dataset)
            self._say(f"starting ranks {', '.join(map(str, start.ranks))}")
        except (TopKubeError, OSError) as error:
            code = error.exit_code if isinstance(error, LaunchError) else 1
            self._link.send(ProxyEnded(exit_code=code, problem=str(error)))

    async def _end(self, end: End) -> None:
        self._ending, self._over = end, end.over
        if self._attempt is not None:
            if end.grace_seconds == 0 or self._terminated is None:
                self._attempt.stop(end.grace_seconds)
            await self._until_idle()
        if self._link is not None:
            self._link.send(Ended())
            await self._link.delivered(2.0)
            await self._link.drop()
        self._end_session()
        if self._over:
            self._done.set()

    # ---- the attempt

    async def _tick(self) -> None:
        reaped = 0.0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._attempt is not None:
                for message in self._attempt.poll():
                    if self._link is not None:
                        self._link.send(message)
                if self._asked and self._link is not None and self._attempt.all_told():
                    self._asked = False
                    self._link.send(Looked())
                if self._attempt.over:
                    self._last, self._attempt = self._attempt, None
                    if self._ending is None and self._link is not None and not self._link.connected:
                        self._end_session()
            if (now := time.monotonic()) - reaped > 1:
                reaped = now
                self.dataset.look()
                reap_orphans(self.dataset.pids() | ({self._attempt.proxy.pid} if self._attempt is not None else set()))
                if self._link is not None and self._welcome is not None and self._link.connected:
                    silent = now - self._link.heard
                    if silent > self._welcome.lost_seconds:
                        await self._link.drop()

    def _terminate(self) -> None:
        if self._terminated is not None:
            return
        self._terminated = time.monotonic()
        if self._attempt is not None:
            self._say("asked to end: the ranks save their state and end")
            if self._link is not None:
                self._link.send(Terminating())
            self._attempt.stop(self.plan.grace_seconds)
        self._hold(self._wind_up())

    async def _wind_up(self) -> None:
        await self._until_idle()
        if self._link is not None:
            self._link.send(Ended())
            if self._link.connected:
                await self._link.delivered(1.0)
        self._done.set()

    def _say(self, text: str) -> None:
        """Prints, but the same only once a minute."""
        now = time.monotonic()
        if text != self._said[0] or now - self._said[1] > _REPEAT_SECONDS:
            self._said = (text, now)
            print(f"topkube worker: {text}", flush=True)


_CLOSE = aiohttp.ClientWSTimeout(ws_close=1.0)


def _inherited() -> dict[str, str]:
    """The container's environment without what only this process needs."""
    own = {"TOPKUBE_WORKER", "TOPKUBE_LAUNCH", "TOPKUBE_CREDENTIALS", "TOPKUBE_TERMINATION_LOG"}
    return {name: value for name, value in os.environ.items() if name not in own}


def _find_mpi() -> tuple[mpi.Mpi | None, LaunchError | None]:
    try:
        found = mpi.find()
        mpi.check_match(found, mpi.library())
        return found, None
    except LaunchError as error:
        return None, error


def _own_address(launcher: str) -> str:
    """The address from which this host reaches the launcher; for workers outside pods."""
    import socket

    host, _, port = launcher.rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
        except (OSError, ValueError):
            return "127.0.0.1"


def _why(error: BaseException, launcher: str) -> str:
    """A call's failure for people."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return (
            f"what answers at {launcher} does not have the certificate of this job's launcher: not talking to it. "
            "Likely cause: the address belongs to something else, or the job's Secret was changed after this pod "
            "started. Next: delete this pod"
        )
    if isinstance(error, aiohttp.WSServerHandshakeError):
        reason = error.headers.get("X-Topkube-Reason", error.message) if error.headers else error.message
        return f"the launcher at {launcher} refuses this worker ({error.status}): {reason}"
    if isinstance(error, TimeoutError):
        return f"the launcher at {launcher} does not answer; calling on"
    if isinstance(error, LaunchError):
        return str(error)
    return f"the launcher at {launcher} cannot be reached; calling on"
