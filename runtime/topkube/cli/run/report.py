"""The end of a run: summary.json, the plot, the trace, and the table of results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topkube import algorithms
from topkube.cli.run.summary import PartsOfStep, RankEnd, RunSummary
from topkube.cli.run.watch import RunWatch
from topkube.errors import LaunchError
from topkube.files import write_json
from topkube.job import TrainingJob
from topkube.telemetry.plot import PlotError, draw
from topkube.telemetry.summary import list_rows, summarize
from topkube.telemetry.trace_files import TraceError, write_merged_trace

TRACES = "traces"
"""The folder of the run's directory in which ranks write their traces."""


def _write_trace(directory: Path, path: Path, console: Console) -> Path | None:
    """Write the trace of all ranks to `path`. Return None, with a warning, if there is none or the disk refuses it."""
    try:
        write_merged_trace(directory, path)
    except (TraceError, OSError) as error:
        say(console, f"warning: no trace was written to {path}: {error}")
        return None
    return path


def report_run(watch: RunWatch, failure: LaunchError | None) -> None:
    """Draw the plot, write the trace and summary.json, and print the results as a table or JSON."""
    options, job, history, console = watch.options, watch.job, watch.history, watch.console
    directory, nodes = watch.local.directory, job.spec.workers
    summary = summarize(history, nodes, job.ranks)
    plotted: Path | None = None
    if options.draw and history.steps:
        plotted = options.plot or directory / "plot.png"
        try:
            draw(
                history,
                plotted,
                f"{job.name}: {nodes} x {job.spec.slots_per_worker} ranks, {describe_aggregation(job)}",
            )
        except PlotError as error:
            plotted = None
            say(console, f"warning: {error}")
    traced = _write_trace(directory / TRACES, options.trace, console) if options.trace is not None else None
    report = watch.local.find_failed_report() if failure else None
    outcome: Literal["succeeded", "failed", "interrupted"]
    outcome = "interrupted" if watch.interrupted_by else ("failed" if failure else "succeeded")
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
    try:
        write_json(directory / "summary.json", values, indent=1)
    except OSError as error:
        say(console, f"warning: the summary cannot be written: {error}")
    if options.json:
        json.dump(values, sys.stdout, indent=1)
        print(flush=True)
        return
    rows = list(list_rows(summary, history, nodes, job.ranks, watch.wall_seconds)) if history.steps else []
    rows.append(("logs", f"{directory}/rank-*.log"))
    if plotted:
        rows.append(("plot", str(plotted)))
    if traced:
        rows.append(("trace", str(traced)))
    if job.spec.checkpoint:
        rows.append(("checkpoints", f"{directory}/checkpoints"))
    colour = {"succeeded": "green", "failed": "red", "interrupted": "yellow"}[outcome]
    console.print(f"\n[bold]{job.name}[/bold] [{colour}]{outcome}[/{colour}]", highlight=False)
    if console.is_terminal:
        console.print(build_result_table(rows))
    else:
        for name, value in rows:
            say(console, f"{name:<20} {value}")
    if not history.is_measured and outcome == "succeeded":
        unknown = "loss, times and bytes are unknown" if history.steps else "no steps were reported"
        say(console, f"{unknown}: use `with topkube.checkpointing(...) as run` and run.progress(...) in the script")


def build_result_table(rows: list[tuple[str, str]]) -> Table:
    """Return the table of the results for a terminal. Values are shown as they are: paths may contain [brackets]."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def describe_aggregation(job: TrainingJob) -> str:
    """Return the aggregation in a few words: 'hitopk at density 0.01'."""
    return algorithms.describe(job.spec.aggregation.algorithm, job.spec.aggregation.density)


def say(console: Console, text: str) -> None:
    """Print a line as it is: not wrapped, and without markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
