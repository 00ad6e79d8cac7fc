"""Show a failure: what happened, the likely cause, the next step. Tracebacks are shown only with --debug."""

from __future__ import annotations

from topkube.errors import LaunchError, TopKubeError


def choose_exit_code(error: TopKubeError) -> int:
    """Return 2 for a mistake of the user, the exit code of the rank that failed, or 1."""
    if isinstance(error, LaunchError):
        return error.exit_code
    return 2 if isinstance(error, ValueError) else 1


def show_error(error: TopKubeError) -> None:
    """Print the error to stderr, in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    shown = Text.assemble(("error: ", "bold red"), (error.what, "red"))
    if error.cause:
        shown.append_text(Text.assemble("\n", ("likely cause: ", "bold"), error.cause))
    if error.next_step:
        shown.append_text(Text.assemble("\n", ("next: ", "bold"), error.next_step))
    console.print(shown, soft_wrap=True)
