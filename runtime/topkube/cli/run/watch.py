"""Follow the ranks of a run to their end: output, progress, signals, the deadline."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from rich.console import Console

from topkube.cli.run.options import RunOptions
from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch.local import GRACE_SECONDS, LocalRun
from topkube.launch.output.rank_report import find_log_path
from topkube.telemetry.bar import ProgressDisplay
from topkube.telemetry.history import History, LogFollower, ProgressReader

READ_SECONDS = 0.15
"""Seconds between two reads of the ranks' logs and progress."""
DEADLINE_CODE = 124
"""Exit code of a run that its deadline ended, like that of timeout(1)."""


class Signals:
    """A counter of SIGINT, SIGTERM and SIGHUP, as a context manager. They do not end this process at once, because it
    must first end its ranks. A signal that this process was started to ignore, as with nohup, stays ignored."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self.count += 1


class RunWatch:
    """A run that is followed to its end: the ranks' output and progress, signals, and the deadline."""

    def __init__(
        self, options: RunOptions, job: TrainingJob, run: LocalRun, history: History, console: Console, signals: Signals
    ) -> None:
        self.options, self.job, self.local, self.history, self.console = options, job, run, history, console
        self.signals = signals
        self.wall_seconds = 0.0
        self.interrupted_by: signal.Signals | None = None
        """The signal that ended the ranks; None if they ended without one."""
        self._logs = [LogFollower(find_log_path(run.directory, rank)) for rank in range(job.ranks)]
        self._progress: ProgressReader | None = ProgressReader(run.directory)

    def run(self) -> LaunchError | None:
        """Run the ranks. Return why the run failed; None if it succeeded or was stopped by a signal."""
        start = time.monotonic()
        deadline = self.options.deadline_seconds or self.job.spec.run_policy.active_deadline_seconds
        handled, deadline_passed, failed_at = 0, False, float("inf")
        display = ProgressDisplay(self.console, self.history, self.job.name, self.job.spec.workers, self.job.ranks)
        with self.local, display:
            while not self.local.wait(READ_SECONDS):
                self._show(display, [(rank, log.read()) for rank, log in enumerate(self._logs)])
                now = time.monotonic()
                while self.signals.count > handled:
                    handled += 1
                    display.note(
                        "ending all ranks; press Ctrl-C again to kill them" if handled == 1 else "killing all ranks"
                    )
                    self.local.stop()
                if deadline is not None and now - start > deadline and not deadline_passed:
                    deadline_passed = True
                    display.note(f"the run's deadline of {deadline:g} s has passed: ending all ranks")
                    self.local.stop()
                if failed_at == float("inf") and self.local.find_failed_report() is not None:
                    failed_at = now
                if now - failed_at > GRACE_SECONDS:  # mpiexec ends the others at once, unless it is stuck itself
                    failed_at = float("inf")
                    self.local.stop()
            if handled and not self.local.have_all_succeeded():
                self.interrupted_by = self.signals.received
            self._show_rest(display, handled if self.interrupted_by else 0)
            for line in self.local.describe_lost_output():
                display.note(f"warning: {line}")
        self.wall_seconds = time.monotonic() - start
        if self.interrupted_by is not None:
            return None
        if deadline_passed and self.local.find_failed_report() is None:
            return LaunchError(
                f"the run did not finish within its deadline of {deadline:g} s",
                exit_code=DEADLINE_CODE,
                cause="the job has too many steps for it, or ranks hang",
                next_step=f"raise --deadline, or read {self.local.directory}/rank-0.log",
            )
        return self.local.find_failure()

    def _show_rest(self, display: ProgressDisplay, handled: int) -> None:
        """Show the rest of the output, after the ranks have ended, until there are more signals than the `handled` ones
        that have ended the ranks."""
        for rank, log in enumerate(self._logs):
            for lines in log.finish():
                self._show(display, [(rank, lines)])
                if self.signals.count > handled:
                    display.note(f"the rest of the output is in {self.local.directory}/rank-*.log")
                    return

    def _show(self, display: ProgressDisplay, lines: list[tuple[int, list[str]]]) -> None:
        for rank, texts in lines:
            display.show_lines(self.local.find_node(rank), rank, texts)
        if self._progress is not None:
            try:
                for record in self._progress.read():
                    self.history.add(record)
            except (OSError, ValueError) as error:
                self._progress = None
                display.note(f"progress can no longer be read: {error}")
        display.update()
