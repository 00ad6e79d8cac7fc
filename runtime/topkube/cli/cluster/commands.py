"""The options of the commands that talk to a cluster; kubectl's words for kubectl's things."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from topkube.cli.cluster.api import Where
from topkube.cli.options import Output, OutputOption

Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The kubeconfig [default: $KUBECONFIG, or ~/.kube/config].")
]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="The kubeconfig's context to use.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The namespace [default: the context's].")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Wait no longer (exit code 124).")]


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A TrainingJob.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Have the server check it, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end; exit with its exit code.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its logs until its end; the same.")] = False,
    timeout: Timeout = None,
    force_conflicts: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that another tool has set.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.text,
) -> None:
    """Check a TrainingJob and apply it to a cluster."""
    from topkube.cli.cluster.submit import Options, submit_job

    options = Options(
        job=job,
        where=Where(kubeconfig, context, namespace),
        dry_run=dry_run,
        force_conflicts=force_conflicts,
        wait=wait,
        follow=follow,
        timeout_seconds=timeout,
        json=output is Output.json,
    )
    raise typer.Exit(submit_job(options))


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A job's name; without one, a table.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow one job to its end.")] = False,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="The table of all namespaces.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.text,
) -> None:
    """Show a job: phase, progress, pods, why it failed, events."""
    from topkube.cli.cluster.status import Options, show_status

    where = Where(kubeconfig, context, namespace)
    raise typer.Exit(show_status(Options(job, where, all_namespaces, watch, output is Output.json)))


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's name.")],
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on until the job ends.")] = True,
    worker: Annotated[
        list[int] | None, typer.Option(metavar="INDEX", help="This worker alone; may be repeated.")
    ] = None,
    tail: Annotated[int | None, typer.Option(metavar="LINES", help="Begin with the last lines of each pod.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time before each line.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.text,
) -> None:
    """Follow what all ranks of a job print, across restarts; exit with the job's exit code."""
    from topkube.cli.cluster.logs import Options, show_logs

    where = Where(kubeconfig, context, namespace)
    raise typer.Exit(show_logs(Options(job, where, follow, worker, tail, timestamps, output is Output.json)))


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB…", help="Names of jobs.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until their pods are gone.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait no longer.")] = 300.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs with all that belongs to them."""
    from topkube.cli.cluster.delete import Options, delete_jobs

    raise typer.Exit(delete_jobs(Options(jobs, Where(kubeconfig, context, namespace), wait, timeout)))
