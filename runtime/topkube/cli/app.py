"""The commands and their options. Nothing heavy is imported here: `topkube --help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from topkube import __version__
from topkube.cli.cache import cache
from topkube.cli.cluster import commands
from topkube.cli.options import Output, OutputOption
from topkube.errors import TopKubeError

BENCHES = {"select": "topkube.bench.select", "allreduce": "topkube.bench.allreduce", "cache": "topkube.bench.cache"}


class _BenchGroup(TyperGroup):
    """`topkube bench`: each measurement is a function of its own in topkube.bench, loaded when it is asked for."""

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
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(cls=_BenchGroup, help="Measure selection and all-reduce on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


@bench.callback()
def _bench() -> None:
    """Measure selection and all-reduce on this machine."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"topkube {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show Python tracebacks of errors.")] = False,
) -> None:
    """Data-parallel training that scales on ordinary cloud networks."""


@app.command()
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A TrainingJob, the same file that a cluster takes.")],
    workers: Annotated[int | None, typer.Option(help="Workers (nodes) to play, instead of the job's.")] = None,
    slots: Annotated[int | None, typer.Option(help="Ranks per worker, instead of the job's.")] = None,
    run_directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Logs, progress, checkpoints [default: runs/NAME-TIME].")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="The plot [default: plot.png in DIR].")] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no plot.")] = False,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End the run after so long [default: the job's].")
    ] = None,
    collective_deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest wait inside one collective [default: 300].")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Serve /metrics for Prometheus on 127.0.0.1; 0: any port."),
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Train here, without a cluster: start all ranks of a TrainingJob on this machine."""
    from topkube.cli.run import Options, run_job

    options = Options(
        job=job,
        workers=workers,
        slots=slots,
        run_directory=run_directory,
        plot=plot,
        draw=not no_plot,
        deadline_seconds=deadline,
        collective_deadline_seconds=collective_deadline,
        metrics_port=metrics_port,
        json=output is Output.json,
    )
    raise typer.Exit(run_job(options))


@app.command()
def doctor(output: OutputOption = Output.text) -> None:
    """Check what training here needs: MPI, the CPU kernels, torch, memory, CUDA, the cluster."""
    from topkube.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(json_output=output is Output.json))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def rank(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What this rank runs.")],
) -> None:
    """Run one rank's COMMAND: keep its log and report how it ended (used by `topkube run` and inside pods)."""
    from topkube.launch.rank import main

    main(command)


@app.command()
def launch() -> None:
    """Run one attempt of a job from its launcher pod: wait for the workers, start MPI, watch (used inside pods)."""
    from topkube.launch.launcher import run_launcher

    raise typer.Exit(run_launcher())


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def worker(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What each rank of this worker runs.")],
) -> None:
    """Be a worker: call the launcher, run COMMAND as its ranks (used inside pods)."""
    from topkube.launch.worker import run_worker

    raise typer.Exit(run_worker(command))


@app.command()
def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/settings.md.")] = False,
) -> None:
    """List the environment variables that TopKube reads."""
    from topkube.cli.settings import show_settings

    show_settings(markdown)


@app.command()
def plan(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="Take workers, slots, aggregation from it.")
    ] = None,
    parameters: Annotated[str, typer.Option(metavar="COUNT", help="Of the model, such as 25.6M or 7B.")] = "25.6M",
    link: Annotated[str, typer.Option(metavar="RATE", help="A node's link, such as 10Gbit/s.")] = "10Gbit/s",
    memory: Annotated[
        str, typer.Option(metavar="RATE", help="A node's memory (GPUs: NVLink), all its ranks together.")
    ] = "20GB/s",
    compute: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Forward and backward of one step.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Nodes [default: the job's, or 2].")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks per node [default: the job's, or 1].")] = None,
    density: Annotated[float | None, typer.Option(help="Share that is sent [default: the job's, or 0.01].")] = None,
    wire: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 [default: the job's, or bf16].")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Say what a cluster will do with a model: bytes and seconds of each all-reduce, by the cost model."""
    from topkube.cli.plan import Options, show_plan

    show_plan(Options(job, parameters, link, memory, compute, workers, slots, density, wire, output is Output.json))


@app.command()
def crd(
    kubernetes: Annotated[
        str, typer.Option(metavar="VERSION", help="The cluster's version; before 1.25 there are no CEL rules.")
    ] = "1.27",
    cached_datasets: Annotated[
        bool, typer.Option("--cached-datasets", help="That of CachedDataset, for every version.")
    ] = False,
) -> None:
    """Print the CustomResourceDefinition of TrainingJob."""
    from topkube.cli.crd import show_crd

    show_crd(kubernetes, cached_datasets)


for _command in (commands.submit, commands.status, commands.logs, commands.delete):
    app.command()(_command)


def run_app(arguments: list[str], name: str = "topkube") -> int:
    """Runs one command line and returns its exit code. --debug may stand anywhere before `--`. `name` is what help
    calls the program."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    arguments = [word for word in own if word != "--debug"] + arguments[len(own) :]
    try:
        app(arguments, prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except TopKubeError as error:
        if debug:
            raise
        from topkube.cli.errors import exit_code, show

        show(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # topkube … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
