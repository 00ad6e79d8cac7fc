"""The commands and their options. This module imports nothing heavy, so that `topkube --help` is fast."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from topkube import __version__
from topkube.cli import options
from topkube.cli.cache import cache
from topkube.cli.cluster import commands
from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.cluster.commands import Context, Kubeconfig, Namespace
from topkube.cli.options import ManifestOutput, OutputFormat, OutputOption

BENCHES = {
    "select": "topkube.bench.select",
    "allreduce": "topkube.bench.allreduce",
    "train": "topkube.bench.train",
    "cache": "topkube.bench.cache",
}


class _BenchGroup(TyperGroup):
    """`topkube bench`: each measurement is a function in topkube.bench, loaded when it runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in BENCHES:
            return None
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(importlib.import_module(BENCHES[cmd_name]).command)
        command = typer.main.get_command(single)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="topkube",
    help="Data-parallel training that scales on ordinary cloud networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    cls=_BenchGroup, help="Measure selection, all-reduce, training steps and the data cache.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


@bench.callback()
def _bench() -> None:
    """Measure selection, all-reduce, training steps and the data cache."""


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"topkube {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show Python tracebacks of errors.")] = False,
) -> None:
    """Data-parallel training that scales on ordinary cloud networks."""


@app.command(cls=options.ProgramCommand)
def run(
    program: options.Program,
    arguments: options.Arguments = None,
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
    run_directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for logs, progress and checkpoints (default: runs/NAME-TIME)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the plot (default: plot.png in DIR).")
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no plot.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record some steps of all ranks, for Perfetto and for `topkube plan`."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            max=1e9,
            help="End the run after this time (default: the job's).",
        ),
    ] = None,
    collective_deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            max=1e9,
            help="Longest wait inside one collective (default: 300).",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Serve /metrics for Prometheus on 127.0.0.1; 0: any port."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the TrainingJob and run nothing; -o yaml (the default) or json.")
    ] = False,
    output: Annotated[
        ManifestOutput, typer.Option("--output", "-o", help="text, or json on stdout; yaml with --dry-run.")
    ] = ManifestOutput.text,
) -> None:
    """Train without a cluster: start all ranks of a script or of a TrainingJob on this machine."""
    from topkube.cli.run.command import run_job
    from topkube.cli.run.options import RunOptions
    from topkube.cli.script_job import Target

    if output is ManifestOutput.yaml and not dry_run:
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
    )
    chosen = RunOptions(
        target=target,
        run_directory=run_directory,
        plot=plot,
        draw=not no_plot,
        trace=trace,
        deadline_seconds=deadline,
        collective_deadline_seconds=collective_deadline,
        metrics_port=metrics_port,
        json=output is ManifestOutput.json,
        dry_run=None if not dry_run else "json" if output is ManifestOutput.json else "yaml",
    )
    raise typer.Exit(run_job(chosen))


@app.command()
def doctor(
    network_policy: Annotated[
        bool,
        typer.Option("--network-policy", help="Also probe, with three small pods, if the cluster enforces policies."),
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    image: Annotated[
        str | None, typer.Option(help="Image of the probe's pods, with Python (default: TopKube's runtime).")
    ] = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Check what training on this machine needs: MPI, the CPU kernels, torch, memory, CUDA, the cluster."""
    from topkube.cli.doctor.command import run_doctor

    location = ClusterLocation(kubeconfig, context, namespace)
    raise typer.Exit(run_doctor(output is OutputFormat.json, location, network_policy, image))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def rank(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What this rank runs.")],
) -> None:
    """Run COMMAND as one rank: keep its log and report how it ended (used by `topkube run` and inside pods)."""
    from topkube.launch.rank import main

    main(command)


@app.command()
def launch() -> None:
    """Run one attempt of a job from its launcher pod: wait for the workers, start MPI, watch the ranks (used inside
    pods)."""
    from topkube.launch.launcher import run_launcher

    raise typer.Exit(run_launcher())


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def worker(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What each rank of this worker runs.")],
) -> None:
    """Run a worker: call the launcher, run COMMAND as the worker's ranks (used inside pods)."""
    from topkube.launch.worker import run_worker

    raise typer.Exit(run_worker(command))


@app.command("fetch-source")
def fetch_source() -> None:
    """Fetch the source of a worker and install its packages (used inside pods)."""
    from topkube.source.fetch import fetch_source

    raise typer.Exit(fetch_source())


@app.command()
def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
    output: OutputOption = OutputFormat.text,
) -> None:
    """List the environment variables that TopKube reads."""
    from topkube.cli.settings import show_settings

    show_settings(markdown, output is OutputFormat.json)


@app.command()
def plan(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="A TrainingJob: its workers, slots and aggregation are the defaults."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Built-in model: resnet50, resnet50-96, bert-large, gpt2 or 7b."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Trace of `topkube run --trace`; repeat it for traces of other algorithms of this model.",
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Parameters of the model, such as 25.6M (the default) or 7B.")
    ] = None,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of a node's link, such as 10Gbit/s.")
    ] = "10Gbit/s",
    memory: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="Bandwidth of a node's memory (of NVLink for GPUs), for all its ranks together."
        ),
    ] = "20GB/s",
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Seconds of forward and backward of one step, or a rate such as 60TFLOP/s with --batch.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 31, metavar="SAMPLES", help="Samples per rank and step to which --compute applies."
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a rank, such as 16GB: bounds the batch of a --model.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Number of nodes (default: the job's, or 2).")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Ranks per node (default: the job's, or 1).")
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="Processor cores of a node (default: the trace's; else no thread waits for a core).",
        ),
    ] = None,
    network_cores: Annotated[
        float, typer.Option(min=0, max=1 << 20, help="Cores that the network takes while a node's link is busy.")
    ] = 0.0,
    device: Annotated[
        str | None, typer.Option(help="Where ranks compute: cpu or gpu (default: the trace's, else gpu).")
    ] = None,
    data: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1e6,
            metavar="SECONDS",
            help="Time in which the input pipeline prepares a batch.",
        ),
    ] = 0.0,
    spread: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Relative standard deviation of ranks' compute times (default: the trace's).",
        ),
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of the gradient that is sent (default: the job's, or 0.01).")
    ] = None,
    wire: Annotated[
        str | None, typer.Option(help="Format of sent values: fp32, bf16 or fp16 (default: the job's, or bf16).")
    ] = None,
    dense_wire: Annotated[
        str | None,
        typer.Option(help="Format of dense values between nodes: fp32, bf16 or fp16 (default: the job's, or fp32)."),
    ] = None,
    period: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Steps between exchanges of the weights, as of localsgd (default: the job's, or the least allowed).",
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Exchanges overlap with backward, or begin after it.")
    ] = True,
    dear: Annotated[
        bool | None,
        typer.Option(
            "--dear/--no-dear",
            help="With DeAR, half of an exchange and the update overlap with the next forward (default: the job's).",
        ),
    ] = None,
    delay: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1,
            metavar="STEPS",
            help="With 1, exchanges of weights, as of onebit, overlap with the next step (default: the job's).",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw step time and scaling from 2 to 4,096 nodes.")
    ] = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Predict steps and scaling of each all-reduce algorithm on a cluster: a simulation from a trace or a model."""
    from topkube.cli.plan.command import show_plan
    from topkube.cli.plan.options import PlanOptions

    show_plan(
        PlanOptions(
            job=job,
            model=model,
            traces=tuple(trace or ()),
            parameters=parameters,
            link=link,
            memory=memory,
            compute=compute,
            batch=batch,
            device_memory=device_memory,
            workers=workers,
            slots=slots,
            cores=cores,
            network_cores=network_cores,
            device=device,
            data=data,
            spread=spread,
            density=density,
            wire=wire,
            dense_wire=dense_wire,
            period=period,
            overlap=overlap,
            dear=dear,
            delay=delay,
            plot=plot,
            json=output is OutputFormat.json,
        )
    )


@app.command()
def crd(
    kubernetes: Annotated[
        str, typer.Option(metavar="VERSION", help="Version of the cluster. CEL rules are left out before 1.25.")
    ] = "1.25",
    cached_datasets: Annotated[
        bool,
        typer.Option(
            "--cached-datasets", help="Print the definition of CachedDataset, which is the same for every version."
        ),
    ] = False,
) -> None:
    """Print the CustomResourceDefinition of TrainingJob."""
    from topkube.cli.crd import show_crd

    show_crd(kubernetes, cached_datasets)


app.command(cls=options.ProgramCommand)(commands.submit)
for _command in (
    commands.status,
    commands.logs,
    commands.suspend,
    commands.resume,
    commands.delete,
):
    app.command()(_command)
