"""The Helm chart on a real cluster, through Helm's own SDK, in one life: install, test, train, watch with a real
Prometheus, upgrade, roll back, uninstall. The tests below follow each other.

The operator of manifests/ makes way while they run, and comes back at the end.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes
import pytest
import yaml
from jobs import fails, job
from kubernetes.client.exceptions import ApiException
from prometheus_server import BINARY, prometheus
from prometheus_server import target as scraped
from target import GROUP, OPERATOR, OPERATOR_NAMESPACE, PLURAL, VERSION, Namespace, Target, wait_for

from monitoring.alerts import ALERTS
from monitoring.dashboards import DASHBOARDS
from monitoring.prometheus import Prometheus, chosen
from topkube.launch.contract import METRICS_PORT

REPOSITORY = Path(__file__).resolve().parents[2]
CHART, MANIFESTS = REPOSITORY / "charts/topkube", REPOSITORY / "manifests"

pytestmark = pytest.mark.timeout(300)
INTERVAL = "60s"
PREPARE = """
import os, sys, numpy as np
os.makedirs(sys.argv[1], exist_ok=True)
for number in range(64):
    path = f"{sys.argv[1]}/{number}.bin"
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(np.full(64, number, np.float32).tobytes())
    os.utime(f"{path}.{os.getpid()}", (0, 0))
    os.rename(f"{path}.{os.getpid()}", path)
"""
TRAIN = (REPOSITORY / "tests/chart/train_cached.py").read_text().replace("from __future__ import annotations", PREPARE)


class Life:
    """One release and a namespace that it looks after."""

    def __init__(self, target: Target, directory: Path) -> None:
        suffix = uuid.uuid4().hex[:6]
        self.target, self.directory = target, directory
        self.own, self.jobs = f"chart-{suffix}-system", f"chart-{suffix}"
        self.namespace = Namespace(target, self.jobs)
        self.helm = helm.Config(kubeconfig_path=target.kubeconfig, namespace=self.own)
        self.install_seconds = 0.0

    @property
    def values(self) -> dict[str, Any]:
        return {
            "namespaces": [self.jobs],
            "webhook": {"name": self.jobs},
            "rbac": {"userRoles": False},  # those of manifests/ may be there
        }

    def install(self) -> None:
        began = time.monotonic()
        self.helm.install(CHART, "topkube", self.values, namespace=self.own, wait="watcher", timeout=90)
        self.install_seconds = time.monotonic() - began

    def operators(self) -> list[Any]:
        pods = self.target.core.list_namespaced_pod(self.own, label_selector="app.kubernetes.io/component=operator")
        return [pod for pod in pods.items if not pod.metadata.deletion_timestamp]

    def monitored(self) -> list[dict[str, Any]]:
        """What the chart's monitors would have Prometheus scrape now."""
        monitors = {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}
        with helm.Chart.load(CHART) as chart:
            text = chart.render({**self.values, **monitors}, name="topkube", namespace=self.own)
        objects = [one for one in yaml.safe_load_all(text["topkube/templates/monitoring.yaml"]) if one]
        (of_pods,) = (one["spec"] for one in objects if one["kind"] == "PodMonitor")
        labels = ",".join(f"{name}={value}" for name, value in of_pods["selector"]["matchLabels"].items())
        (port,) = (endpoint["port"] for endpoint in of_pods["podMetricsEndpoints"])
        found = []
        for where in of_pods["namespaceSelector"]["matchNames"]:
            for pod in self.target.core.list_namespaced_pod(where, label_selector=labels).items:
                ports = [one for container in pod.spec.containers for one in container.ports or () if one.name == port]
                if pod.status.pod_ip and ports:
                    address = f"{pod.status.pod_ip}:{ports[0].container_port}"
                    found.append({"targets": [address], "labels": {"namespace": where, "pod": pod.metadata.name}})
        return found


@pytest.fixture(scope="module")
def life(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    made = Life(target, tmp_path_factory.mktemp("chart"))
    was_installed = _remove_other_operator(target)
    for name in (made.own, made.jobs):
        metadata = kubernetes.client.V1ObjectMeta(name=name)
        target.core.create_namespace(kubernetes.client.V1Namespace(metadata=metadata))
    _adopt_crd(target, made.own)
    try:
        made.install()
        yield made
    except BaseException:
        for pod in made.operators():
            print(pod.metadata.name, pod.status.phase, pod.status.container_statuses)
        raise
    finally:
        made.helm.uninstall("topkube", ignore_not_found=True)
        made.helm.close()
        for name in (made.jobs, made.own):
            target.core.delete_namespace(name)
        if was_installed:
            for file in ("namespace", "crd", "rbac", "operator", "webhook"):
                target.apply((MANIFESTS / f"{file}.yaml").read_text())


def _remove_other_operator(target: Target) -> bool:
    try:
        target.apps.delete_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    wait_for(lambda: not target.operator_pods(), "the operator of manifests/ to end", 60)
    return True


def _adopt_crd(target: Target, namespace: str) -> None:
    """Tells Helm that a definition that manifests/ installed is now the release's, as docs/install.md says."""
    crds = target.dynamic.resources.get(api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition")
    owner = {"meta.helm.sh/release-name": "topkube", "meta.helm.sh/release-namespace": namespace}
    metadata = {"annotations": owner, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    try:
        crds.patch(name=f"{PLURAL}.{GROUP}", body={"metadata": metadata}, content_type="application/merge-patch+json")
    except ApiException as error:
        if error.status != 404:
            raise


def test_it_is_ready_in_20_seconds_and_its_pods_run(life: Life) -> None:
    assert life.install_seconds < 20
    assert len(life.operators()) == 2
    assert all(status.ready for pod in life.operators() for status in pod.status.container_statuses)


def test_helm_test_passes_and_leaves_nothing(life: Life) -> None:
    life.helm.test("topkube", timeout=120)
    pods = life.target.core.list_namespaced_pod(life.own).items
    assert [pod.metadata.name for pod in pods if "operator" not in pod.metadata.name] == []


def test_its_webhook_refuses_a_bad_job_with_path_and_reason(life: Life) -> None:
    bad = job("bad", ["true"], aggregation={"densty": 0.1})
    bad["spec"]["aggregation"]["warmupSteps"] = -1

    def refused() -> str:
        try:
            life.target.custom.create_namespaced_custom_object(GROUP, VERSION, life.jobs, PLURAL, bad, dry_run="All")
        except ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""

    assert "warmupSteps" in wait_for(refused, "the webhook to be called", 60)


def test_a_second_operator_for_the_same_jobs_is_refused_by_name(life: Life) -> None:
    for namespaces in ([], [life.jobs, "other"]):
        with pytest.raises(helm.HelmError, match=r"another operator, chart-.*/topkube-operator, looks after") as caught:
            life.helm.install(
                CHART,
                "second",
                {**life.values, "namespaces": namespaces, "crds": {"install": False}},
                namespace=life.own,
            )
        assert "Next:" in str(caught.value)
    rendered = life.helm.install(
        CHART,
        "second",
        {**life.values, "namespaces": ["other"], "crds": {"install": False}, "webhook": {"name": "other"}},
        namespace=life.own,
        dry_run="client",
    )
    assert "second-topkube-operator" in rendered["manifest"]


@pytest.fixture(scope="module")
def training(life: Life) -> str:
    """A job that trains until it is deleted; beside it one that has failed and one that cannot be scheduled."""
    life.namespace.create(job("failed", fails(), runPolicy={"backoffLimit": 0}))
    stuck = job("stuck", ["true"])
    stuck["spec"]["template"]["spec"]["nodeSelector"] = {"no": "where"}
    life.namespace.create(stuck)
    aggregation = {"algorithm": "hitopk", "density": 0.01}
    trains = job("trains", ["python", "-c", TRAIN, "/tmp/data", "/tmp/cache"], aggregation=aggregation)
    return life.namespace.create(trains)


@pytest.fixture(scope="module")
def server(life: Life, request: pytest.FixtureRequest) -> Iterator[Prometheus]:
    """A Prometheus that scrapes what the chart's monitors select."""
    if BINARY is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    workers = life.directory / "workers.json"
    workers.write_text("[]")
    targets = [
        scraped(
            f"operator-{index}",
            f"{pod.status.pod_ip}:8080",
            honor_labels=True,
            pod=pod.metadata.name,
            namespace=life.own,
        )
        for index, pod in enumerate(life.operators())
    ]
    discovered = {"job_name": "workers", "file_sd_configs": [{"files": [str(workers)], "refresh_interval": "1s"}]}
    with prometheus(life.directory, [*targets, discovered]) as found:
        wait_for(lambda: _quietly(found, "topkube_leader == 1"), "a scrape of the operator", 30)
        name = request.getfixturevalue("training")
        life.namespace.wait_phase(name, "Running", seconds=120)
        life.namespace.wait_phase("failed", "Failed", seconds=60)
        wait_for(lambda: len(life.monitored()) >= 2, "pods that the monitor selects")
        part = workers.with_suffix(".part")
        part.write_text(json.dumps(life.monitored()))
        part.rename(workers)
        wait_for(lambda: _quietly(found, "topkube_residual_norm"), "metrics of the job", 90)
        wait_for(
            lambda: _quietly(found, f'topkube_job_progress_ratio{{training_job="{name}",rank=""}}'), "progress", 60
        )
        wait_for(lambda: _quietly(found, f"rate(topkube_samples_total[{INTERVAL}]) > 0"), "a rate", 30)
        yield found


def _quietly(server: Prometheus, expression: str) -> list[Any]:
    try:
        return server.query(expression)
    except OSError:
        return []


def test_every_panel_and_every_alert_has_an_answer_from_the_running_job(life: Life, server: Prometheus) -> None:
    silent = []
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                asked = chosen(query.expression, INTERVAL, namespace=life.jobs)
                values = [point[1] for series in server.query(asked) for point in series.points]
                if not values or all(math.isnan(value) for value in values):
                    silent.append(f"{dashboard.uid}: {panel.title}: {asked}")
    assert silent == []
    wait_for(lambda: len(_health(server)) == len(ALERTS), "the alerts to be evaluated", 30)
    assert set(_health(server).values()) == {"ok"}


def _health(server: Prometheus) -> dict[str, str]:
    rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    return {rule["name"]: rule["health"] for rule in rules if rule["health"] != "unknown"}


def test_every_metric_and_label_named_is_in_the_scrape(server: Prometheus) -> None:
    labels: dict[str, set[str]] = {}
    for one in server.ask("series", **{"match[]": '{__name__=~"topkube_.*|process_.*"}'}):
        labels.setdefault(one["__name__"], set()).update(one)
    expressions = [
        query.expression for dashboard in DASHBOARDS for panel in dashboard.panels for query in panel.queries
    ]
    for expression in [*expressions, *(alert.expression for alert in ALERTS)]:
        for name, selector in re.findall(r"\b((?:topkube|process)_\w+)(\{[^}]*\})?", expression):
            assert name in labels, expression
            assert set(re.findall(r'(\w+)[=!]~?"', selector)) <= labels[name], expression


def test_a_workers_scrape_is_small(life: Life, server: Prometheus) -> None:
    for pod in life.namespace.pods("worker", job="trains"):
        found = server.query(f'scrape_samples_scraped{{pod="{pod.metadata.name}"}}')
        assert 0 < found[0].points[-1][1] < 500
        assert any(
            port.container_port == METRICS_PORT for container in pod.spec.containers for port in container.ports or ()
        )


def test_an_upgrade_from_the_release_before_keeps_jobs_running(life: Life, training: str) -> None:
    life.namespace.wait_phase(training, "Running", seconds=120)
    pods, attempt = life.namespace.uids("worker"), life.namespace.status(training)["attempt"]
    revision = life.helm.status("topkube")["version"]
    newer = helm.package(CHART, destination=life.directory, version="0.1.1")
    changed = {**life.values, "operator": {"logLevel": "debug"}, "podDisruptionBudget": {"minAvailable": "50%"}}
    life.helm.upgrade(newer, "topkube", changed, namespace=life.own, wait="watcher", timeout=120)
    assert life.helm.status("topkube")["version"] == revision + 1
    step = _step(life, training)
    wait_for(lambda: _step(life, training) > step, "steps after the upgrade", 60)
    assert {uid for name, uid in life.namespace.uids("worker").items() if "trains" in name} <= set(pods.values())
    life.helm.rollback("topkube", wait="watcher", timeout=120)
    (container,) = life.target.apps.read_namespaced_deployment(
        "topkube-operator", life.own
    ).spec.template.spec.containers
    assert "--log-level=info" in container.args
    assert life.namespace.status(training)["attempt"] == attempt


def _step(life: Life, name: str) -> int:
    return int((life.namespace.status(name).get("progress") or {}).get("step") or 0)


def test_uninstalling_keeps_the_definition_the_jobs_and_their_pods(life: Life, training: str) -> None:
    pods = {name: uid for name, uid in life.namespace.uids("worker").items() if training in name}
    assert pods
    life.helm.uninstall("topkube", wait="watcher", timeout=60)
    assert life.namespace.job(training)["metadata"]["name"] == training
    assert pods.items() <= life.namespace.uids("worker").items()
    roles = kubernetes.client.RbacAuthorizationV1Api(life.target.client)
    labels = "app.kubernetes.io/instance=topkube,app.kubernetes.io/managed-by=Helm"
    assert roles.list_namespaced_role_binding(life.jobs, label_selector=labels).items == []
    assert life.operators() == []
