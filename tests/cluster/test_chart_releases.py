"""Two releases of the chart in one cluster, each for another namespace, with metrics over TLS that need a token.

As in test_chart_life.py, no other operator may be installed: these tests run before conftest.py installs one.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from jobs import build_endless_steps, build_failing_ranks, build_job
from localkube import images
from monitored import ScrapeTargets
from releases import REPOSITORY, Commands, merge_values
from target import KUBELET_SECONDS, OPERATOR_NAMESPACE, Namespace, Target, wait_for

from conftest import apply_manifests, read_manifest
from monitoring.dashboards.cluster import CLUSTER
from monitoring.prometheus import Prometheus, fill_variables
from monitoring.server import BINARY, INTERVAL, run_prometheus

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
PLACES = ("releases-a", "releases-b")
SCRAPER = "scraper"


@dataclass
class Release:
    """A release of the chart: its name, the namespace of its operator, and the namespace of its jobs."""

    name: str
    home: str
    jobs: Namespace
    values: dict[str, Any]

    def find_operator(self) -> Any:
        """Return the operator's pod, which is ready."""
        core = self.jobs.target.core
        labels = f"app.kubernetes.io/component=operator,app.kubernetes.io/instance={self.name}"
        (pod,) = core.list_namespaced_pod(self.home, label_selector=labels).items
        return pod

    def render_rules(self) -> list[dict[str, Any]]:
        """Return the alerting rules of the release's PrometheusRule."""
        values = merge_values(self.values, {"metrics": {"alerts": {"enabled": True}}})
        with helm.Chart.load(REPOSITORY / "charts/topkube") as chart:
            text = chart.render(values, name=self.name, namespace=self.home)["topkube/templates/monitoring.yaml"]
        documents = yaml.safe_load_all(text)
        (rule,) = (document for document in documents if document and document["kind"] == "PrometheusRule")
        return [entry for group in rule["spec"]["groups"] for entry in group["rules"]]


@pytest.fixture(scope="module")
def releases(target: Target, kubectl: Path) -> Iterator[list[Release]]:
    """Two releases. An account in the first namespace of jobs may scrape both."""
    if target.local is None:
        pytest.skip("needs a cluster of this machine's own: pods must be reached from here")
    core, commands = target.core, Commands(target.kubeconfig, kubectl, {"image": {"tag": images.TAG}})
    was_installed = bool(target.list_operator_pods())
    commands.run(
        "kubectl delete --ignore-not-found -f manifests/webhook.yaml -f manifests/operator.yaml -f manifests/rbac.yaml"
    )
    for file in ("namespace", "crd", "crd-cached-datasets"):
        target.apply(read_manifest(file))
    wait_for(lambda: not target.list_operator_pods(), "other operators to be gone", KUBELET_SECONDS)
    for place in PLACES:
        core.create_namespace({"metadata": {"name": place}})
        wait_for(lambda place=place: _has_account(core, place, "default"), f"the account of {place}", 30)
    core.create_namespaced_service_account(PLACES[0], {"metadata": {"name": SCRAPER}})
    reader = {"name": SCRAPER, "namespace": PLACES[0]}
    installed = []
    try:
        for name, home, place in (("first", OPERATOR_NAMESPACE, PLACES[0]), ("second", PLACES[1], PLACES[1])):
            values = {
                "replicas": 1,
                "crds": {"install": False},
                "rbac": {"userRoles": False},
                "webhook": {"name": f"topkube-{name}"},
                "namespaces": [place],
                "metrics": {"protection": {"tls": True, "authentication": "kubernetes", "readers": [reader]}},
            }
            installed.append(Release(name, home, Namespace(target, place), values))
            commands.run(f"helm install {name} charts/topkube -n {home}", **values)
        yield installed
    finally:
        for release in installed:
            with commands.open_helm(release.home) as config:
                config.uninstall(release.name, ignore_not_found=True)
        for place in PLACES:
            core.delete_namespace(place)
        if was_installed:
            apply_manifests(target)


def create_token(release: Release, account: str) -> str:
    """Return a token of a service account in the release's namespace of jobs."""
    core, place = release.jobs.target.core, release.jobs.name
    wait_for(lambda: _has_account(core, place, account), f"the account {account}", 30)
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(core.create_namespaced_service_account_token(account, place, body).status.token)


def _has_account(core: Any, namespace: str, account: str) -> bool:
    return account in {item.metadata.name for item in core.list_namespaced_service_account(namespace).items}


def fetch(url: str, token: str = "") -> tuple[int, str]:
    """Return the status and the text of the answer. The certificate is not verified: the operator issues it itself."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=30, context=ssl._create_unverified_context()) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_need_tls_and_the_token_of_an_account_that_may_read_them(releases: list[Release]) -> None:
    scraper, stranger = create_token(releases[0], SCRAPER), create_token(releases[0], "default")
    for release in releases:
        address = f"{release.find_operator().status.pod_ip}:8080"
        status, text = fetch(f"https://{address}/metrics", scraper)
        assert status == 200, text
        assert f'release="{release.name}"' in text
        answers = {token: fetch(f"https://{address}/metrics", token) for token in ("", "invalid", stranger)}
        assert [status for status, _ in answers.values()] == [401, 403, 403], answers
        assert not any("topkube_" in text for _, text in answers.values())
        assert fetch(f"https://{address}/readyz")[0] == 200, "the kubelet's probes have no token"
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read()


@pytest.fixture
def server(releases: list[Release], tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the operators of both releases with a token, and the workers of all jobs. In both
    namespaces, a job of the same name runs. A second job of the second release has failed."""
    if BINARY is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    first, second = releases
    for release in releases:
        release.jobs.create(build_job("same", build_endless_steps(), workers=1))
    second.jobs.create(build_job("fails", build_failing_ranks(), runPolicy={"backoffLimit": 0}))
    for release in releases:
        release.jobs.wait_phase("same", "Running", seconds=120)
    second.jobs.wait_phase("fails", "Failed", seconds=120)
    targets = ScrapeTargets(first.jobs.target, tmp_path, [release.jobs.name for release in releases])
    for scrape in targets.jobs:
        if scrape["job_name"] == "operator":
            token = create_token(first, SCRAPER)
            scrape |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
            scrape["authorization"] = {"credentials": token}
    with run_prometheus(tmp_path, targets.jobs) as running:
        yield running


def test_two_releases_count_each_job_once(releases: list[Release], server: Prometheus) -> None:
    """This holds for the metrics, the dashboard of all jobs, the alerts for all releases, and the rules of each
    release."""
    first, second = releases

    def count_values(expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values that are not zero, by the values of `labels`."""
        result: dict[tuple[str, ...], float] = {}
        for series in server.query(fill_variables(expression, INTERVAL)):
            key = tuple(series.labels.get(label, "") for label in labels)
            assert key not in result, f"{expression} has {key} twice"
            result[key] = series.points[-1][1]
        return {key: value for key, value in result.items() if value}

    panel = next(panel for panel in CLUSTER.panels if panel.title == "Jobs by phase now")
    by_phase = {("Running",): 2.0, ("Failed",): 1.0}
    (expression,) = (query.expression for query in panel.queries)
    wait_for(lambda: count_values(expression, "phase") == by_phase, f"{panel.title} to be {by_phase}", 60, interval=1)
    operators = {("first", first.home): 1.0, ("second", second.home): 1.0}
    assert count_values("topkube_operator_build_info", "release", "namespace") == operators
    failed, running = (second.jobs.name, "fails"), {(release.jobs.name, "same") for release in releases}
    job_labels = ("namespace", "training_job")
    assert set(count_values("topkube_job_failed_timestamp_seconds", *job_labels)) == {failed}
    assert set(count_values('topkube_job_phase{phase="Running"}', *job_labels)) == running

    def list_firing() -> list[tuple[str, str]]:
        alerts = [
            alert for alert in server.call_api("alerts")["alerts"] if alert["labels"]["alertname"] == "TopKubeJobFailed"
        ]
        return [(alert["labels"]["namespace"], alert["labels"]["training_job"]) for alert in alerts]

    wait_for(lambda: list_firing() == [failed], "one alert for one failed job", 60, interval=1)
    for release, expected in ((first, set()), (second, {failed})):
        (rule,) = (rule for rule in release.render_rules() if rule["alert"] == "TopKubeJobFailed")
        assert set(count_values(rule["expr"], *job_labels)) == expected, rule["expr"]
