"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """The formats of `-o`."""

    text = "text"
    json = "json"


class RunOutput(StrEnum):
    """The formats of `topkube run -o`."""

    text = "text"
    json = "json"
    yaml = "yaml"


OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="text, or json on stdout.")]
