"""`topkube run`: all ranks of a TrainingJob on this machine, watched, summed up, and none left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch import mpi
from topkube.launch.local import (
    GRACE_SECONDS,
    LocalRun,
    fresh_directory,
    is_this_python,
    rank_command,
    rank_environment,
)
from topkube.launch.report import log_path
from topkube.telemetry.bar import ProgressDisplay
from topkube.telemetry.history import History, LogFollower, ProgressReader
from topkube.telemetry.plot import PlotError, draw
from topkube.telemetry.summary import rows, summarize

LOOK_SECONDS = 0.15
"""Between two looks at the ranks' logs and progress."""
DEADLINE_CODE = 124
"""Exit code of a run that its deadline ended, as timeout(1) has it."""


@dataclass(frozen=True)
class Options:
    """The command line of `topkube run`."""

    job: Path
    workers: int | None = None
    slots: int | None = None
    run_directory: Path | None = None
    plot: Path | None = None
    draw: bool = True
    deadline_seconds: float | None = None
    collective_deadline_seconds: float | None = None
    metrics_port: int | None = None
    json: bool = False


def run_job(options: Options) -> int:
    """Returns the exit code: 0, 130 or 143 after a signal. Raises TopKubeError, LaunchError with the failing rank's
    code."""
    job = TrainingJob.from_yaml(options.job)
    if options.workers is not None or options.slots is not None:
        job = job.scaled(options.workers, options.slots)
    found = mpi.find()
    directory = fresh_directory(options.run_directory, job, time.localtime())
    environment = rank_environment(job, found, directory, os.environ, options.collective_deadline_seconds)
    if is_this_python(rank_command(job, environment)):
        mpi.check_match(found, mpi.library())
    console = Console(stderr=options.json)
    history = History()
    with Signals() as signals, contextlib.ExitStack() as stack:
        watch = _Watch(options, job, LocalRun(job, found, directory, environment), history, console, signals)
        if options.metrics_port is not None:
            from topkube.telemetry.endpoint import MetricsEndpoint

            endpoint = stack.enter_context(
                MetricsEndpoint(lambda: directory, job.name, options.metrics_port, "127.0.0.1")
            )
            _say(console, f"metrics for Prometheus at http://127.0.0.1:{endpoint.port}/metrics")
        _announce(console, job, found, directory)
        failure = watch.run()
        _finish(watch, failure)
    if signals.received is not None:
        return 128 + signals.received
    if failure is not None:
        raise failure
    return 0


class Signals:
    """SIGINT and SIGTERM are noted instead of ending this process, which has ranks to end first."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self.count += 1


class _Watch:
    """Follows a run to its end."""

    def __init__(
        self, options: Options, job: TrainingJob, run: LocalRun, history: History, console: Console, signals: Signals
    ) -> None:
        self.options, self.job, self.local, self.history, self.console = options, job, run, history, console
        self.signals = signals
        self.wall_seconds = 0.0
        self._logs = [LogFollower(log_path(run.directory, rank)) for rank in range(job.ranks)]
        self._progress: ProgressReader | None = ProgressReader(run.directory)

    def run(self) -> LaunchError | None:
        """Returns why the run failed, None where it did not (or was stopped by a signal)."""
        start = time.monotonic()
        deadline = self.options.deadline_seconds or self.job.spec.run_policy.active_deadline_seconds
        heeded, late, failed_at = 0, False, float("inf")
        display = ProgressDisplay(self.console, self.history, self.job.name, self.job.spec.workers, self.job.ranks)
        with self.local, display:
            while not self.local.wait(LOOK_SECONDS):
                self._show(display, [(rank, log.read()) for rank, log in enumerate(self._logs)])
                now = time.monotonic()
                while self.signals.count > heeded:
                    heeded += 1
                    display.note(
                        "ending all ranks; once more kills them at once" if heeded == 1 else "killing all ranks"
                    )
                    self.local.stop()
                if deadline is not None and now - start > deadline and not late:
                    late = True
                    display.note(f"the run's deadline of {deadline:g} s has passed: ending all ranks")
                    self.local.stop()
                if failed_at == float("inf") and self.local.failed_report() is not None:
                    failed_at = now
                if now - failed_at > GRACE_SECONDS:  # mpiexec ends the others at once, unless it is stuck itself
                    failed_at = float("inf")
                    self.local.stop()
            self._show(display, [(rank, log.finish()) for rank, log in enumerate(self._logs)])
        self.wall_seconds = time.monotonic() - start
        if self.signals.received is not None:
            return None
        if late and self.local.failed_report() is None:
            return LaunchError(
                f"the run did not finish within its deadline of {deadline:g} s",
                exit_code=DEADLINE_CODE,
                cause="more steps than fit, or ranks that hang",
                next_step=f"raise --deadline, or read {self.local.directory}/rank-0.log",
            )
        return self.local.failure()

    def _show(self, display: ProgressDisplay, lines: list[tuple[int, list[str]]]) -> None:
        for rank, texts in lines:
            for text in texts:
                display.line(self.local.node_of(rank), rank, text)
        if self._progress is not None:
            try:
                for record in self._progress.read():
                    self.history.add(record)
            except (ValueError, TypeError) as error:
                self._progress = None
                display.note(f"progress can no longer be read: {error}")
        display.update()


def _announce(console: Console, job: TrainingJob, found: mpi.Mpi, directory: Path) -> None:
    spec = job.spec
    _say(
        console,
        f"{job.name}: {spec.workers} x {spec.slots_per_worker} ranks, {describe(job)}, {found}; logs in {directory}",
    )
    if job.ranks > mpi.cores():
        _say(console, f"warning: {job.ranks} ranks share {mpi.cores()} cores, so they wait for each other")
    if spec.mpi_implementation != found.implementation:
        _say(console, f"warning: the job's image has {spec.mpi_implementation}; here {found} runs it")
    if spec.dataset is not None and not Path(spec.dataset.mount_path).exists():
        _say(console, f"warning: {spec.dataset.mount_path} is not here; on a cluster it would hold {spec.dataset.uri}")
    if spec.run_policy.suspend:
        _say(console, "note: runPolicy.suspend holds on a cluster only")


def describe(job: TrainingJob) -> str:
    """The aggregation in a few words: 'hitopk at density 0.01'."""
    aggregation = job.spec.aggregation
    sparse = aggregation.algorithm in ("auto", "naive", "hitopk")
    return aggregation.algorithm + (f" at density {aggregation.density:g}" if sparse else "")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _finish(watch: _Watch, failure: LaunchError | None) -> None:
    """The summary as a table or JSON, the plot, and where everything is."""
    options, job, history, console = watch.options, watch.job, watch.history, watch.console
    directory, nodes = watch.local.directory, job.spec.workers
    summary = summarize(history, nodes, job.ranks)
    plotted: Path | None = None
    if options.draw and history.steps:
        plotted = options.plot or directory / "plot.png"
        try:
            draw(history, plotted, f"{job.name}: {nodes} x {job.spec.slots_per_worker} ranks, {describe(job)}")
        except PlotError as error:
            plotted = None
            _say(console, f"warning: {error}")
    report = watch.local.failed_report() if failure else None
    outcome = "interrupted" if watch.signals.received else ("failed" if failure else "succeeded")
    values = {
        "job": job.name,
        "outcome": outcome,
        "workers": nodes,
        "slotsPerWorker": job.spec.slots_per_worker,
        "mpi": str(watch.local.mpi),
        "algorithm": job.spec.aggregation.algorithm,
        "density": job.spec.aggregation.density,
        "wallSeconds": round(watch.wall_seconds, 3),
        **{_camel(name): value for name, value in summary.to_dict().items()},
        "secondsPerStep": {_camel(part.replace(" ", "_")): value for part, value in summary.seconds_per_step.items()},
        "runDirectory": str(directory),
        "plot": str(plotted) if plotted else None,
        "firstFailure": dataclasses.asdict(report) if report else None,
        "failure": str(failure) if failure else None,
    }
    (directory / "summary.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if options.json:
        json.dump(values, sys.stdout, indent=1)
        print(flush=True)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    if history.steps:
        for name, value in rows(summary, history, nodes, job.ranks, watch.wall_seconds):
            table.add_row(name, value)
    table.add_row("logs", f"{directory}/rank-*.log")
    if plotted:
        table.add_row("plot", str(plotted))
    if job.spec.checkpoint:
        table.add_row("checkpoints", f"{directory}/checkpoints")
    colour = {"succeeded": "green", "failed": "red", "interrupted": "yellow"}[outcome]
    console.print(f"\n[bold]{job.name}[/bold] [{colour}]{outcome}[/{colour}]", highlight=False)
    if console.is_terminal:
        console.print(table)
    else:
        for name, value in zip(*(column.cells for column in table.columns), strict=True):
            _say(console, f"{name!s:<20} {value}")
    if not history.steps and outcome == "succeeded":
        _say(
            console,
            "no steps were reported: use `with topkube.checkpointing(...) as run` and run.progress(...) in the script",
        )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
