"""The limits of Linux on a command's arguments and environment, which are checked before a rank starts.

A program with more arguments does not start: execve fails with E2BIG, "Argument list too long", and the process that
called it often cannot report why. See execve(2), "Limits on size of arguments and environment".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from topkube.errors import LaunchError

STRING_BYTES = 128 << 10
"""The longest argument or variable, with its final NUL (MAX_ARG_STRLEN: 32 pages of 4 KiB)."""
_MOST_BYTES = 6 << 20
"""The limit for all arguments and variables together if the stack's size is unlimited: 3/4 of 8 MiB."""
_RESERVE_BYTES = 64 << 10
"""Room for the variables that MPI and TopKube add to a rank's environment, and for the shim around the command."""
_POINTER_BYTES = 8
_SHOWN_WORDS, _SHOWN_CHARACTERS = 64, 1024
NOT_RUNNABLE_CODE = 126
"""Exit code of a command that cannot be run, as in a shell."""


def check_arguments(command: Iterable[str], environment: Mapping[str, str], most: int | None = None) -> None:
    """Raise LaunchError if Linux would not start `command` with `environment` as a rank. `most` is the limit for both
    together, in bytes (default: this system's ARG_MAX)."""
    words = [os.fsencode(word) for word in command]
    variables = {name: os.fsencode(name) + b"=" + os.fsencode(value) for name, value in environment.items()}
    for number, word in enumerate(words):
        if len(word) >= STRING_BYTES:
            raise _build_error(
                f"argument {number} of the command has {len(word)} bytes", STRING_BYTES - 1, "for an argument"
            )
    for name, variable in variables.items():
        if len(variable) >= STRING_BYTES:
            raise _build_error(
                f"the environment variable {name[:_SHOWN_CHARACTERS]} has {len(variable)} bytes with its name",
                STRING_BYTES - 1,
                "for a variable",
            )
    most = min(os.sysconf("SC_ARG_MAX"), _MOST_BYTES) if most is None else most
    arguments = sum(len(word) + 1 + _POINTER_BYTES for word in words)
    total = arguments + sum(len(variable) + 1 + _POINTER_BYTES for variable in variables.values())
    if total > most - _RESERVE_BYTES:
        raise _build_error(
            f"the command has {len(words)} arguments with {arguments} bytes, and its environment has {len(variables)} "
            f"variables with {total - arguments} bytes",
            most - _RESERVE_BYTES,
            "for both together",
        )


def _build_error(what: str, most: int, scope: str) -> LaunchError:
    return LaunchError(
        f"{what}; Linux takes {most} bytes {scope}",
        exit_code=NOT_RUNNABLE_CODE,
        cause="a list (of files, of hyperparameters) is passed on the command line or in a variable",
        next_step="write the list to a file, for example a ConfigMap that the pods mount, and pass the file's path",
    )


def shorten_command(command: list[str]) -> list[str]:
    """Return the command for reports and messages: long words are cut, and of many words the first are kept."""
    words = [
        word if len(word) <= _SHOWN_CHARACTERS else word[:_SHOWN_CHARACTERS] + "…" for word in command[:_SHOWN_WORDS]
    ]
    return words if len(command) <= _SHOWN_WORDS else [*words, "…"]
