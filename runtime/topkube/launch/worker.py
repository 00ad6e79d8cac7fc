"""`topkube worker -- COMMAND`: the entry process of a worker's pod.

The worker keeps calling the launcher. It starts the proxy that the launcher names, and sends the ranks' reports. Its
own output contains what the ranks print. The worker outlives attempts: if a launcher disappears or ends an attempt, the
worker ends its ranks and calls again, until a launcher reports that the run is over. As PID 1 it reaps orphans and
passes SIGTERM on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from topkube.errors import LaunchError, TopKubeError
from topkube.launch.attempt import Attempt
from topkube.launch.connection.calls import Calls, find_own_address
from topkube.launch.connection.credentials import WorkerCredentials
from topkube.launch.connection.messages import (
    AnyMessage,
    CheckRanks,
    End,
    Ended,
    Hello,
    ProxyEnded,
    RanksChecked,
    Start,
    Terminating,
)
from topkube.launch.connection.session import Session
from topkube.launch.connection.tasks import run_task
from topkube.launch.contract import METRICS_PORT, UNREACHABLE_CODE, Ending, WorkerPlan
from topkube.launch.dataset_process import DatasetProcess
from topkube.launch.host import shared_memory
from topkube.launch.host.arguments import check_arguments
from topkube.launch.host.environment import read_container_environment, read_source_digest
from topkube.launch.host.processes import adopt_orphans, reap_orphans
from topkube.launch.host.temporary import TemporaryFolder
from topkube.launch.output.pod_output import OutputHandler, PodOutput
from topkube.launch.output.remaining_output import RemainingOutput
from topkube.launch.termination_message import (
    build_ending_before_start,
    build_ending_by_error,
    clear_ending,
    describe_first_failure,
    write_ending,
)
from topkube.launch.worker_identity import WorkerIdentity
from topkube.settings import Settings
from topkube.telemetry.endpoint import MetricsEndpoint

_TICK_SECONDS = 0.05
_CALL_SECONDS = (2.0, 10.0)
"""The time limit of a call: TCP, TLS, and the launcher's answer. The first calls have the short limit: if a Service
still routes to the last launcher's address, nothing answers, and only a new call reaches the new launcher."""
_PAUSE_SECONDS = (0.1, 1.0)
"""The pause between two calls: the first, and the longest."""
_LAUNCHER_GONE_GRACE_SECONDS = 10.0
"""The longest time that ranks may take to save a checkpoint if the launcher is gone."""


def run_worker(command: list[str]) -> int:
    """Carry out `topkube worker`. Return the exit code. Raises LaunchError if the worker cannot start."""
    settings = Settings.from_environment()
    termination_log = Path(settings.termination_log)
    try:
        plan = WorkerPlan.read(settings.worker_plan or "{}")
        credentials = WorkerCredentials.load(Path(settings.credentials_directory))
        if not command:
            raise LaunchError("there is no command", exit_code=2, next_step="topkube worker -- python train.py")
    except LaunchError as error:
        write_ending(termination_log, build_ending_before_start(error, "BadPlan"))
        raise
    try:
        check_arguments(command, read_container_environment())
    except LaunchError as error:
        write_ending(termination_log, build_ending_before_start(error, "ArgumentsTooLong", plan.attempt))
        raise
    with TemporaryFolder("topkube-worker-") as folder:
        worker = Worker(plan, credentials, command, settings, folder)
        try:
            code = asyncio.run(worker.run())
        except Exception as error:
            write_ending(termination_log, build_ending_by_error(error, plan.attempt))
            raise
        finally:
            worker.dataset.end()
            shared_memory.remove_dead_segments(worker.shared_before)
        lost = worker.print_remaining_output()
    write_ending(termination_log, worker.build_ending(code, lost))
    return code


class Worker:
    """The worker of a pod. It takes part in at most one attempt at a time."""

    def __init__(
        self,
        plan: WorkerPlan,
        credentials: WorkerCredentials,
        command: list[str],
        settings: Settings,
        directory: Path,
    ) -> None:
        self.plan, self.command, self.directory = plan, command, directory
        self.output = PodOutput(name="topkube worker")
        self._say = self.output.say
        self.dataset = DatasetProcess(
            replace(settings, job_uid=plan.uid),  # the launcher sends it to the ranks only
            (plan.index, max(plan.workers, plan.index + 1)),
            self.directory,
            self._say,
        )
        self._termination_log = Path(settings.termination_log)
        ip = settings.pod_ip or find_own_address(plan.launcher)
        self._source_address = ip if settings.pod_ip else None  # calls come from the address that the hello contains
        self._session = Session(plan, credentials, self._receive_message)
        self._calls = Calls(plan, credentials.tls, self._say)
        source_digest = read_source_digest(Path(settings.source_directory)) if settings.source_directory else ""
        self._identity = WorkerIdentity(plan, ip, source_digest)
        self._remaining_output = RemainingOutput(self.output)
        self.shared_before = frozenset() if os.getpid() == 1 else shared_memory.list_segments()
        self._attempt: Attempt | None = None
        self._ending: End | None = None
        self._check_requested = False
        """True while the launcher waits for this worker to check its ranks."""
        self._last_attempt: Attempt | None = None
        self._last_number = plan.attempt
        self._run_is_over = False
        self._terminated_at: float | None = None
        """When this pod was asked to end (monotonic)."""
        self._is_unreachable = False
        """True if the launcher was not reached for as long as the plan allows."""
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Call launchers and run attempts until the run is over or SIGTERM has arrived. Return the exit code."""
        adopt_orphans()
        logging.getLogger().addHandler(OutputHandler(self.output))
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._terminate)
        if self._identity.problem is not None:
            self._say(str(self._identity.problem))
        self._serve_metrics()
        self.dataset.start_if_needed()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(work) for work in (self._watch_attempts(), self._call_forever(), self._done.wait())
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if self._attempt is not None:
            self._attempt.kill()
        for task in done:
            task.result()
        if self._is_unreachable:
            return UNREACHABLE_CODE
        code = self._last_attempt.exit_code if self._last_attempt is not None else 0
        if self._terminated_at is not None and not self._run_is_over and code in (0, 128 + signal.SIGKILL):
            return 128 + signal.SIGTERM  # mpiexec kills ranks that still save when others have ended
        return code

    def _serve_metrics(self) -> None:
        """Serve /metrics of the current ranks until this process ends. If the port is in use, the job trains without
        metrics."""
        try:
            MetricsEndpoint(self._run_directory, self.plan.name, METRICS_PORT, self._identity.ip)
        except LaunchError as error:
            self._say(str(error))

    def _run_directory(self) -> Path:
        """Return the run's directory of the newest attempt's ranks."""
        return self.directory / f"attempt-{self._last_number}"

    def print_remaining_output(self) -> int:
        """Wait for the reader of this pod's output, within limits. Return the number of bytes of the ranks' output that
        are lost."""
        grace_end = self._terminated_at + self.plan.grace_seconds if self._terminated_at is not None else None
        return self._remaining_output.close(grace_end)

    def build_ending(self, code: int, lost: int = 0) -> Ending:
        """Return the termination message. `lost` is the number of bytes of the ranks' output that are lost."""
        last = self._last_attempt
        reports = [*last.reports.values()] if last is not None else []
        failure = describe_first_failure(reports, lambda _: self.plan.pod, f"worker {self.plan.index}")
        return Ending(
            attempt=self._last_number,
            state="Failed" if code else "Succeeded",
            exit_code=code,
            index=self.plan.index,
            oom_kills=last.oom_kills if last is not None else 0,
            first_failure=failure or (self._calls.problem if code else None),
            lost_output_bytes=lost,
        )

    # ---- calls

    async def _call_forever(self) -> None:
        pause, seconds = _PAUSE_SECONDS[0], _CALL_SECONDS[0]
        async with self._session.create_client(self._source_address) as client:
            while True:
                try:
                    await self._call(client, seconds)
                    pause, seconds = _PAUSE_SECONDS[0], _CALL_SECONDS[0]
                except TimeoutError as error:
                    self._note_failed_call(error)
                    seconds = min(2 * seconds, _CALL_SECONDS[1])
                except (aiohttp.ClientError, OSError, LaunchError) as error:
                    self._note_failed_call(error)
                if silent := self._session.lost_seconds:
                    self._abandon(f"the launcher has been silent for {silent:.0f} s")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # not all workers at the same time
                pause = min(pause * 1.5, _PAUSE_SECONDS[1])

    async def _call(self, client: aiohttp.ClientSession, seconds: float) -> None:
        """Call the launcher and serve the connection until it ends. Raises what `Session.call` raises."""
        socket, welcome = await self._session.call(client, self._build_hello, seconds)
        if self._calls.problem is not None:
            clear_ending(self._termination_log)
        self._calls.note_answer()
        if not welcome.resumed:
            if self._attempt is not None:  # another launcher, which does not know this attempt
                await socket.close()
                self._abandon("another launcher has taken over")
                await self._wait_for_attempt()
                return
            self._ending, self._check_requested = None, False
            self._session.begin(welcome)
            self._say(f"joined attempt {welcome.attempt} of {self.plan.name} as worker {self.plan.index}")
        assert self._session.link is not None
        await self._session.link.run(socket, welcome.received)

    def _note_failed_call(self, error: BaseException) -> None:
        """Note a failed call. The reason why calls fail becomes the termination message, in whatever way the worker
        ends."""
        before = self._calls.problem
        self._calls.note_failure(error, self._identity.ip)
        if self._calls.problem is None:
            return
        if before is None or before.reason != self._calls.problem.reason:
            write_ending(self._termination_log, self.build_ending(UNREACHABLE_CODE), quiet=True)
        longest = self.plan.unreachable_seconds
        if longest and self._calls.failing_seconds > longest and self._attempt is None and self._terminated_at is None:
            self._is_unreachable = True
            self._done.set()

    def _build_hello(self) -> Hello:
        return self._identity.build_hello(self._session, busy=self._attempt is not None)

    def _abandon(self, reason: str) -> None:
        """End the attempt without its launcher, or the session if no attempt runs."""
        if self._attempt is None:
            self._session.end()
        elif self._terminated_at is None:  # else the ranks end already, with the pod's own grace period
            self._say(f"{reason}: ending the ranks of attempt {self._last_number}")
            self._attempt.stop(min(self.plan.grace_seconds, _LAUNCHER_GONE_GRACE_SECONDS))

    # ---- messages of the launcher

    def _receive_message(self, message: AnyMessage) -> None:
        if isinstance(message, Start):
            run_task(self._tasks, self._start(message))
        elif isinstance(message, End):
            run_task(self._tasks, self._end(message))
        elif isinstance(message, CheckRanks):
            self._check_requested = True

    async def _start(self, start: Start) -> None:
        """Start an attempt, or report to the launcher why it cannot start."""
        session = self._session
        assert session.tunnel is not None
        assert session.welcome is not None
        try:
            mpi = self._identity.mpi
            if mpi is None:
                raise self._identity.problem or LaunchError("there is no MPI")
            if self._attempt is not None or self._terminated_at is not None:
                raise LaunchError("this worker is still ending its previous ranks")
            stale = shared_memory.remove_dead_segments(self.shared_before)
            if stale:
                self._say(f"removed {len(stale)} stale shared-memory segments")
            self._last_number = session.welcome.attempt
            directory = self._run_directory()
            for old in self.directory.glob("attempt-*"):  # their output is still copied: those files are open
                shutil.rmtree(old, ignore_errors=True)
            port = await session.tunnel.listen()
            environment = read_container_environment()
            self._attempt = Attempt(start, directory, self.command, mpi, port, environment, self.dataset, self.output)
            self._say(f"starting ranks {', '.join(map(str, start.ranks))}")
        except (TopKubeError, OSError, ValueError) as error:
            code = error.exit_code if isinstance(error, LaunchError) else 1
            session.send(ProxyEnded(exit_code=code, problem=str(error)))

    async def _end(self, end: End) -> None:
        """End the attempt and the session, and the worker if the run is over."""
        self._ending, self._run_is_over = end, end.over
        if self._attempt is not None:
            if end.grace_seconds == 0 or self._terminated_at is None:
                self._attempt.stop(end.grace_seconds)
            await self._wait_for_attempt()
        lost = await self._remaining_output.wait_until_printed(self._is_terminated) if end.over else 0
        if self._session.link is not None:
            self._session.send(Ended(lost_output_bytes=lost))
            await self._session.link.wait_for_delivery(2.0)
            await self._session.drop_connection()
        self._session.end()
        if self._run_is_over:
            self._done.set()

    def _is_terminated(self) -> bool:
        """Return True if this pod was asked to end."""
        return self._terminated_at is not None

    async def _wait_for_attempt(self) -> None:
        while self._attempt is not None:
            await asyncio.sleep(_TICK_SECONDS)

    # ---- the attempt

    async def _watch_attempts(self) -> None:
        """Send what happens in the current attempt, and keep the dataset process alive, for ever."""
        last_check = 0.0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._attempt is not None:
                self._poll_attempt(self._attempt)
            if (now := time.monotonic()) - last_check > 1:
                last_check = now
                self.dataset.start_if_needed()
                reap_orphans(
                    self.dataset.list_pids() | ({self._attempt.proxy.pid} if self._attempt is not None else set())
                )
                if self._session.is_connected and self._session.lost_seconds:
                    await self._session.drop_connection()

    def _poll_attempt(self, attempt: Attempt) -> None:
        for message in attempt.poll():
            self._session.send(message)
        if self._check_requested and self._session.link is not None and attempt.are_ranks_known():
            self._check_requested = False
            self._session.send(RanksChecked())
        if attempt.has_ended:
            self._remaining_output.lost_log_bytes += sum(count for count, _ in attempt.lost_output.values())
            self._last_attempt, self._attempt = attempt, None
            if self._ending is None and self._session.is_broken:
                self._session.end()

    # ---- the end of the pod

    def _terminate(self) -> None:
        """Let the ranks save their state and end, and then end this worker. SIGTERM calls this method."""
        if self._terminated_at is not None:
            return
        self._terminated_at = time.monotonic()
        if self._attempt is not None:
            self._say("asked to end: the ranks save their state and end")
            self._session.send(Terminating())
            self._attempt.stop(self.plan.grace_seconds)
        run_task(self._tasks, self._report_end())

    async def _report_end(self) -> None:
        await self._wait_for_attempt()
        if self._session.link is not None:
            self._session.send(Ended())
            if self._session.is_connected:
                await self._session.link.wait_for_delivery(1.0)
        self._done.set()
