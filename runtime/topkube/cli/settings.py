"""`topkube settings`: list every environment variable, from the class that reads them."""

from __future__ import annotations

import dataclasses
import json

from topkube.cli.columns import align_columns
from topkube.settings import Settings, list_set_variables


def show_settings(markdown: bool, as_json: bool) -> None:
    """Print the table, docs/settings.md, or the table as JSON, in which the present value is null if it is not set."""
    if markdown:
        print(build_settings_page(), end="")
        return
    values = list_set_variables()
    if as_json:
        entries = [
            {
                "variable": entry.metadata["variable"],
                "default": entry.default,
                "now": values.get(entry.metadata["variable"]),
                "help": _describe_variable(entry),
            }
            for entry in dataclasses.fields(Settings)
        ]
        print(json.dumps(entries, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [
        [
            entry.metadata["variable"],
            str(entry.default),
            values.get(entry.metadata["variable"], ""),
            _describe_variable(entry),
        ]
        for entry in dataclasses.fields(Settings)
    ]
    head, console = ["variable", "default", "now", "what it does"], Console()
    if not console.is_terminal:  # a line for each variable, so that other programs can read it
        print("\n".join(align_columns([head, *rows], "")))
        return
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))  # values may contain what rich takes for markup
    console.print(table)


def build_settings_page() -> str:
    """Return the text of docs/settings.md."""
    lines = [
        "# Environment variables",
        "",
        "`topkube run` and the operator set them from the TrainingJob. Set them by hand for a script that is",
        "started with plain `mpiexec`. This page is generated: `topkube settings --markdown > docs/settings.md`.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    for entry in dataclasses.fields(Settings):
        default = f"`{entry.default}`" if entry.default != "" else ""
        lines.append(f"| `{entry.metadata['variable']}` | {default} | {_describe_variable(entry)} |")
    return "\n".join(lines) + "\n"


def _describe_variable(entry: dataclasses.Field[object]) -> str:
    choices = entry.metadata["choices"]
    return str(entry.metadata["help"]) + (f" ({', '.join(choices)})" if choices else "")
