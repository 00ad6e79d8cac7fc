"""A real Prometheus on the loopback address that scrapes given targets: Debian's package, `apt-get install
prometheus`."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from monitoring.generated import ROOT
from monitoring.prometheus import Prometheus

BINARY = shutil.which("prometheus")
INTERVAL = "60s"
"""The value of $__rate_interval. It contains two scrapes of `prometheus`, even on a busy machine."""


def build_target(name: str, address: str, *, honor_labels: bool = False, **labels: str) -> dict[str, Any]:
    """Return a scrape job with one target, and the labels that Kubernetes would give it."""
    return {
        "job_name": name,
        "honor_labels": honor_labels,
        "static_configs": [{"targets": [address], "labels": labels}],
    }


def build_file_target(name: str, path: Path) -> dict[str, Any]:
    """Return a scrape job with the targets of a JSON file that may change: [{"targets": [...], "labels": {...}}]."""
    return {"job_name": name, "file_sd_configs": [{"files": [str(path)], "refresh_interval": "1s"}]}


@contextlib.contextmanager
def run_prometheus(directory: Path, jobs: Sequence[dict[str, Any]], seconds: int = 2) -> Iterator[Prometheus]:
    """Run the scrape `jobs` and evaluate the alerts, both every `seconds`, until the block ends."""
    assert BINARY is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    interval = f"{seconds}s"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(ROOT / "charts/topkube/files/alerts.yaml")],
        "scrape_configs": list(jobs),
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (directory / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                BINARY,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    client = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: client.call_api("status/runtimeinfo"), "Prometheus to answer", 30)
        yield client
    finally:
        server.terminate()
        server.wait(20)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Return the first true value of `condition`. A refused connection counts as false. Raises AssertionError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")
