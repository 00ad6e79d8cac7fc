"""The command line, `topkube`.

`entry` runs a command line, `app` holds the commands and their options, `errors` shows failures. Each command has a
module or a folder of its own, which is loaded only when the command runs.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the console script `topkube`, and `python -m topkube.cli`."""
    arguments = sys.argv[1:]
    if os.getpid() == 1:
        # The kernel ignores a signal if the first process of a container has no handler for it. Without this handler a
        # pod that is deleted while the command starts would wait for SIGKILL.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    if arguments[:1] == ["rank"] and arguments[1:2] != ["--help"]:
        # This runs once per rank: without the parser it starts in a third of the time.
        from topkube.launch.rank import main as run_rank

        run_rank(arguments[1:])
    from topkube.cli.entry import run_app

    raise SystemExit(run_app(arguments))


def kubectl_main() -> None:
    """Run `kubectl-topkube`, which kubectl runs as `kubectl topkube`."""
    from topkube.cli.entry import run_app

    raise SystemExit(run_app(sys.argv[1:], "kubectl topkube"))
