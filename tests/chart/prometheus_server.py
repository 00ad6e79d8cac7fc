"""A real Prometheus on loopback that scrapes given targets."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from monitoring.generated import ROOT
from monitoring.prometheus import Prometheus

BINARY = shutil.which("prometheus")
INTERVAL = "20s"
"""What stands for $__rate_interval: long enough for two scrapes on a machine that is busy."""


def target(name: str, address: str, *, honor_labels: bool = False, **labels: str) -> dict[str, Any]:
    """A scrape job with one target, and the labels that Kubernetes would give it."""
    return {
        "job_name": name,
        "honor_labels": honor_labels,
        "static_configs": [{"targets": [address], "labels": labels}],
    }


@contextlib.contextmanager
def prometheus(directory: Path, targets: list[dict[str, Any]]) -> Iterator[Prometheus]:
    """Scrapes `targets` every second and evaluates the alerts; ends with the block."""
    assert BINARY is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "charts/topkube/files/alerts.yaml")],
        "scrape_configs": targets,
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
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(20)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of `condition`; a connection that is refused counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")
