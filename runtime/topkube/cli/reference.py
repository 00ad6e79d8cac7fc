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

What `--help` says, on one page. [Command line](cli.md) tells what the commands do, with examples. This page is
generated: `python -m topkube.cli.reference > docs/cli-reference.md`.
"""


def markdown() -> str:
    """The page."""
    root = typer.main.get_command(app)
    options = "\n".join(_table(["option", "meaning"], list(_options(root))))
    return "\n".join([_HEAD, "For all commands, before the command's name:", "", options, *_commands(root, "topkube")])


def _commands(command: Any, name: str) -> Iterator[str]:
    """Sections of a command and of those below it."""
    if hasattr(command, "list_commands"):
        for below in command.list_commands(None):
            yield from _commands(command.get_command(None, below), f"{name} {below}")
        return
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = [_metavar(one) if one.required else f"[{_metavar(one).strip('[]')}]" for one in arguments]
    yield "\n".join(["", f"## {' '.join([name, *words])}", "", _sentence(command.help or "")])
    explained = [[f"`{_metavar(one)}`", _cell(one.help)] for one in arguments if getattr(one, "help", None)]
    rows = [*explained, *_options(command)]
    if rows:
        yield "\n".join(["", *_table(["option", "meaning"], rows)])


def _options(command: Any) -> Iterator[list[str]]:
    types = typing.get_type_hints(command.callback) if command.callback else {}
    for one in command.params:
        if one.param_type_name != "option" or one.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in [*one.opts, *one.secondary_opts])
        default = one.default() if callable(one.default) else one.default
        number = f"{default:g}" if isinstance(default, float) else default
        shown = "" if one.is_flag or default in (None, "", ()) else f" Default: `{number}`."
        value = "" if one.is_flag else f" `{_metavar(one, types.get(one.name))}`"
        yield [_cell(f"{names}{value}"), f"{_sentence(_cell(one.help))}{shown}"]


def _metavar(parameter: Any, annotation: Any = None) -> str:
    """What stands for a value: as written for it, the values to choose from, or its name."""
    if parameter.metavar:
        return str(parameter.metavar)
    if typing.get_origin(annotation) is Literal:
        return "|".join(str(one) for one in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(one.value) for one in annotation)
    return str(parameter.name).upper()


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "?")) else f"{text}."


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    print(markdown())
