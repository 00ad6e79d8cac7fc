"""docs/cli-reference.md, from the commands themselves: `python -m topkube.cli.reference > docs/cli-reference.md`."""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterator
from typing import Any, Literal

import typer

from topkube.cli.app import app

_HEAD = """\
# Every command and option

This page has the text of `--help` for every command. [Command line](cli.md) explains the commands, with examples.
This page is generated: `python -m topkube.cli.reference > docs/cli-reference.md`.
"""


def build_page() -> str:
    """Return the page."""
    root = typer.main.get_command(app)
    options = "\n".join(_format_table(["option", "meaning"], list(_list_options(root))))
    return "\n".join(
        [_HEAD, "For all commands, before the command's name:", "", options, *_list_sections(root, "topkube")]
    )


def _list_sections(command: Any, name: str) -> Iterator[str]:
    """Yield the sections of a command and of its subcommands."""
    if hasattr(command, "list_commands"):
        for subcommand in command.list_commands(None):
            yield from _list_sections(command.get_command(None, subcommand), f"{name} {subcommand}")
        return
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = [
        _choose_placeholder(parameter) if parameter.required else f"[{_choose_placeholder(parameter).strip('[]')}]"
        for parameter in arguments
    ]
    yield "\n".join(["", f"## {' '.join([name, *words])}", "", _end_sentence(command.help or "")])
    explained = [
        [f"`{_choose_placeholder(parameter)}`", _format_cell(parameter.help)]
        for parameter in arguments
        if getattr(parameter, "help", None)
    ]
    rows = [*explained, *_list_options(command)]
    if rows:
        yield "\n".join(["", *_format_table(["option", "meaning"], rows)])


def _list_options(command: Any) -> Iterator[list[str]]:
    types = typing.get_type_hints(command.callback) if command.callback else {}
    for option in command.params:
        if option.param_type_name != "option" or option.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        default = option.default() if callable(option.default) else option.default
        number = f"{default:g}" if isinstance(default, float) else default
        shown = "" if option.is_flag or default in (None, "", ()) else f" Default: `{number}`."
        value = "" if option.is_flag else f" `{_choose_placeholder(option, types.get(option.name))}`"
        yield [_format_cell(f"{names}{value}"), f"{_end_sentence(_format_cell(option.help))}{shown}"]


def _choose_placeholder(parameter: Any, annotation: Any = None) -> str:
    """Return the placeholder of a value: its metavar, its choices, or its name."""
    if parameter.metavar:
        return str(parameter.metavar)
    if typing.get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(choice.value) for choice in annotation)
    return str(parameter.name).upper()


def _format_cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _end_sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "?")) else f"{text}."


def _format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    print(build_page())
