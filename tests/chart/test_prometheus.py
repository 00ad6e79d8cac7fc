"""Dashboards and alerts against a real Prometheus that scrapes a real run: every query returns values, and every metric
and label in a panel or an alert exists."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.alerts import ALERTS
from monitoring.dashboards import DASHBOARDS
from monitoring.grafana import Dashboard, Panel
from monitoring.pictures import draw_dashboard
from monitoring.prometheus import Prometheus, QueryError, fill_variables
from monitoring.server import BINARY, INTERVAL, build_target, run_prometheus, wait_until
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.http.probes import Probes
from topkube_operator.node_cache.decisions import LocalDataset
from topkube_operator.node_cache.metrics import AgentMetrics
from topkube_operator.watch.work_queue import WorkQueue

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs prometheus: apt-get install prometheus")
JOB, WEIGHTS_JOB = "cached", "one-bit"
ALGORITHMS = {JOB: "hitopk", WEIGHTS_JOB: "onebit"}
"""Some metrics come from one of these runs only: residuals from hitopk, node weights from onebit."""
STORED: list[dict[str, Any]] = [
    {
        "metadata": {"name": JOB, "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"checkpoint": {"claimName": "checkpoints"}},
        "status": {
            "phase": "Running",
            "startTime": "2026-01-01T00:00:00Z",
            "restarts": 1,
            "progress": {"step": 1, "totalSteps": 2},
            "avoidedNodes": [{"name": "node-b", "reason": "OOMKilled", "until": "2026-01-01T01:00:00Z"}],
            "firstFailure": {"pod": f"{JOB}-worker-1-1", "rank": 1, "reason": "OOMKilled"},
        },
    },
    {"metadata": {"name": "next", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}},
    {
        "metadata": {"name": "over", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {"phase": "Failed", "completionTime": "2026-01-01T00:00:00Z"},
    },
]


def build_operator_metrics() -> OperatorMetrics:
    """Return metrics of an operator to which something of every kind happens before each scrape."""

    def list_jobs() -> list[dict[str, Any]]:
        metrics.count_transition("ml", "Running")
        metrics.observe_start("ml", 2.0)
        metrics.count_restart("ml", "OOMKilled")
        metrics.observe_reconcile(0.01, "changed")
        metrics.observe_queued(0.01)
        metrics.observe_call("GET", 200, 0.01)
        metrics.observe_review("allowed", 0.01)
        metrics.count_created()
        return STORED

    metrics = OperatorMetrics(list_jobs)
    metrics.set_leader(True)
    metrics.set_serving(4e9, True)
    metrics.watch_queue(WorkQueue())
    return metrics


def build_agent_metrics() -> AgentMetrics:
    """Return the metrics of a node's agent after a pass."""
    metrics = AgentMetrics("topkube", "node-a")
    dataset = LocalDataset("ml", "id", "s3://bucket/data", cached_bytes=1000)
    metrics.set_disk(10_000, 5_000, 2_000)
    metrics.set_pass(["ml"], [dataset], 0, 0)
    metrics.observe_call("GET", 200, 0.01)
    return metrics


def write_job(directory: Path, name: str) -> str:
    """Write a job of two nodes that reads 256 small files through the data cache until it is stopped."""
    script = Path(__file__).with_name("train_cached.py")
    command = ["python", str(script), str(directory / "data"), str(directory / "cache")]
    container = {"name": "worker", "image": "none", "command": command}
    job = {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "workers": 2,
            "slotsPerWorker": 1,
            "template": {"spec": {"containers": [container]}},
            "aggregation": {"algorithm": ALGORITHMS[name]},
        },
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return str(path)


@contextlib.contextmanager
def run_training(directory: Path, name: str) -> Iterator[str]:
    """Train until the end of the context. Yield the address of rank 0's metrics."""
    directory.mkdir()
    command = [
        sys.executable,
        "-m",
        "topkube.cli",
        "run",
        write_job(directory, name),
        "--no-plot",
        "--metrics-port",
        "0",
    ]
    run = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert run.stdout is not None
        first_line = run.stdout.readline()
        address = re.search(r"127\.0\.0\.1:\d+", first_line)
        assert address is not None, first_line
        threading.Thread(target=run.stdout.read).start()  # so that the run never waits for its reader
        yield address[0]
    finally:
        run.terminate()
        run.wait(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen some seconds of two real runs of two ranks on two nodes."""
    directory = tmp_path_factory.mktemp("prometheus")
    probes = Probes(0, build_operator_metrics().render, str, str, "127.0.0.1")
    agent_probes = Probes(0, build_agent_metrics().render, str, str, "127.0.0.1")
    with contextlib.ExitStack() as stack:
        for probe_server in (probes, agent_probes):
            probe_server.start()
            stack.callback(probe_server.stop)
        addresses = {name: stack.enter_context(run_training(directory / name, name)) for name in ALGORITHMS}
        targets = [
            *(
                build_target(name, address, namespace="ml", pod=f"{name}-worker-0-1")
                for name, address in addresses.items()
            ),
            build_target(
                "operator",
                f"127.0.0.1:{probes.port}",
                honor_labels=True,
                pod="topkube-operator-0",
                namespace="topkube-system",
            ),
            build_target(
                "node-cache",
                f"127.0.0.1:{agent_probes.port}",
                honor_labels=True,
                pod="topkube-node-cache-0",
                namespace="topkube-system",
            ),
        ]
        client = stack.enter_context(run_prometheus(directory, targets))
        # Norms and the cache are the last to come; a rate needs two scrapes.
        wait_until(lambda: client.query("topkube_residual_norm"), "training with hitopk", 130)
        wait_until(lambda: client.query("topkube_unsent_ratio"), "training with onebit", 130)
        yield client


def read_values(server: Prometheus, expression: str) -> list[float]:
    """Return the current values without NaN, which is the ratio of a tier without requests in the window."""
    answer = server.query(
        fill_variables(expression, INTERVAL, namespace="ml", training_job=f"{JOB}|{WEIGHTS_JOB}|next")
    )
    values = [point[1] for series in answer for point in series.points]
    return [value for value in values if not math.isnan(value)]


PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]


@pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=[f"{board.uid}: {panel.title}" for board, panel in PANELS])
def test_every_query_of_every_panel_has_an_answer(server: Prometheus, dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        # A rate needs two scrapes of a series, and a busy machine may miss a scrape.
        values = wait_until(lambda query=query: read_values(server, query.expression), query.expression, 120)
        if panel.unit == "percentunit":
            assert all(0 <= value <= 50 for value in values), values


def test_every_variable_of_a_dashboard_has_values(server: Prometheus) -> None:
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            series = fill_variables(variable.series, INTERVAL)
            values = server.call_api(f"label/{variable.label}/values", **{"match[]": series})
            expected_values = {
                "namespace": "ml",
                "training_job": JOB,
                "operator_namespace": "topkube-system",
                "release": "topkube",
            }
            assert expected_values[variable.name] in values


def test_every_alert_is_evaluated_without_an_error(server: Prometheus) -> None:
    def read_evaluated_rules() -> list[dict[str, Any]]:
        rules = [rule for group in server.call_api("rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []  # unknown: not evaluated yet

    rules = wait_until(read_evaluated_rules, "the first evaluation", 120)
    assert {rule["name"]: rule["health"] for rule in rules} == {alert.name: "ok" for alert in ALERTS}


def test_every_metric_and_label_of_dashboards_and_alerts_is_in_the_scrape(server: Prometheus) -> None:
    labels: dict[str, set[str]] = {}
    for series in server.call_api("series", **{"match[]": '{__name__=~"topkube_.*|process_.*"}'}):
        labels.setdefault(series["__name__"], set()).update(series)
    expressions = [query.expression for _, panel in PANELS for query in panel.queries]
    for expression in [*expressions, *(alert.fill_expression() for alert in ALERTS)]:
        for name, selector in re.findall(r"\b((?:topkube|process)_\w+)(\{[^}]*\})?", expression):
            assert name in labels, expression
            assert set(re.findall(r'(\w+)[=!]~?"', selector)) <= labels[name], expression


def test_a_query_that_is_wrong_is_an_error(server: Prometheus) -> None:
    with pytest.raises(QueryError, match="parse error"):
        server.query("sum(")


def test_a_dashboard_is_drawn(server: Prometheus, tmp_path: Path) -> None:
    path = tmp_path / "cluster.png"
    draw_dashboard(server, DASHBOARDS[0], path, 20, INTERVAL, training_job=JOB)
    assert path.stat().st_size > 20_000
