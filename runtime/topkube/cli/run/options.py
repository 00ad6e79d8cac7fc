"""The options of `topkube run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topkube.cli.script_job import Target


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
