"""Start a job on this machine: its directory, its environment, the first lines of output."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal, cast

from rich.console import Console

from topkube.cli.output_file import check_output_file
from topkube.cli.run.lasting_output import LastingOutput
from topkube.cli.run.options import RunOptions
from topkube.cli.run.report import TRACES, describe_aggregation, report_run, say
from topkube.cli.run.watch import RunWatch, Signals
from topkube.cli.script_job import Target, load_job
from topkube.environment import copy_environment
from topkube.job import TrainingJob
from topkube.job.algorithm_name import is_foreign
from topkube.launch.local import (
    LocalRun,
    build_rank_command,
    build_rank_environment,
    is_this_python,
)
from topkube.launch.mpi import mpi_library
from topkube.launch.run_directory import open_fresh_directory
from topkube.processors import count_cores
from topkube.settings import Settings
from topkube.telemetry.history import History
from topkube.telemetry.loggers import check_loggers, find_log_folder
from topkube.telemetry.plot import check_ending


def run_job(options: RunOptions) -> int:
    """Run the job and return the exit code: 0, or 128 + number after a signal. Raises TopKubeError; LaunchError has the
    exit code of the rank that failed."""
    job = load_job(options.target)
    if options.dry_run is not None:
        return _print_job(job, options.dry_run, options.target)
    if options.plot is not None and options.draw:
        check_ending(options.plot)
        check_output_file("--plot", options.plot)
    if options.trace is not None:
        check_output_file("--trace", options.trace)
    loggers = check_loggers(options.target.loggers or "")
    mpi = mpi_library.find_mpi()
    with open_fresh_directory(options.run_directory, job, time.localtime()) as directory:
        return _run_in(directory, options, job, mpi, loggers)


def _run_in(
    directory: Path, options: RunOptions, job: TrainingJob, mpi: mpi_library.Mpi, loggers: tuple[str, ...]
) -> int:
    environment = build_rank_environment(job, mpi, directory, copy_environment(), options.collective_deadline_seconds)
    if options.trace is not None:
        shutil.rmtree(directory / TRACES, ignore_errors=True)  # of an earlier run in this directory
        environment["TOPKUBE_TRACE_DIRECTORY"] = str((directory / TRACES).resolve())
    if is_this_python(build_rank_command(job, environment)):
        mpi_library.check_same_mpi(mpi, mpi_library.read_library())
    stream = sys.stderr if options.json else sys.stdout
    output = LastingOutput(stream) if stream is not None else None
    console = Console(file=cast("IO[str] | None", output), stderr=options.json)
    history = History()
    with Signals() as signals, contextlib.ExitStack() as stack:
        stack.callback(_free_memory, environment)
        watch = RunWatch(options, job, LocalRun(job, mpi, directory, environment), history, console, signals)
        if options.metrics_port is not None:
            from topkube.telemetry.endpoint import MetricsEndpoint

            endpoint = stack.enter_context(
                MetricsEndpoint(lambda: directory, job.name, options.metrics_port, "127.0.0.1")
            )
            say(console, f"metrics for Prometheus at http://127.0.0.1:{endpoint.port}/metrics")
        _announce(console, job, mpi, directory)
        if loggers:
            say(console, f"{', '.join(loggers)}: {find_log_folder(Settings.from_environment(environment), directory)}")
        failure = watch.run()
        report_run(watch, failure)
        if output is not None and output.problem:
            output.give_up()
            _warn_of_lost_output(output.problem, directory)
    if watch.interrupted_by is not None:
        return 128 + watch.interrupted_by
    if failure is not None:
        raise failure
    return 0


def _free_memory(environment: Mapping[str, str]) -> None:
    """Remove the samples that killed ranks have left in memory."""
    from topkube.data.cache.memory_folder import remove_unused_memory

    remove_unused_memory(Settings.from_environment(environment))


def _warn_of_lost_output(problem: str, directory: Path) -> None:
    text = f"a part of this command's output is lost: {problem}; the output of all ranks is in {directory}/rank-*.log"
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr)


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


def _announce(console: Console, job: TrainingJob, mpi: mpi_library.Mpi, directory: Path) -> None:
    spec = job.spec
    say(
        console,
        f"{job.name}: {spec.workers} x {spec.slots_per_worker} ranks, {describe_aggregation(job)}, {mpi};"
        f" logs in {directory}",
    )
    if job.ranks > count_cores():
        say(console, f"warning: {job.ranks} ranks share {count_cores()} cores and wait for each other")
    if spec.mpi_implementation != mpi.implementation:
        say(console, f"warning: the job's image has {spec.mpi_implementation}; this machine uses {mpi}")
    if spec.dataset is not None and not Path(spec.dataset.mount_path).exists():
        say(console, f"warning: {spec.dataset.mount_path} does not exist; on a cluster it holds {spec.dataset.uri}")
    if is_foreign(spec.aggregation.algorithm):
        say(console, f"warning: {spec.aggregation.algorithm} is not installed here; the script must register it")
    if spec.source is not None:
        say(console, f"note: spec.source has no effect without a cluster; the ranks run in {Path.cwd()}")
    if spec.setup is not None:
        say(console, "note: spec.setup has no effect without a cluster; the ranks have the packages of this Python")
    if spec.run_policy.suspend:
        say(console, "note: runPolicy.suspend has no effect without a cluster")
