"""`topkube settings`: list every environment variable, from the class that reads them."""

from __future__ import annotations

import dataclasses

from topkube.settings import Settings, list_set_variables


def show_settings(markdown: bool) -> None:
    """Print the table, or docs/settings.md."""
    if markdown:
        print(build_settings_page(), end="")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("variable", "default", "now", "what it does", box=None, pad_edge=False, header_style="bold")
    values = list_set_variables()
    for entry in dataclasses.fields(Settings):
        variable = entry.metadata["variable"]
        table.add_row(variable, str(entry.default), values.get(variable, ""), _describe_variable(entry))
    Console().print(table)


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
