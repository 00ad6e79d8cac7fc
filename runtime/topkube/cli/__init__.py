"""The command line, `topkube`.

`app` holds the commands and their options, `errors` how a failure is shown; one module per command does the work and is
loaded only when that command runs.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the console script, and of `python -m topkube.cli`."""
    arguments = sys.argv[1:]
    if os.getpid() == 1:
        # The kernel passes over signals that the first process of a container has no handler for: until the command
        # has its own, a pod that is deleted while it starts would wait for SIGKILL.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    if arguments[:1] == ["rank"] and arguments[1:2] != ["--help"]:
        # Started once per rank: without the parser, it is there in a third of the time.
        from topkube.launch.rank import main as rank

        rank(arguments[1:])
    from topkube.cli.app import run_app

    raise SystemExit(run_app(arguments))


def kubectl_main() -> None:
    """Entry point of `kubectl-topkube`, which kubectl runs as `kubectl topkube`."""
    from topkube.cli.app import run_app

    raise SystemExit(run_app(sys.argv[1:], "kubectl topkube"))
