"""`topkube launch`: one attempt of a job, from the first worker's call to the termination message.

The launcher waits for the workers. It starts mpiexec in a mode in which mpiexec starts nothing itself, and sends each
worker the parameters of its proxy. Then it watches the ranks' reports, silent workers and the progress of steps. The
first failure ends the attempt. When a worker dies, everything fails on its peers at the same time, so the launcher
waits for late reports before it decides what failed first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Collection
from pathlib import Path

from topkube.errors import LaunchError, TopKubeError
from topkube.job import FirstFailure
from topkube.launch.connection.credentials import LauncherCredentials
from topkube.launch.connection.messages import Start
from topkube.launch.connection.rendezvous import Rendezvous
from topkube.launch.connection.tunnel import Tunnel
from topkube.launch.contract import MOST_REFUSALS, REASON_CHARACTERS, Ending, LauncherStatus, LaunchPlan, Refusal, State
from topkube.launch.host import torch_environment
from topkube.launch.host.temporary import TemporaryFolder
from topkube.launch.members import Members
from topkube.launch.mpi import mpi_library
from topkube.launch.mpi.mpiexec import Mpiexec
from topkube.launch.output.pod_output import OutputHandler, PodOutput
from topkube.launch.rank import build_shim_command
from topkube.launch.steps import combine_caches
from topkube.launch.termination_message import build_ending_before_start, build_ending_by_error, write_ending
from topkube.launch.verdict import (
    ASKED_TO_END,
    ENDED_SECONDS,
    describe_early_end,
    describe_missing_workers,
    describe_unexplained_end,
    describe_unfit_worker,
    find_first_failure,
    find_pod_name,
    is_settled,
)
from topkube.settings import Settings

_TICK_SECONDS = 0.05
_MEMBER_SECONDS = 100e-6
"""The time that is added to a tick for each worker, because the work of a tick grows with the workers."""
_PRINT_SECONDS = 660.0
"""The longest time that the workers may take to print the rest of the ranks' output. They have shorter limits of their
own."""
_LAST_SECONDS = 3.0
"""The longest wait for the reader of the launcher's own output at the launcher's end."""
_MOST_NAMED = 8
"""The most workers that a message names."""
_EARLY_SECONDS = 60.0
"""The launcher prints that a rank has ended with exit code 0 if others still run after this time."""
_REPORTS_SECONDS = 5.0
"""The longest time that the ranks' reports may take after mpiexec has ended."""


def run_launcher() -> int:
    """Carry out `topkube launch`, and write the termination message. Return the exit code."""
    settings = Settings.from_environment()
    termination_log = Path(settings.termination_log)
    attempt = 1
    try:
        plan = LaunchPlan.read(settings.launch_plan or "{}")
        attempt = plan.attempt
        credentials = LauncherCredentials.load(Path(settings.credentials_directory))
        mpi = mpi_library.find_required_mpi(plan.mpi)
    except LaunchError as error:
        reason = "MpiNotFound" if error.exit_code == 127 else "BadPlan"
        write_ending(termination_log, build_ending_before_start(error, reason, attempt))
        raise
    output = PodOutput(name="topkube launch")
    logging.getLogger().addHandler(OutputHandler(output))
    try:
        with TemporaryFolder("topkube-launch-") as folder:
            ending = asyncio.run(JobLauncher(plan, credentials, mpi, settings.pod_ip, output).run(folder))
    except Exception as error:
        write_ending(termination_log, build_ending_by_error(error, attempt))
        raise
    write_ending(termination_log, ending)
    if ending.first_failure is not None:
        output.say(ending.first_failure.message or "")
    output.close(_LAST_SECONDS, _LAST_SECONDS)
    return ending.exit_code


class AttemptFailed(Exception):
    """The attempt cannot continue, for the reason in `failure`."""

    def __init__(self, failure: FirstFailure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class JobLauncher:
    """The launcher of an attempt of a job."""

    def __init__(
        self,
        plan: LaunchPlan,
        credentials: LauncherCredentials,
        mpi: mpi_library.Mpi,
        own_address: str,
        output: PodOutput,
    ) -> None:
        self.plan, self._mpi, self._say = plan, mpi, output.say
        self.members = Members(plan, lambda: self._state, output.say)
        self._rendezvous = Rendezvous(plan, credentials, own_address, self.members.join, self.build_status)
        self._state: State = "Waiting"
        self._failure: FirstFailure | None = None
        self._mpiexec: Mpiexec | None = None
        self._stop_requested_at: float | None = None
        self._early_end_at, self._has_noted_early_end = float("inf"), False
        self.port = 0
        self._tick = max(_TICK_SECONDS, len(plan.workers) * _MEMBER_SECONDS)

    def build_status(self) -> LauncherStatus:
        """Return the answer to the operator's request."""
        present = {member.index for member in self.members.by_index.values() if member.closed is None}
        return LauncherStatus(
            attempt=self.plan.attempt,
            state=self._state,
            joined=len(present),
            missing=tuple(worker.index for worker in self.plan.workers if worker.index not in present),
            refused=self._list_refused(present),
            progress=self.members.steps.build_progress(),
            first_failure=self._failure,
            cache=combine_caches(self.members.caches.values()),
        )

    def _list_refused(self, present: Collection[int]) -> tuple[Refusal, ...]:
        """Return the workers that are rejected and have not joined."""
        reasons = self._rendezvous.refused
        missing = [index for index in reasons if index not in present][:MOST_REFUSALS]
        return tuple(Refusal(index=index, reason=reasons[index][:REASON_CHARACTERS]) for index in missing)

    async def run(self, directory: Path) -> Ending:
        """Carry out the whole attempt, with `directory` for its files, and return its ending. If the attempt fails, the
        ending holds the failure."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        code = 0
        try:
            self.port = await self._rendezvous.start()
            self._say(f"attempt {self.plan.attempt} of {self.plan.name}: waiting for {len(self.plan.workers)} workers")
            await self._wait_for_workers()
            self._check_workers()
            await self._start_ranks(directory)
            await self._wait_for_ranks()
            await self._wait_for_output()
            self._state = "Succeeded"
        except AttemptFailed as failed:
            self._failure, code = failed.failure, failed.failure.exit_code or 1
            self._state = "Failed"
        except (TopKubeError, OSError) as error:
            code = (error.exit_code if isinstance(error, LaunchError) else 1) or 1
            self._failure = FirstFailure(reason="LaunchFailed", exit_code=code, message=str(error)[:1024])
            self._state = "Failed"
        await self._end_workers()
        if self._mpiexec is not None:
            await self._mpiexec.end()
        await self._rendezvous.stop()
        members = self.members.by_index.values()
        return Ending(
            attempt=self.plan.attempt,
            state="Failed" if code else "Succeeded",
            exit_code=code,
            oom_kills=sum(member.oom_kills for member in members),
            first_failure=self._failure,
            progress=self.members.steps.build_progress(),
            cache=combine_caches(self.members.caches.values()),
            lost_output_bytes=sum(member.lost_output_bytes for member in members),
        )

    def _request_stop(self) -> None:
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._say("asked to end: the ranks save their state and end")
            self.members.end(self.plan.grace_seconds)

    async def _wait_for_workers(self) -> None:
        """Wait until all workers are connected, and the order of their ranks is known. Raises AttemptFailed."""
        end = time.monotonic() + self.plan.rendezvous_seconds
        complete_since = time.monotonic()
        while not self.members.are_all_connected() or not self._may_start(complete_since):
            if not self.members.are_all_connected():
                complete_since = time.monotonic()
            if self._stop_requested_at is not None:
                raise AttemptFailed(ASKED_TO_END)
            if time.monotonic() > end:
                raise AttemptFailed(
                    describe_missing_workers(self.plan, self.members.by_index, self._rendezvous.refused)
                )
            await asyncio.sleep(self._tick)
        self._order_ranks()
        self._state = "Starting"

    def _check_workers(self) -> None:
        """Check that all workers can run ranks of this MPI, at addresses of their own. Raises AttemptFailed,
        LaunchError."""
        members = self.members.list_in_order()
        for member in members:
            if failure := describe_unfit_worker(self.plan, member, members[0], str(self._mpi)):
                raise AttemptFailed(failure)
        addresses: dict[str, int] = {}
        for member in members:
            other = addresses.setdefault(member.hello.ip, member.index)
            if other != member.index:
                raise LaunchError(
                    f"workers {other} and {member.index} have the same address, {member.hello.ip}",
                    cause="hostNetwork with two workers on one node",
                    next_step="remove hostNetwork, or use spread: Node",
                )

    def _may_start(self, complete_since: float) -> bool:
        """Return True if the ranks' order is known, or the operator has had the time to send the workers' domains."""
        waited = time.monotonic() - complete_since
        return self._rendezvous.domains is not None or waited >= self.plan.domains_seconds

    def _order_ranks(self) -> None:
        """Order the ranks by the workers' domains, if the plan asks for that."""
        domains = self._rendezvous.domains
        if domains is not None and self.plan.domains_seconds:
            self.plan = self.plan.reorder(domains)
            self._say(f"ranks are ordered by the workers' {len(set(domains))} domains")
        elif self.plan.domains_seconds:
            self._say(
                "the operator has not sent the workers' domains in time: ranks are in the order of the workers. Likely"
                " cause: the operator does not reach this pod, or the domains are too long for a header. Next: read the"
                " operator's log"
            )

    async def _start_ranks(self, directory: Path) -> None:
        """Start mpiexec, and send each worker the parameters of its proxy."""
        members, slots = [self.members.by_index[index] for index in self._choose_rank_order()], self.plan.slots
        hosts = [member.hello.ip for member in members]
        shim = build_shim_command(members[0].hello.python)
        self._mpiexec = Mpiexec(self._mpi, hosts, slots, shim, directory, self._say)
        self._say(f"all workers have joined: starting {len(members) * slots} ranks with {self._mpi}")
        environment = {
            **self.plan.environment,
            "TOPKUBE_ATTEMPT": str(self.plan.attempt),
            "TOPKUBE_RANKS_PER_NODE": ",".join([str(slots)] * len(members)),
            "TOPKUBE_EXPECTED_RANKS": str(slots * len(members)),
            torch_environment.MASTER_ADDRESS: hosts[0],
            "TOPKUBE_JOB_NAME": self.plan.name,
            "TOPKUBE_JOB_UID": self.plan.uid,
        }
        async for number, port, parameters in self._mpiexec.iterate_proxies():
            member = members[number]
            member.tunnel = Tunnel(member.link, port)
            ranks = tuple(range(number * slots, (number + 1) * slots))
            member.link.send(Start(proxy=parameters, ranks=ranks, environment=environment))
        for warning in self._mpiexec.find_exposed_ports():
            self._say(warning)
        self.members.steps.start()

    def _choose_rank_order(self) -> tuple[int, ...]:
        """Return the indexes of the workers in the order of their ranks."""
        return self.plan.order or tuple(sorted(self.members.by_index))

    async def _wait_for_ranks(self) -> None:
        """Wait until all ranks have ended without an error. Raises AttemptFailed."""
        assert self._mpiexec is not None
        members, mpiexec_ended_at = self.members, float("inf")
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            if self._state == "Starting" and members.are_all_running():
                self._state = "Running"
                self._say("all ranks run")
            members.note_lost(now)
            if self._mpiexec.code is not None:
                mpiexec_ended_at = min(mpiexec_ended_at, now)
            has_mpi_ended = self._mpiexec.code is not None or members.have_all_proxies_ended()
            self._note_early_end(now)
            if has_mpi_ended and members.have_all_reported() and members.first_failure_at is None:
                return
            if now - mpiexec_ended_at > _REPORTS_SECONDS:
                members.note_failure()
            if members.first_failure_at is not None:
                members.request_checks()
            self._raise_if_stalled()
            self._raise_if_stopped(now)
            self._raise_if_failed(now)

    def _note_early_end(self, now: float) -> None:
        """Print once that a rank has ended long before others. MPICH does not notice that it is missing."""
        has_reports = any(member.reports for member in self.members.by_index.values())
        self._early_end_at = min(self._early_end_at, now + _EARLY_SECONDS) if has_reports else float("inf")
        if has_reports and now >= self._early_end_at and not self._has_noted_early_end:
            self._has_noted_early_end = True
            if text := describe_early_end(self.plan, self.members.by_index.values()):
                self._say(f"{text}. If they wait for it, its script has left without MPI_Finalize, as os._exit(0) does")

    def _raise_if_stalled(self) -> None:
        steps = self.members.steps
        message = steps.describe_stall(self.plan.stall_seconds, self.plan.startup_seconds)
        if message:
            early_end = describe_early_end(self.plan, self.members.by_index.values())
            message += f"; {early_end}" if early_end else ""
            rank = next(iter(steps.find_ranks_behind()), None)
            pod = find_pod_name(self.plan, rank) if rank is not None else None
            raise AttemptFailed(FirstFailure(pod=pod, rank=rank, reason="Stalled", exit_code=1, message=message))

    def _raise_if_stopped(self, now: float) -> None:
        """Raise AttemptFailed once the workers have ended after a request to stop, or have had the time for it."""
        if self._stop_requested_at is None:
            return
        if (
            not self.members.may_any_send(now)
            or now - self._stop_requested_at > self.plan.grace_seconds + ENDED_SECONDS
        ):
            raise AttemptFailed(ASKED_TO_END)

    def _raise_if_failed(self, now: float) -> None:
        """Raise AttemptFailed once it is clear what failed first."""
        assert self._mpiexec is not None
        members, first_failure_at = self.members.by_index.values(), self.members.first_failure_at
        if first_failure_at is None or not is_settled(self.plan, members, first_failure_at, now):
            return
        if self._stop_requested_at is not None:
            raise AttemptFailed(ASKED_TO_END)
        failure = find_first_failure(self.plan, members)
        raise AttemptFailed(failure or describe_unexplained_end(self._mpiexec.code, members, self._mpiexec.tail))

    async def _wait_for_output(self) -> None:
        """Wait until the workers have printed the rest of the ranks' output, after all ranks have ended without an
        error: the pods of a job that has succeeded may be deleted at once. A worker that is gone, or that does not
        confirm in time that it has printed everything, may have lost output."""
        self.members.end(0.0, run_is_over=True)
        end = time.monotonic() + _PRINT_SECONDS
        while time.monotonic() < end and self._stop_requested_at is None:
            if not self.members.may_any_send(time.monotonic()):
                break
            await asyncio.sleep(_TICK_SECONDS)
        unconfirmed = [member.index for member in self.members.list_in_order() if not member.has_ended]
        if unconfirmed:
            shown = ", ".join(map(str, unconfirmed[:_MOST_NAMED])) + (", …" if len(unconfirmed) > _MOST_NAMED else "")
            self._say(
                f"all ranks have ended without an error, but workers {shown} have not confirmed that all output is"
                " printed: the end of their logs may be missing. Likely cause: nobody reads their pods' output, or the"
                " pods are gone"
            )

    async def _end_workers(self) -> None:
        """Ask the workers to end, and wait a short time for their confirmations."""
        members = self.members.by_index.values()
        if self._failure is not None:
            self.members.end(0.0)
        end = time.monotonic() + ENDED_SECONDS
        while time.monotonic() < end:
            if all(member.has_ended or not member.link.is_connected for member in members):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * _TICK_SECONDS)  # the last confirmations leave
        for member in members:
            if member.tunnel is not None:
                member.tunnel.end()
        # All at the same time, because each silent worker takes a second.
        await asyncio.gather(*(member.link.drop() for member in members), return_exceptions=True)
