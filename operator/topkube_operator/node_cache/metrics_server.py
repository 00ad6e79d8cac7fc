"""`python -m topkube_operator.node_cache.metrics_server`: serves the file with the agent's metrics.

The agent starts this process, and starts it again if it ends. The process ends when the agent ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from topkube.errors import TopKubeError
from topkube_operator.http.certificates import Authority
from topkube_operator.http.probes import Probes
from topkube_operator.http.scrape_access import TokenCheck, add_scrape_options, read_scrape_options
from topkube_operator.watch.api_client import ApiClient

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0


class MetricsServer:
    """The process that serves `file` with the given `arguments`."""

    def __init__(self, file: Path, port: int, arguments: Sequence[str]) -> None:
        self._command = [
            *(sys.executable, "-m", __name__, f"--file={file}", f"--port={port}", f"--parent={os.getpid()}"),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        """Start the process if it does not run."""
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            _log.warning("the process that serves the metrics has ended with status %d; starting it again", code)
        self._process = subprocess.Popen(self._command)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal, or until the agent has ended. Return the exit status."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    scrape = read_scrape_options(parser, options)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        allows = (
            TokenCheck(ApiClient(options.kubeconfig).call).allows if scrape.authentication == "kubernetes" else None
        )
        probes = Probes(
            options.port,
            options.file.read_bytes,
            lambda: "",
            lambda: "" if options.file.exists() else "the agent has not finished its first pass",
            tls=scrape.build_context(Authority.create_random(), (socket.gethostname(), "localhost")),
            certificate=scrape.certificate,
            allows=allows,
        )
    except (TopKubeError, OSError) as error:
        print(f"topkube node cache: the metrics cannot be served on port {options.port}: {error}", file=sys.stderr)
        return 1
    probes.start()
    while os.getppid() == options.parent and not stop.wait(_CHECK_SECONDS):
        pass
    probes.stop()
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serves the metrics of a node's agent.")
    parser.add_argument("--file", type=Path, required=True, help="the file with the metrics")
    parser.add_argument("--port", type=int, required=True, help="port of /metrics and /readyz")
    parser.add_argument("--parent", type=int, required=True, help="process id of the agent")
    parser.add_argument("--kubeconfig", default="", help="outside a cluster: the kubeconfig to use")
    add_scrape_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
