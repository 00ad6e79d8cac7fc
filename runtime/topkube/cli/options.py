"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class OutputFormat(StrEnum):
    """The formats of `-o`."""

    text = "text"
    json = "json"


class ManifestOutput(StrEnum):
    """The formats of `topkube run -o` and `topkube submit -o`."""

    text = "text"
    json = "json"
    yaml = "yaml"


class ProgramCommand(TyperCommand):
    """A command that runs a PROGRAM. An unknown option may be the program's own, so its error shows where those go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises click's NoSuchOption, which typer does not export."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and hasattr(error, "message"):
                error.message += f". Options of the program follow `--`: {ctx.command_path} PROGRAM -- OPTION…"
            raise


# What to run: the options of `topkube run` and `topkube submit`.
Program = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="A Python script, or a TrainingJob (.yaml), as for a cluster.")
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENT…]", help="Arguments of the script.")]
Module = Annotated[bool, typer.Option("--module", "-m", help="PROGRAM is the name of a module, as in `python -m`.")]
Workers = Annotated[int | None, typer.Option(help="Number of workers, one per node (default: the job's, or 1).")]
Slots = Annotated[int | None, typer.Option(help="Ranks per worker (default: the job's, or 1).")]
Algorithm = Annotated[
    str | None, typer.Option(metavar="NAME", help="All-reduce algorithm (default: the job's, or auto).")
]
Density = Annotated[
    float | None, typer.Option(help="Share of the gradient that is sent (default: the job's, or 0.01).")
]
Wire = Annotated[
    str | None, typer.Option(help="Format of sent values: fp32, bf16 or fp16 (default: the job's, or bf16).")
]
WarmupSteps = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Steps until the density is reached (default: the job's, or 0).")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Save a checkpoint after this many steps (default: the job's).")
]
Loggers = Annotated[
    str | None,
    typer.Option("--log", metavar="NAMES", help="Loggers, with commas: tensorboard, mlflow, wandb (default: none)."),
]
JobName = Annotated[
    str | None, typer.Option("--name", help="Name of a script's job (default: from the script's name).")
]
Image = Annotated[str | None, typer.Option(help="Image of a script's job on a cluster (default: TopKube's runtime).")]
OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="text, or json on stdout.")]
