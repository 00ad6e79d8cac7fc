"""The options of the commands that talk to a cluster. Options that kubectl has too have kubectl's names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from topkube.cli import options
from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.options import OutputFormat, OutputOption

Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The kubeconfig (default: $KUBECONFIG, or ~/.kube/config).")
]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="The kubeconfig's context to use.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The namespace (default: the context's).")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0.0, help="Stop waiting after this time (exit code 124).")
]


def submit(
    program: options.Program,
    arguments: options.Arguments = None,
    sync: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Send the code in FOLDER (usually .) to the pods; ranks run in it."),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option("--requirements", "-r", metavar="FILE", help="Install these pip requirements in the pods."),
    ] = None,
    module: options.Module = False,
    workers: options.Workers = None,
    slots: options.Slots = None,
    algorithm: options.Algorithm = None,
    density: options.Density = None,
    wire: options.Wire = None,
    warmup_steps: options.WarmupSteps = None,
    checkpoint_every: options.CheckpointEvery = None,
    log: options.Loggers = None,
    name: options.JobName = None,
    image: options.Image = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Let the server check the job without changing anything; with -o yaml, print it only."
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends; exit with the job's exit code.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the job's logs until it ends; exit with the job's exit code.")
    ] = False,
    timeout: Timeout = None,
    force_conflicts: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that another tool has set.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Annotated[
        options.ManifestOutput,
        typer.Option("--output", "-o", help="text, or json on stdout; yaml with --dry-run, without the server."),
    ] = options.ManifestOutput.text,
) -> None:
    """Check a TrainingJob or the job of a script, and apply it to a cluster."""
    from topkube.cli.cluster.submit import SubmitOptions, submit_job
    from topkube.cli.script_job import Target

    if output is options.ManifestOutput.yaml and not dry_run:
        raise typer.BadParameter("yaml is the format of a job: add --dry-run", param_hint="--output")
    target = Target.from_command_line(
        program,
        arguments,
        module=module,
        workers=workers,
        slots=slots,
        algorithm=algorithm,
        density=density,
        wire=wire,
        warmup_steps=warmup_steps,
        checkpoint_every=checkpoint_every,
        log=log,
        name=name,
        image=image,
        root=sync,
    )
    chosen = SubmitOptions(
        target=target,
        location=ClusterLocation(kubeconfig, context, namespace),
        requirements=requirements,
        dry_run=dry_run,
        manifest=output is options.ManifestOutput.yaml,
        force_conflicts=force_conflicts,
        wait=wait,
        follow=follow,
        timeout_seconds=timeout,
        json=output is options.ManifestOutput.json,
    )
    raise typer.Exit(submit_job(chosen))


def status(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Name of a job; without it, all jobs are listed.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow one job until it ends.")] = False,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the jobs of all namespaces.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Show a job: phase, progress, pods, why it failed, events."""
    from topkube.cli.cluster.status import StatusOptions, show_status

    location = ClusterLocation(kubeconfig, context, namespace)
    raise typer.Exit(show_status(StatusOptions(job, location, all_namespaces, watch, output is OutputFormat.json)))


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a job.")],
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Continue until the job ends.")] = True,
    worker: Annotated[
        list[int] | None, typer.Option(metavar="INDEX", min=0, help="Show this worker only; may be repeated.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="LINES", min=0, help="Begin with this many of the last lines of each pod.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time before each line.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Show what all ranks of a job print, across restarts; exit with the job's exit code."""
    from topkube.cli.cluster.log_options import LogOptions
    from topkube.cli.cluster.logs import show_logs

    location = ClusterLocation(kubeconfig, context, namespace)
    raise typer.Exit(
        show_logs(LogOptions(job, location, follow, worker, tail, timestamps, output is OutputFormat.json))
    )


def suspend(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB…", help="Names of jobs.")],
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until their ranks have saved and their pods are gone.")
    ] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Stop waiting after this time.")] = 300.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Suspend jobs: their ranks save a checkpoint and their pods end; the jobs stay."""
    from topkube.cli.cluster.suspend import SuspendOptions, set_suspended

    location = ClusterLocation(kubeconfig, context, namespace)
    raise typer.Exit(set_suspended(SuspendOptions(jobs, location, suspend=True, wait=wait, timeout_seconds=timeout)))


def resume(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB…", help="Names of jobs.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Resume suspended jobs: they continue from their newest checkpoint."""
    from topkube.cli.cluster.suspend import SuspendOptions, set_suspended

    raise typer.Exit(
        set_suspended(SuspendOptions(jobs, ClusterLocation(kubeconfig, context, namespace), suspend=False))
    )


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB…", help="Names of jobs.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until their pods are gone.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Stop waiting after this time.")] = 300.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs and everything that belongs to them."""
    from topkube.cli.cluster.delete import DeleteOptions, delete_jobs

    raise typer.Exit(delete_jobs(DeleteOptions(jobs, ClusterLocation(kubeconfig, context, namespace), wait, timeout)))
