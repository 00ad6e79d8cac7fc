"""`topkube run`: all ranks of a TrainingJob on this machine, watched, summed up, and none left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from topkube import algorithms
from topkube.cli.run_summary import PartsOfStep, RankEnd, RunSummary
from topkube.cli.script_job import Target, load_job
from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.job.algorithm_name import is_foreign
from topkube.launch.local import (
    GRACE_SECONDS,
    LocalRun,
    fresh_directory,
    is_this_python,
    rank_command,
    rank_environment,
)
from topkube.launch.mpi import mpi_library
from topkube.launch.output.rank_report import log_path
from topkube.processors import cores
from topkube.settings import Settings, process_environment
from topkube.telemetry import trace
from topkube.telemetry.bar import ProgressDisplay
from topkube.telemetry.history import History, LogFollower, ProgressReader
from topkube.telemetry.loggers import check_loggers, log_folder
from topkube.telemetry.plot import PlotError, draw
from topkube.telemetry.summary import rows, summarize

LOOK_SECONDS = 0.15
"""Seconds between two reads of the ranks' logs and progress."""
TRACES = "traces"
"""The folder of the run's directory in which ranks write their traces."""
DEADLINE_CODE = 124
"""Exit code of a run that its deadline ended, like that of timeout(1)."""


@dataclass(frozen=True)
class RunOptions:
    """The command line of `topkube run`."""

    target: Target
    run_directory: Path | None = None
    plot: Path | None = None
    draw: bool = True
    trace: Path | None = None
    """The file of the trace; None if no trace is recorded."""
    deadline_seconds: float | None = None
    collective_deadline_seconds: float | None = None
    metrics_port: int | None = None
    json: bool = False
    dry_run: Literal["yaml", "json"] | None = None
    """Print the job in this format instead of running it."""


def run_job(options: RunOptions) -> int:
    """Run the job and return the exit code: 0, or 128 + number after a signal. Raises TopKubeError; LaunchError has the
    exit code of the rank that failed."""
    job = load_job(options.target)
    if options.dry_run is not None:
        return _print_job(job, options.dry_run, options.target)
    loggers = check_loggers(options.target.loggers or "")
    mpi = mpi_library.find()
    directory = fresh_directory(options.run_directory, job, time.localtime())
    environment = rank_environment(job, mpi, directory, process_environment(), options.collective_deadline_seconds)
    if options.trace is not None:
        shutil.rmtree(directory / TRACES, ignore_errors=True)  # of an earlier run in this directory
        environment["TOPKUBE_TRACE_DIRECTORY"] = str((directory / TRACES).resolve())
    if is_this_python(rank_command(job, environment)):
        mpi_library.check_match(mpi, mpi_library.library())
    console = Console(stderr=options.json)
    history = History()
    with Signals() as signals, contextlib.ExitStack() as stack:
        watch = _Watch(options, job, LocalRun(job, mpi, directory, environment), history, console, signals)
        if options.metrics_port is not None:
            from topkube.telemetry.endpoint import MetricsEndpoint

            endpoint = stack.enter_context(
                MetricsEndpoint(lambda: directory, job.name, options.metrics_port, "127.0.0.1")
            )
            _say(console, f"metrics for Prometheus at http://127.0.0.1:{endpoint.port}/metrics")
        _announce(console, job, mpi, directory)
        if loggers:
            _say(console, f"{', '.join(loggers)}: {log_folder(Settings.from_environment(environment), directory)}")
        failure = watch.run()
        _finish(watch, failure)
    if signals.received is not None:
        return 128 + signals.received
    if failure is not None:
        raise failure
    return 0


def _print_job(job: TrainingJob, form: Literal["yaml", "json"], target: Target) -> int:
    """Print the job, and what a cluster needs that this machine has."""
    print(json.dumps(job.to_dict(), indent=1) if form == "json" else job.to_yaml(), end="\n" if form == "json" else "")
    if not target.is_job_file:
        image = job.container["image"]
        note = f"on a cluster, the image {image} must contain {target.program}; `topkube submit --sync .` sends it"
        print(f"note: {note}", file=sys.stderr)
    if job.spec.checkpoint and not target.is_job_file:
        claim = job.spec.checkpoint.claim_name
        print(f"note: on a cluster, the namespace must have the PersistentVolumeClaim {claim}", file=sys.stderr)
    return 0


class Signals:
    """Count SIGINT, SIGTERM and SIGHUP. They do not end this process at once, because it must first end its ranks."""

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
    """Follow a run to its end."""

    def __init__(
        self, options: RunOptions, job: TrainingJob, run: LocalRun, history: History, console: Console, signals: Signals
    ) -> None:
        self.options, self.job, self.local, self.history, self.console = options, job, run, history, console
        self.signals = signals
        self.wall_seconds = 0.0
        self._logs = [LogFollower(log_path(run.directory, rank)) for rank in range(job.ranks)]
        self._progress: ProgressReader | None = ProgressReader(run.directory)

    def run(self) -> LaunchError | None:
        """Return why the run failed; None if it succeeded or was stopped by a signal."""
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
                        "ending all ranks; press Ctrl-C again to kill them" if heeded == 1 else "killing all ranks"
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
            for rank, log in enumerate(self._logs):
                for lines in log.finish():
                    self._show(display, [(rank, lines)])
            for line in self.local.lost_output():
                display.note(f"warning: {line}")
        self.wall_seconds = time.monotonic() - start
        if self.signals.received is not None:
            return None
        if late and self.local.failed_report() is None:
            return LaunchError(
                f"the run did not finish within its deadline of {deadline:g} s",
                exit_code=DEADLINE_CODE,
                cause="the job has too many steps for it, or ranks hang",
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


def _announce(console: Console, job: TrainingJob, mpi: mpi_library.Mpi, directory: Path) -> None:
    spec = job.spec
    _say(
        console,
        f"{job.name}: {spec.workers} x {spec.slots_per_worker} ranks, {describe(job)}, {mpi}; logs in {directory}",
    )
    if job.ranks > cores():
        _say(console, f"warning: {job.ranks} ranks share {cores()} cores and wait for each other")
    if spec.mpi_implementation != mpi.implementation:
        _say(console, f"warning: the job's image has {spec.mpi_implementation}; this machine uses {mpi}")
    if spec.dataset is not None and not Path(spec.dataset.mount_path).exists():
        _say(console, f"warning: {spec.dataset.mount_path} does not exist; on a cluster it holds {spec.dataset.uri}")
    if is_foreign(spec.aggregation.algorithm):
        _say(console, f"warning: {spec.aggregation.algorithm} is not installed here; the script must register it")
    if spec.source is not None:
        _say(console, f"note: spec.source has no effect without a cluster; the ranks run in {Path.cwd()}")
    if spec.setup is not None:
        _say(console, "note: spec.setup has no effect without a cluster; the ranks have the packages of this Python")
    if spec.run_policy.suspend:
        _say(console, "note: runPolicy.suspend has no effect without a cluster")


def describe(job: TrainingJob) -> str:
    """Return the aggregation in a few words: 'hitopk at density 0.01'."""
    return algorithms.describe(job.spec.aggregation.algorithm, job.spec.aggregation.density)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _write_trace(directory: Path, path: Path, console: Console) -> Path | None:
    """Write the trace of all ranks to `path`. Return None, with a warning, if there is none or the disk refuses it."""
    try:
        trace.write_merged(directory, path)
    except (trace.TraceError, OSError) as error:
        _say(console, f"warning: no trace was written to {path}: {error}")
        return None
    return path


def _finish(watch: _Watch, failure: LaunchError | None) -> None:
    """Print the summary as a table or JSON, draw the plot, and print where the files are."""
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
    traced = _write_trace(directory / TRACES, options.trace, console) if options.trace is not None else None
    report = watch.local.failed_report() if failure else None
    outcome: Literal["succeeded", "failed", "interrupted"]
    outcome = "interrupted" if watch.signals.received else ("failed" if failure else "succeeded")
    parts = {part.replace(" ", "_"): seconds for part, seconds in summary.seconds_per_step.items()}
    values = RunSummary(
        job=job.name,
        outcome=outcome,
        workers=nodes,
        slots_per_worker=job.spec.slots_per_worker,
        mpi=str(watch.local.mpi),
        algorithm=job.spec.aggregation.algorithm,
        density=job.spec.aggregation.density,
        wall_seconds=round(watch.wall_seconds, 3),
        **{**summary.to_dict(), "seconds_per_step": PartsOfStep(**parts)},
        run_directory=str(directory),
        plot=str(plotted) if plotted else None,
        first_failure=RankEnd(**dataclasses.asdict(report)) if report else None,
        failure=str(failure) if failure else None,
    ).to_dict()
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
    if traced:
        table.add_row("trace", str(traced))
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
