"""A run on this machine: mpiexec and its ranks in their own session. No process of the run is left when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from topkube.environment import drop_launch_variables
from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch.host import shared_memory, torch_environment
from topkube.launch.host.arguments import check_arguments
from topkube.launch.host.environment import set_defaults
from topkube.launch.host.loopback import add_loopback_library
from topkube.launch.host.processes import (
    adopt_orphans,
    kill_descendants,
    list_descendants,
    prepare_to_die_with_parent,
    reap_orphans,
    signal_all,
)
from topkube.launch.mpi.mpi_library import Mpi
from topkube.launch.output.rank_report import (
    RankReport,
    diagnose_leaver,
    diagnose_report,
    read_reports,
    select_first_failure,
    select_leaver,
)
from topkube.launch.rank import build_shim_command, write_command
from topkube.launch.run_directory import MPIEXEC_LOG
from topkube.settings import Settings

GRACE_SECONDS = 10.0
"""The time that a run has to end after it was asked to, for a checkpoint. Then it is killed."""
_LOCAL_SETTINGS = (
    "simd",
    "threads",
    "deadline_seconds",
    "connections",
    "node_exchange",
    "finite_check",
    "device_graphs",
    "check_weights",
    "check_weights_every",
    "cache_directory",
    "cache_memory_directory",
    "cache_free_percent",
    "links",
    "cache_sharing",
    "trace_directory",
    "trace_steps",
    "log",
    "log_directory",
)
"""Settings that a TrainingJob does not contain: they come from the environment of `topkube run`."""


def build_rank_environment(
    job: TrainingJob, mpi: Mpi, run_directory: Path, inherited: Mapping[str, str], deadline_seconds: float | None = None
) -> dict[str, str]:
    """Return the environment of the ranks: `inherited` without what another launcher wrote into it, then the
    container's plain entries, then the job's settings.

    Raises SettingsError if a variable has an invalid value.
    """
    fields = Settings.__dataclass_fields__
    determined = {fields[name].metadata["variable"] for name in fields if name not in _LOCAL_SETTINGS}
    own = drop_launch_variables(inherited)
    environment = {name: value for name, value in own.items() if name not in determined}
    environment.update(mpi.build_environment())
    set_defaults(environment, job.ranks)
    environment.update({name: value for name, value in job.plain_environment.items() if name not in determined})
    environment.update(
        job.environment(
            ranks_per_node=",".join([str(job.spec.slots_per_worker)] * job.spec.workers),
            run_directory=str(run_directory.resolve()),
            checkpoint_directory=str((run_directory / "checkpoints").resolve()) if job.spec.checkpoint else "",
        )
    )
    environment[torch_environment.MASTER_ADDRESS] = "127.0.0.1"
    port = job.plain_environment.get(torch_environment.MASTER_PORT) or str(torch_environment.find_free_port())
    environment[torch_environment.MASTER_PORT] = port
    if deadline_seconds is not None:
        environment["TOPKUBE_DEADLINE_SECONDS"] = str(deadline_seconds)
    Settings.from_environment(environment)
    return environment


def build_rank_command(job: TrainingJob, environment: Mapping[str, str]) -> list[str]:
    """Return the job's command for this machine: `python` is this Python, and $(NAME) is replaced as in Kubernetes."""
    command = [expand_variables(word, environment) for word in job.command]
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    return command


def expand_variables(word: str, environment: Mapping[str, str]) -> str:
    """Return `word` with $(NAME) replaced by the variable's value. An unknown name stays as it is; $$ becomes a
    dollar."""

    def replace_variable(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else environment.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^()]*)\)", replace_variable, word)


class LocalRun:
    """The ranks of a job on this machine. Use it in a `with` statement: the end of the block ends every process, and
    removes the shared memory that killed ranks leave behind.

    Raises LaunchError if Linux would not start the job's command with `environment`.
    """

    def __init__(self, job: TrainingJob, mpi: Mpi, run_directory: Path, environment: Mapping[str, str]) -> None:
        self.job, self.mpi, self.directory = job, mpi, run_directory
        self._environment = dict(environment)
        self._command = build_rank_command(job, environment)
        check_arguments(self._command, environment)
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._others: frozenset[int] = frozenset()
        """The children of this process that existed before the run."""
        self._shared_before: frozenset[str] = frozenset()
        """The segments in shared memory that existed before the run."""
        self._kill_at = float("inf")
        """The time (monotonic) at which the processes of the run are killed."""

    def __enter__(self) -> LocalRun:
        adopt_orphans()
        self._others = frozenset(list_descendants())
        self._shared_before = shared_memory.list_segments()
        # As in pods: the command does not go through mpiexec and its proxies, which have limits of their own.
        write_command(self.directory, self._command, os.getcwd(), guardian=os.getpid())
        shim = build_shim_command(sys.executable)
        command = self.mpi.build_command(self.job.ranks, shim)
        environment = dict(self._environment)
        add_loopback_library(environment)  # all ranks are on this machine
        with (self.directory / MPIEXEC_LOG).open("wb") as log:
            self._mpiexec = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the ranks in order
                preexec_fn=prepare_to_die_with_parent(signal.SIGTERM),
            )
        return self

    def __exit__(self, *_: object) -> None:
        survivors = kill_descendants(self._others)
        self._process.wait()
        reap_orphans(self._others)
        shared_memory.remove_dead_segments(self._shared_before)
        if survivors:
            print(f"topkube run: processes {survivors} could not be killed", file=sys.stderr)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._mpiexec is not None, "used outside `with`"
        return self._mpiexec

    def wait(self, seconds: float) -> bool:
        """Wait for up to `seconds`. Return True if every process of the run has ended."""
        if time.monotonic() > self._kill_at:
            kill_descendants(self._others)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        reap_orphans(self._others | {self._process.pid})
        if not list_descendants(but=self._others):
            return True
        after_shims = time.monotonic() + GRACE_SECONDS + 5  # longer than the grace period of the shims
        self._kill_at = min(self._kill_at, after_shims)
        time.sleep(min(seconds, 0.05))
        return False

    def stop(self) -> None:
        """Ask all ranks to end, and kill those that still run after GRACE_SECONDS. A second call kills at once."""
        if self._kill_at <= time.monotonic() + GRACE_SECONDS:
            self._kill_at = 0.0
            return
        self._kill_at = time.monotonic() + GRACE_SECONDS
        signal_all([self._process.pid], signal.SIGTERM)

    @property
    def mpiexec_code(self) -> int | None:
        """The exit code of mpiexec; None while it runs."""
        return self._process.returncode

    def find_node(self, rank: int) -> int:
        """Return the number of the node that `rank` belongs to."""
        return rank // self.job.spec.slots_per_worker

    def find_failed_report(self) -> RankReport | None:
        """Return the report of the rank that failed first; None if no rank failed."""
        return select_first_failure(read_reports(self.directory, self.job.ranks))

    def have_all_succeeded(self) -> bool:
        """Return True if every rank has ended with exit code 0, and none was stopped from outside."""
        reports = read_reports(self.directory, self.job.ranks)
        done = [report for report in reports if report.exit_code == 0 and not report.told_to_end]
        return len(done) == self.job.ranks

    def describe_lost_output(self) -> list[str]:
        """Return a line for each rank whose log lacks output of the rank."""
        return [
            f"{report.lost_bytes} bytes of rank {report.rank}'s output are lost: {report.lost_why}"
            for report in read_reports(self.directory, self.job.ranks)
            if report.lost_bytes
        ]

    def find_failure(self) -> LaunchError | None:
        """Return why the run failed, with the traceback and the exit code of the rank that failed first; None if it did
        not fail. Use it only if nobody has stopped the run: a rank that was ended then is a victim of MPI, whose
        mpiexec may end with 0 all the same."""
        reports = read_reports(self.directory, self.job.ranks)
        report = select_first_failure(reports)
        victims = [victim for victim in reports if victim.told_to_end]
        leaver = select_leaver(reports, report) if report or self.mpiexec_code or victims else None
        if leaver is not None:
            place = f"node {self.find_node(leaver.rank)}"
            what, cause, next_step = diagnose_leaver(leaver, reports, self.job.ranks, place)
            return LaunchError(what, exit_code=1, cause=cause, next_step=next_step)
        if report is not None:
            what, cause, next_step = diagnose_report(report, f"node {self.find_node(report.rank)}")
            lines = report.traceback or "\n".join(report.tail)
            return LaunchError(
                what + (":\n\n" + _indent_lines(lines) + "\n" if lines else ""),
                exit_code=report.exit_code,
                cause=cause,
                next_step=next_step.replace("in the run directory", f"in {self.directory}"),
            )
        if self.mpiexec_code:
            text = (self.directory / MPIEXEC_LOG).read_text(errors="replace").strip()
            code = self.mpiexec_code if self.mpiexec_code > 0 else 128 - self.mpiexec_code
            return LaunchError(
                f"mpiexec ended with exit code {code}, and no rank reports why"
                + (":\n\n" + _indent_lines("\n".join(text.splitlines()[-20:])) + "\n" if text else ""),
                exit_code=code,
                cause="the ranks could not be started, or were killed together with their shims",
                next_step=f"read {self.directory / MPIEXEC_LOG}; try `topkube doctor`",
            )
        if victims:
            return LaunchError(
                f"MPI ended rank {victims[0].rank} (node {self.find_node(victims[0].rank)}), and no rank reports why",
                exit_code=victims[0].exit_code or 1,
                cause="another rank left MPI before this rank did",
                next_step=f"read {self.directory / MPIEXEC_LOG} and the logs of the ranks beside it",
            )
        return None


def _indent_lines(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def is_this_python(command: list[str]) -> bool:
    """Return True if the ranks run in this Python, so that its MPI can be checked before they start."""
    return os.path.realpath(command[0]) == os.path.realpath(sys.executable)
