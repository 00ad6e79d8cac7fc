"""An attempt on one worker: the proxy, the ranks that it starts, and the reports of both."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from topkube.errors import LaunchError
from topkube.launch.attempt_progress import AttemptProgress
from topkube.launch.connection.messages import ProxyEnded, Report, Running, Start
from topkube.launch.contract import NODE_NAME_VARIABLE, Message
from topkube.launch.dataset_process import DatasetProcess
from topkube.launch.host import torch_environment
from topkube.launch.host.environment import disable_single_copy, set_defaults, set_home
from topkube.launch.host.memory_kills import count_memory_kills
from topkube.launch.host.processes import (
    kill_descendants,
    list_children,
    list_descendants,
    prepare_to_die_with_parent,
    signal_all,
)
from topkube.launch.mpi.mpi_library import Mpi
from topkube.launch.mpi.proxies import build_proxy_command
from topkube.launch.output.pod_output import PodOutput
from topkube.launch.output.rank_report import RankReport, find_log_path, find_report_path, read_tail
from topkube.launch.rank import exclude_shims, find_commands, write_command

_KEEPERS_SECONDS = 0.5
"""The longest time that the shims of killed ranks may take to write the last output and their reports."""
_KILLING_SECONDS = 0.2
"""The longest time of a try to kill the remaining processes. It is short, because the worker must send heartbeats."""
_STUCK_SECONDS = 5.0
"""A process that was killed and still lives after this time is reported."""
_MOST_NAMED = 16
"""The most processes that a message names."""
_REPORT_CHARACTERS = 8192
"""The longest traceback and the longest tail of a log in a report to the launcher, which may receive 4,096 at once."""


class Attempt:
    """An attempt. Its proxy starts when the object is created. `poll` returns messages for the launcher; `stop` and
    `kill` end the ranks. Raises LaunchError if the proxy cannot be started."""

    def __init__(
        self,
        start: Start,
        directory: Path,
        command: list[str],
        mpi: Mpi,
        control_port: int,
        environment: Mapping[str, str],
        dataset: DatasetProcess,
        output: PodOutput,
    ) -> None:
        self._dataset, self._output = dataset, output
        self.ranks, self.directory = start.ranks, directory
        self.reports: dict[int, RankReport] = {}
        self.exit_code = 0
        """The highest exit code of the ranks that have ended."""
        self.lost_output: dict[int, tuple[int, str]] = {}
        """Bytes of output that the ranks' logs could not store, and why, by rank."""
        self._has_reported_start = False
        self.has_ended = False
        """True if no process of the attempt is left and `poll` has returned its end."""
        self._kills = count_memory_kills()
        self._kill_at = self._end_at = float("inf")
        self._stuck: list[int] = []
        self._killed_at = float("inf")
        """When the worker killed the ranks (Unix time)."""
        directory.mkdir(parents=True)
        write_command(directory, command, os.getcwd())
        proxy_command = build_proxy_command(start.proxy, mpi, control_port)
        try:
            self.proxy = subprocess.Popen(
                proxy_command,
                stdin=subprocess.DEVNULL,
                env=_build_proxy_environment(start, environment, mpi, directory),
                cwd="/",
                start_new_session=True,
                preexec_fn=prepare_to_die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise LaunchError(f"{proxy_command[0]} cannot be run: {error.strerror}", exit_code=126) from None
        self._logs = {rank: output.follow(find_log_path(directory, rank), rank) for rank in start.ranks}
        node = environment.get(NODE_NAME_VARIABLE, "")
        self._progress = AttemptProgress(directory, self._logs, node, dataset, output.say)

    @property
    def oom_kills(self) -> int:
        """The number of processes that the kernel has killed for memory during this attempt."""
        return count_memory_kills() - self._kills

    def poll(self) -> list[Message]:
        """Return the messages about what has happened since the last call."""
        messages: list[Message] = []
        if not self._has_reported_start and all(log.path.exists() for log in self._logs.values()):
            self._has_reported_start = True
            messages.append(Running())
        endings = [] if self.has_ended else self._report_ends()
        if (progress := self._progress.build_report(is_last=self.has_ended)) is not None:
            messages.append(progress)
        messages += endings
        now = time.monotonic()
        if not self.has_ended and now > self._end_at:
            self._kill_remaining(_KILLING_SECONDS)
        elif not self.has_ended and now > self._kill_at and self._end_at == float("inf"):
            self._kill_commands()
        return messages

    def _report_ends(self) -> list[Message]:
        """Return the reports of ranks that have ended since the last call. If no process is left, also return the
        reports of ranks without a report, and the end of the proxy."""
        ended = self.proxy.poll() is not None and not list_descendants(but=self._dataset.list_pids())
        open_ranks = [rank for rank in self.ranks if rank not in self.reports]
        reported = [rank for rank in open_ranks if find_report_path(self.directory, rank).exists()]
        messages: list[Message] = [self._keep_report(self._read_report(rank)) for rank in reported]
        if ended and (self.exit_code or self._dataset.has_final_report()):
            started = [rank for rank in self.ranks if rank not in self.reports and self._logs[rank].path.exists()]
            messages += [self._keep_report(self._build_missing_report(rank)) for rank in started]
            self.has_ended = True
            self._finish_logs()
            code = self.proxy.returncode
            messages.append(ProxyEnded(exit_code=code if code >= 0 else 128 - code))
        return messages

    def _read_report(self, rank: int) -> RankReport:
        try:
            report = RankReport.read(find_report_path(self.directory, rank))
        except (OSError, ValueError):  # a script wrote the file, not the shim
            return self._build_missing_report(rank)
        return report if report.rank == rank else self._build_missing_report(rank)

    def _keep_report(self, report: RankReport) -> Report:
        if report.signal == "SIGKILL" and report.ended >= self._killed_at:
            report = dataclasses.replace(report, told_to_end=True)
        self.reports[report.rank] = report
        self.exit_code = max(self.exit_code, report.exit_code)
        if report.lost_bytes:
            self.lost_output[report.rank] = (report.lost_bytes, report.lost_why)
            self._output.say(
                f"{report.lost_bytes} bytes of rank {report.rank}'s output are lost: {report.lost_why}. Likely cause: "
                "the pod's disk is full. Next: print less, or raise the container's ephemeral-storage limit"
            )
        return Report(report=dataclasses.asdict(report.shorten(_REPORT_CHARACTERS)), oom_kills=self.oom_kills)

    def _build_missing_report(self, rank: int) -> RankReport:
        """Return a report for a rank whose shim was killed together with it."""
        now = time.time()
        lines, traceback = read_tail(find_log_path(self.directory, rank))
        return RankReport(
            rank=rank,
            host="",
            command=[],
            started=now,
            ended=now,
            exit_code=128 + signal.SIGKILL,
            signal="SIGKILL",
            told_to_end=self._kill_at < float("inf"),
            out_of_memory=self.oom_kills > 0,
            traceback=traceback,
            tail=lines,
        )

    def are_ranks_known(self) -> bool:
        """Return True if every rank has a report or still runs. A rank whose process has ended reports soon."""
        return len(self.reports) + len(find_commands(list_descendants(but=self._dataset.list_pids()))) >= len(
            self.ranks
        )

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to the ranks, and SIGKILL to all after `grace_seconds`. 0 kills at once."""
        if grace_seconds > 0:
            if self._kill_at == float("inf"):
                fronts = list_children(self.proxy.pid)  # the front processes of the shims pass the signal on
                signal_all(fronts, signal.SIGTERM)
            self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
        else:
            self._kill_at = min(self._kill_at, time.monotonic())
            self._kill_commands()

    def _kill_commands(self) -> None:
        """Kill everything but the shims, which then write the last output and their reports, and end by themselves."""
        if self._end_at < float("inf"):
            return
        now = time.monotonic()
        self._kill_at, self._end_at = min(self._kill_at, now), now + _KEEPERS_SECONDS
        self._killed_at = time.time()
        descendants = list_descendants(but=self._dataset.list_pids())
        signal_all(exclude_shims(descendants), signal.SIGKILL)

    def kill(self) -> None:
        """Kill every process below this worker now."""
        self._kill_at = min(self._kill_at, time.monotonic())
        self._kill_remaining(_STUCK_SECONDS)
        self._finish_logs()

    def _finish_logs(self) -> None:
        """Finish the logs: no process writes to them any more."""
        for rank, log in self._logs.items():
            report = self.reports.get(rank)
            log.finish(report.log_bytes if report is not None else None)

    def _kill_remaining(self, seconds: float) -> None:
        """Try for `seconds` to kill every process below this worker. Report processes that cannot be killed."""
        survivors = kill_descendants(self._dataset.list_pids(), seconds)
        self.proxy.poll()
        is_late = time.monotonic() - self._end_at > _STUCK_SECONDS or seconds >= _STUCK_SECONDS
        if survivors and is_late and survivors != self._stuck:
            self._stuck = survivors
            self._output.say(
                f"processes {survivors[:_MOST_NAMED]} cannot be killed. Likely cause: they wait in the kernel for a "
                "volume or a GPU that does not answer. Next: read the node's kernel log"
            )

    def remove(self) -> None:
        """Remove the attempt's files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _build_proxy_environment(start: Start, environment: Mapping[str, str], mpi: Mpi, directory: Path) -> dict[str, str]:
    """Return the environment of the proxy, which the ranks inherit: the container's variables, those of the launcher,
    and defaults."""
    variables = {**environment, **start.environment, "TOPKUBE_RUN_DIRECTORY": str(directory)}
    variables.update(mpi.build_environment())
    set_defaults(variables, len(start.ranks))
    variables.setdefault(torch_environment.MASTER_PORT, str(torch_environment.DEFAULT_PORT))
    disable_single_copy(variables)
    set_home(variables, str(directory.parent))
    return variables
