"""vmagent of VictoriaMetrics with the configuration of docs/monitoring.md, as it stands there. Debian's Prometheus
cannot find pods, so vmagent also proves the selection of pods and their labels."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import build_endless_steps, build_job
from target import Namespace, Target, wait_for

from monitoring.prometheus import Prometheus
from monitoring.server import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("vmagent", "victoria-metrics")


def _read_scrape_configs(target: Target) -> list[dict[str, Any]]:
    """Return the scrape configurations of the docs. vmagent runs outside of the cluster, so they get the address of the
    API server and the account of `target`."""
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL)
    access = target.client.configuration
    server = {
        "api_server": access.host,
        "tls_config": {"ca_file": access.ssl_ca_cert, "cert_file": access.cert_file, "key_file": access.key_file},
    }
    configs: list[dict[str, Any]] = yaml.safe_load(text)["scrape_configs"]
    for config in configs:
        config["kubernetes_sd_configs"] = [discovery | server for discovery in config["kubernetes_sd_configs"]]
    return configs


def _choose_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def _start_program(folder: Path, program: str, *options: str) -> Iterator[str]:
    """Run a program of VictoriaMetrics until the block ends. Yield its address."""
    address = _choose_address()
    with (folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen([program, f"-httpListenAddr={address}", *options], stdout=log, stderr=log)
    try:
        wait_until(lambda: urllib.request.urlopen(f"http://{address}/health", timeout=10).status == 200, program)
        yield address
        assert process.poll() is None, (folder / f"{program}.log").read_text()[-2000:]
    finally:
        process.terminate()
        process.wait(20)


def test_vmagent_scrapes_operator_and_workers_with_the_configuration_of_the_docs(
    namespace: Namespace, tmp_path: Path
) -> None:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install victoria-metrics")
    if namespace.target.local is None:
        pytest.skip("needs a cluster of this machine's own: pods must be reached from here")
    config = {"global": {"scrape_interval": "2s"}, "scrape_configs": _read_scrape_configs(namespace.target)}
    (tmp_path / "scrape.yaml").write_text(yaml.safe_dump(config))
    name = namespace.create(build_job("scraped", build_endless_steps()))
    namespace.wait_phase(name, "Running")
    keep = (f"-storageDataPath={tmp_path / 'data'}", "-search.latencyOffset=0s")
    scrape = (f"-promscrape.config={tmp_path / 'scrape.yaml'}", f"-remoteWrite.tmpDataPath={tmp_path / 'queue'}")
    with (
        _start_program(tmp_path, "victoria-metrics", *keep) as store,
        _start_program(tmp_path, "vmagent", *scrape, f"-remoteWrite.url=http://{store}/api/v1/write"),
    ):
        server = Prometheus(f"http://{store}")

        def read_pods(metric: str) -> set[str]:
            series = server.query(f'{metric}{{namespace="{namespace.name}"}}')
            return {entry.labels["pod"] for entry in series if entry.points[-1][1] >= 0}

        workers = {pod.metadata.name for pod in namespace.list_pods("worker")}
        wait_for(lambda: read_pods("topkube_runtime_build_info") == workers, f"metrics of {workers}", 60)
        operators = {pod.metadata.name for pod in namespace.target.list_operator_pods()}
        wait_for(lambda: read_pods("topkube_jobs") & operators, f"the job, as one of {operators} counts it", 60)
