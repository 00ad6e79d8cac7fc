"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Output(StrEnum):
    """What `-o` can ask for."""

    text = "text"
    json = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text, or json on stdout.")]
