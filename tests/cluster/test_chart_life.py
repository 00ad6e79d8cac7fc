"""The life of the Helm chart on a real cluster, with the commands of the docs: the move from manifests/ to Helm,
`helm test`, a sample job, a real Prometheus, upgrade, rollback, uninstall, and then two releases side by side.

The tests depend on each other, in their order. They run first in a session, before conftest.py installs an operator.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes
import pytest
import yaml
from chart_release import (
    MONITORING,
    MONITORS,
    NEW_COLUMN,
    ChartRelease,
    avoid_a_node,
    is_deployed,
    list_monitors,
    read_step,
    write_earlier_release,
)
from jobs import build_failing_ranks, build_job
from kubernetes.client.exceptions import ApiException
from localkube import images
from monitored import ScrapeTargets
from releases import REPOSITORY, merge_values, read_commands
from target import (
    GROUP,
    OPERATOR,
    OPERATOR_NAMESPACE,
    PATIENCE,
    PLURAL,
    VERSION,
    Target,
    create_shared_claim,
    wait_for,
)

from conftest import MANIFESTS, apply_manifests
from monitoring.alerts import ALERTS
from monitoring.dashboards import DASHBOARDS
from monitoring.prometheus import Prometheus, fill_variables
from monitoring.server import BINARY, INTERVAL, run_prometheus

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
TRAIN = (REPOSITORY / "tests/chart/train_cached.py").read_text()
WEIGHTS_JOB = "one-bit"
PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]


@pytest.fixture(scope="module")
def release(target: Target, kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRelease]:
    """Install an earlier release in place of the operator of manifests/."""
    directory = tmp_path_factory.mktemp("chart")
    release = ChartRelease(target, kubectl, directory)
    with release.commands.open_helm(OPERATOR_NAMESPACE) as config:  # from an interrupted test run
        config.uninstall("topkube", ignore_not_found=True)
    was_installed = is_deployed(target)
    apply_manifests(target)
    try:
        release.move(write_earlier_release(directory))
        yield release
    except BaseException:
        for pod in release.list_operators():
            print(pod.metadata.name, pod.status.phase, pod.status.container_statuses)
        raise
    finally:
        with release.commands.open_helm(OPERATOR_NAMESPACE) as config:
            config.uninstall("topkube", ignore_not_found=True)
        for name in release.namespaces:
            target.core.delete_namespace(name)
        if was_installed:
            apply_manifests(target)


@pytest.fixture(scope="module")
def training(release: ChartRelease) -> Iterator[str]:
    """The name of a job that trains until it is deleted, on this machine's cluster with a claim for checkpoints. Beside
    it: the sample, a failed job, a job without a node, and a job that avoids a node."""
    options: dict[str, Any] = {"aggregation": {"algorithm": "hitopk", "density": 0.01}}
    if release.target.local is not None:
        create_shared_claim(
            release.jobs, release.target.local.layout.state / "volumes" / release.jobs.name, "checkpoints"
        )
        options["checkpoint"] = {"claimName": "checkpoints", "everySteps": 100_000}
    command = ["python", "-c", TRAIN, "/tmp/data", "/tmp/cache"]
    name = release.jobs.create(build_job("trains", command, **options))
    sample = (MANIFESTS / "samples/digits-cnn.yaml").read_text().replace("topkube/runtime:0.1.0", images.RUNTIME.name)
    release.jobs.create(yaml.safe_load(sample))
    release.jobs.create(build_job("fails", build_failing_ranks(), runPolicy={"backoffLimit": 0}))
    stuck = build_job("stuck", ["true"])
    stuck["spec"]["template"]["spec"]["nodeSelector"] = {"no": "where"}
    release.jobs.create(stuck)
    avoid_a_node(release.jobs)
    yield name
    if release.target.local is not None:
        release.target.core.delete_persistent_volume(release.jobs.name)


def test_the_chart_is_ready_in_20_seconds_without_a_prometheus_operator(release: ChartRelease, training: str) -> None:
    assert release.seconds < 20 * PATIENCE
    assert len(release.list_operators()) == 2
    assert all(status.ready for pod in release.list_operators() for status in pod.status.container_statuses)
    kinds = {document["kind"] for document in yaml.safe_load_all(release.installed["manifest"]) if document}
    assert "PodDisruptionBudget" in kinds
    assert not kinds & set(MONITORS)


def test_helm_test_passes_and_leaves_nothing(release: ChartRelease) -> None:
    (line,) = [line for line in read_commands("install.md", "## With Helm") if line.startswith("helm test")]
    logs = release.commands.run(line)["logs"]
    assert "a replica leads" in logs
    assert "spec.template.spec.containers[0].command: is required" in logs, "the webhook has refused nothing"
    pods = release.target.core.list_namespaced_pod(OPERATOR_NAMESPACE).items
    assert [pod.metadata.name for pod in pods if "operator" not in pod.metadata.name] == []


def test_the_webhook_of_the_chart_refuses_a_bad_job_with_path_and_reason(release: ChartRelease) -> None:
    invalid = build_job("bad", ["true"])
    del invalid["spec"]["template"]["spec"]["containers"][0]["command"]

    def read_refusal() -> str:
        try:
            release.target.custom.create_namespaced_custom_object(
                GROUP, VERSION, release.jobs.name, PLURAL, invalid, dry_run="All"
            )
        except ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""

    reason = wait_for(read_refusal, "the webhook to be called", 60)
    assert "trainingjobs.topkube.dev" in reason  # the name of our webhook
    assert "spec.template.spec.containers[0].command: is required" in reason
    (hook,) = release.target.admission.read_validating_webhook_configuration("topkube").webhooks
    assert hook.client_config.ca_bundle


def test_a_wrong_value_is_refused_with_its_path_and_changes_nothing(release: ChartRelease) -> None:
    revision = release.read_revision()
    with pytest.raises(helm.HelmError, match=r"/operator/logLevel"):
        release.commands.run("helm upgrade topkube charts/topkube -n topkube-system --set operator.logLevel=loud")
    assert release.read_revision() == revision


@pytest.mark.parametrize("namespaces", ["", "--set namespaces={team-a,team-b}"])
def test_a_second_operator_for_the_same_jobs_is_refused_by_name(release: ChartRelease, namespaces: str) -> None:
    with pytest.raises(
        helm.HelmError, match=r"another operator, topkube-system/topkube-operator, looks after"
    ) as caught:
        release.commands.run(f"helm install second charts/topkube -n {release.jobs.name} {namespaces}")
    assert "Next:" in str(caught.value)
    with release.commands.open_helm(release.jobs.name) as config:
        assert config.list(all_states=True) == []


@pytest.fixture(scope="module")
def server(release: ChartRelease, training: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes what the chart's monitors select. A second job trains with onebit, for its metrics."""
    if BINARY is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    if release.target.local is None:
        pytest.skip("needs a cluster of this machine's own: pods must be reached from here")
    targets = ScrapeTargets(release.target, release.directory, [release.jobs.name])
    command = ["python", "-c", TRAIN, "/tmp/data", "/tmp/cache"]
    weights = release.jobs.create(build_job(WEIGHTS_JOB, command, aggregation={"algorithm": "onebit"}))
    with run_prometheus(release.directory, targets.jobs) as server:
        release.jobs.wait_phase(training, "Running", seconds=120)
        release.jobs.wait_phase(weights, "Running", seconds=120)
        targets.refresh()
        yield server


def test_every_panel_is_answered_from_the_running_job(release: ChartRelease, server: Prometheus) -> None:
    """The panels are waited for together. The operator's progress comes last, up to 15 seconds late. One more job
    begins, because some metrics count the starts of jobs and the webhook's reviews. It begins after the first scrape,
    because a rate needs a value from before."""
    replicas = len(release.list_operators())
    wait_for(lambda: len(server.query("topkube_leader")) == replicas, "the first scrape of each operator", 30)
    release.jobs.wait_phase(release.jobs.create(build_job("begins", ["sleep", "30"])), "Running")
    variables = {"namespace": release.jobs.name}
    queries = [query for panel in PANELS for query in panel.queries]
    silent = [query for query in queries if "topkube_node_cache_" not in query.expression]  # this release has none

    def has_values(expression: str) -> bool:
        values = [
            point[1]
            for series in server.query(fill_variables(expression, INTERVAL, **variables))
            for point in series.points
        ]
        return any(not math.isnan(value) for value in values)

    def do_all_have_values() -> bool:
        silent[:] = [query for query in silent if not has_values(query.expression)]
        return not silent

    try:
        wait_for(do_all_have_values, "answers", 150, interval=1)
    except AssertionError:
        raise AssertionError(f"no data for {[query.expression for query in silent]}") from None
    finally:
        release.jobs.delete(WEIGHTS_JOB)


def test_every_alert_is_evaluated_and_every_metric_and_label_named_is_scraped(server: Prometheus) -> None:
    def are_rules_healthy() -> bool:
        rules = [rule for group in server.call_api("rules")["groups"] for rule in group["rules"]]
        return {rule["name"] for rule in rules if rule["health"] == "ok"} == {alert.name for alert in ALERTS}

    wait_for(are_rules_healthy, "all alerts to be evaluated", 30)
    producers = server.query("count by (namespace, phase) (topkube_jobs)")
    assert {point[1] for series in producers for point in series.points} == {1.0}, "only the leader serves them"
    labels: dict[str, set[str]] = {}
    for series in server.call_api("series", **{"match[]": '{__name__=~"topkube_.*|process_.*"}'}):
        labels.setdefault(series["__name__"], set()).update(series)
    expressions = [query.expression for panel in PANELS for query in panel.queries]
    for expression in [*expressions, *(alert.fill_expression() for alert in ALERTS)]:
        for name, selector in re.findall(r"\b((?:topkube|process)_\w+)(\{[^}]*\})?", expression):
            if name.startswith("topkube_node_cache_"):
                continue  # this release has no cache on nodes
            assert name in labels, expression
            assert set(re.findall(r'(\w+)[=!]~?"', selector)) <= labels[name], expression


def test_a_scrape_is_small(release: ChartRelease, server: Prometheus, training: str) -> None:
    for pod in release.jobs.list_pods("worker", training):
        (series,) = server.query(f'scrape_samples_scraped{{pod="{pod.metadata.name}"}}')
        assert 0 < series.points[-1][1] < 500


@pytest.mark.timeout(1200)
def test_the_sample_runs_to_its_end(release: ChartRelease, training: str) -> None:
    status = release.jobs.wait_phase("digits-cnn", "Succeeded", seconds=300)
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 300
    assert release.jobs.wait_phase("fails", "Failed", seconds=60)["firstFailure"]["exitCode"] == 7
    for line in read_commands("quickstart.md", "To see more of the job:"):
        output = release.commands.run(f"{line.replace('char-gpt', 'digits-cnn')} -n {release.jobs.name}")["output"]
        assert output.strip(), line


@pytest.fixture(scope="module")
def prometheus_operator(release: ChartRelease) -> Iterator[None]:
    """The definitions of the Prometheus operator, without the operator, so that its objects can be stored."""
    crds = release.find_definitions()
    for kind, plural in MONITORS.items():
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        spec = {
            "group": MONITORING,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        }
        metadata = {"name": f"{plural}.{MONITORING}"}
        crds.create({"apiVersion": "apiextensions.k8s.io/v1", "kind": crds.kind, "metadata": metadata, "spec": spec})
    for plural in MONITORS.values():
        wait_for(lambda plural=plural: list_monitors(release, plural) is not None, f"{plural} to be served", 30)
    yield
    for plural in MONITORS.values():
        crds.delete(name=f"{plural}.{MONITORING}")


def find_line(action: str) -> str:
    lines = read_commands("install.md", "## Upgrade, roll back, uninstall")
    (matching_line,) = [line for line in lines if line.startswith(f"helm {action} ")]
    return matching_line


def test_an_upgrade_keeps_jobs_running_and_upgrades_the_definition(
    release: ChartRelease, training: str, prometheus_operator: None
) -> None:
    pods, operators = release.jobs.read_uids("worker"), {pod.metadata.uid for pod in release.list_operators()}
    assert len([name for name in pods if name.startswith(training)]) == 2
    assert NEW_COLUMN not in release.read_columns()
    release.commands.run(find_line("upgrade"), operator={"logLevel": "debug"})
    assert NEW_COLUMN in release.read_columns()
    assert not operators & {pod.metadata.uid for pod in release.list_operators()}
    assert {kind: len(list_monitors(release, plural) or ()) for kind, plural in MONITORS.items()} == dict.fromkeys(
        MONITORS, 1
    )
    before = read_step(release, training)
    wait_for(lambda: read_step(release, training) > before, "the new operator to report steps", 60)
    status = release.jobs.read_status(training)
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
    assert pods.items() >= release.jobs.read_uids("worker").items()
    (hook,) = release.target.admission.read_validating_webhook_configuration("topkube").webhooks
    assert hook.client_config.ca_bundle


def test_a_rollback_goes_back_and_keeps_jobs_running(release: ChartRelease, training: str) -> None:
    pods = {name: uid for name, uid in release.jobs.read_uids("worker").items() if name.startswith(training)}
    release.commands.run(find_line("rollback"))
    deployment = release.target.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    assert "--log-level=info" in deployment.spec.template.spec.containers[0].args
    assert NEW_COLUMN not in release.read_columns()
    assert pods.items() <= release.jobs.read_uids("worker").items()
    assert release.jobs.read_status(training)["attempt"] == 1
    assert [list_monitors(release, plural) for plural in MONITORS.values()] == [[], [], []]


def test_uninstalling_keeps_the_definition_the_jobs_and_their_pods(release: ChartRelease, training: str) -> None:
    pods = {name: uid for name, uid in release.jobs.read_uids("worker").items() if name.startswith(training)}
    stored = release.read_job_names()
    assert stored >= {"trains", "digits-cnn", "fails", "stuck", "avoids"}
    release.commands.run(find_line("uninstall"))
    assert release.list_operators() == []
    assert "Phase" in release.read_columns()
    assert release.read_job_names() == stored
    assert pods.items() <= release.jobs.read_uids("worker").items()
    labels = "app.kubernetes.io/instance=topkube,app.kubernetes.io/managed-by=Helm"
    roles = kubernetes.client.RbacAuthorizationV1Api(release.target.client)
    assert roles.list_cluster_role(label_selector=labels).items == []
    assert roles.list_cluster_role_binding(label_selector=labels).items == []
    assert release.target.admission.list_validating_webhook_configuration(label_selector=labels).items == []
    assert release.target.core.list_namespaced_config_map(OPERATOR_NAMESPACE, label_selector=labels).items == []


def test_two_releases_for_different_namespaces_run_side_by_side(release: ChartRelease, training: str) -> None:
    """Each release has rights only in its namespace. The release in the namespace of the former operator has the key of
    that operator, so it continues the job that had no operator."""
    other = release.create_namespace()
    pods = {name: uid for name, uid in release.jobs.read_uids("worker").items() if name.startswith(training)}
    releases = {"first": (OPERATOR_NAMESPACE, release.jobs), "second": (other.name, other)}
    small = {"replicas": 1, "crds": {"install": False}, "rbac": {"userRoles": False}}
    try:
        for name, (home, jobs) in releases.items():
            line = f"helm install {name} charts/topkube -n {home} --set namespaces={{{jobs.name}}}"
            release.commands.run(line, webhook={"name": jobs.name}, **small)
        with pytest.raises(helm.HelmError, match=rf"looks after namespace {other.name} already"):
            release.commands.run(
                f"helm install third charts/topkube -n {other.name} --set namespaces={{{other.name}}}",
                webhook={"name": "third"},
                **small,
            )
        line = f"helm install third charts/topkube -n {other.name} --set namespaces={{nowhere}}"
        with pytest.raises(
            helm.HelmError, match=r"belongs to release topkube in namespace topkube-system. Next: set crds"
        ):
            release.commands.run(line, **merge_values(small, {"crds": {"install": True}}))
        with pytest.raises(
            helm.HelmError, match=rf"belongs to release second in namespace {other.name}. Next: set webh"
        ):
            release.commands.run(line, webhook={"name": other.name}, **small)
        other.create(build_job("theirs", ["true"]))
        other.wait_phase("theirs", "Succeeded", seconds=90)
        before = read_step(release, training)
        wait_for(lambda: read_step(release, training) > before, "the first release to find the job", 60)
        assert pods.items() <= release.jobs.read_uids("worker").items()
        assert release.jobs.read_status(training)["attempt"] == 1
        release.jobs.delete(training)
        wait_for(lambda: not release.jobs.list_pods(job=training), "the job's pods to be gone", 60)
    finally:
        for name, (home, _) in releases.items():
            with release.commands.open_helm(home) as config:
                config.uninstall(name, ignore_not_found=True)
