"""The result of a measurement: a table for people, JSON for programs, and the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from topkube.errors import ArgumentError
from topkube.files import explain_unwritable

_WIDTH_OF_FILES = 240
"""Columns of a table that goes to a file or a pipe: more than any table needs."""
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Timing:
    """The seconds of repeated runs."""

    median: float
    minimum: float
    maximum: float
    repeats: int


def time_runs(
    run: Callable[[], object], *, repeats: int, warmups: int = 1, prepare: Callable[[], object] | None = None
) -> Timing:
    """Call `run` `repeats` times after `warmups` unmeasured calls. `prepare` is called before each run, unmeasured."""
    assert repeats >= 1
    seconds = []
    for turn in range(warmups + repeats):
        if prepare is not None:
            prepare()
        start = perf_counter()
        run()
        elapsed = perf_counter() - start
        if turn >= warmups:
            seconds.append(elapsed)
    return Timing(median(seconds), min(seconds), max(seconds), repeats)


def describe_machine() -> dict[str, Cell]:
    """Return facts about the machine, without which figures cannot be compared: processor, cores, system, Python."""
    return {
        "processor": _read_processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def _read_processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_path(path: Path | None) -> None:
    """Raise ArgumentError if no file can be written at `path`: before a measurement of minutes, not after it."""
    if path is not None and (problem := explain_unwritable(path)):
        raise _build_path_error(path, problem)


def _build_path_error(path: Path, reason: str) -> ArgumentError:
    return ArgumentError(f"the figures cannot be written to {path}: {reason}", next_step="pass another --json FILE")


@dataclass
class BenchReport:
    """The report of a measurement: `rows` are mappings with the keys of `columns`; a missing key prints as a dash.

    `columns` maps each key to its heading, units included. `facts` holds the conditions of the figures: the machine,
    probed bandwidths, sizes."""

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    facts: dict[str, Cell] = field(default_factory=describe_machine)

    def add(self, **row: Cell) -> None:
        """Add a row. Its keys are among those of `columns`."""
        unknown = row.keys() - self.columns.keys()
        assert not unknown, f"columns {sorted(unknown)} are not among {list(self.columns)}"
        self.rows.append(row)

    def build_table(self) -> Table:
        """Return the rows as a rich table, with the facts below it."""
        facts = " · ".join(f"{name} {_format_cell(value)}" for name, value in self.facts.items())
        table = Table(title=self.title, caption=facts, title_justify="left", caption_justify="left")
        for key, heading in self.columns.items():
            numbers = any(isinstance(row.get(key), (int, float)) for row in self.rows)
            # In a narrow terminal, headings of numbers wrap; names are never cut.
            table.add_column(heading, justify="right" if numbers else "left", no_wrap=not numbers)
        for row in self.rows:
            table.add_row(*(_format_cell(row.get(key)) for key in self.columns))
        return table

    def show(self) -> None:
        """Print the table. In a terminal it has the width of the terminal; in a file or a pipe nothing is cut."""
        console = Console()
        (console if console.is_terminal else Console(width=_WIDTH_OF_FILES)).print(self.build_table())

    def write(self, path: Path | None) -> None:
        """Write the report as JSON to `path`, if there is one. Raises ArgumentError if the disk refuses it."""
        if path is None:
            return
        try:
            path.write_text(self.to_json())
        except OSError as error:
            raise _build_path_error(path, str(error.strerror)) from None

    def to_json(self) -> str:
        """Return the report as JSON text: title, columns, facts, rows."""
        content: dict[str, Any] = {
            "title": self.title,
            "facts": self.facts,
            "columns": dict(self.columns),
            "rows": self.rows,
        }
        return json.dumps(content, indent=1) + "\n"


def _format_cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
