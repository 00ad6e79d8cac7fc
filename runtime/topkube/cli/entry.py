"""One command line: its exit code, and what its errors print."""

from __future__ import annotations

import errno
import io
import sys

from topkube.cli.app import app
from topkube.cli.run.lasting_output import drop_rest
from topkube.errors import TopKubeError


def run_app(arguments: list[str], name: str = "topkube") -> int:
    """Run one command line and return its exit code. --debug may stand anywhere before `--`. `name` is the name of the
    program in help texts."""
    _print_without_failing()
    own_words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own_words
    arguments = [word for word in own_words if word != "--debug"] + arguments[len(own_words) :]
    try:
        code = _call_app(arguments, name)
        _flush_stdout()
    except TopKubeError as error:
        if debug:
            raise
        from topkube.cli.errors import choose_exit_code, show_error

        show_error(error)
        return choose_exit_code(error)
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it
    except BrokenPipeError:  # topkube … | head
        drop_rest(sys.stdout)
        return 141  # 128 + SIGPIPE
    except OSError as error:
        if debug or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        drop_rest(sys.stdout)
        print(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _print_without_failing() -> None:
    """Let stdout print a question mark for a character that its encoding lacks: with Latin-1 or ASCII, an arrow in a
    report must not end the command with an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _flush_stdout() -> None:
    """Write what stdout holds here, because an error at Python's exit would not be handled. An empty `print` would not
    do: if stdout is not buffered, it is a write of zero bytes, and a full device refuses that too."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _call_app(arguments: list[str], name: str) -> int:
    """Run one command line and return its exit code, if it ends without an error that `run_app` shows."""
    try:
        app(arguments, prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
