"""The life of the Helm chart on a real cluster, with the commands of the docs: the move from manifests/ to Helm,
`helm test`, a sample job, a real Prometheus, upgrade, rollback, uninstall, and then two releases side by side.

The tests depend on each other, in their order. They run first in a session, before conftest.py installs an operator.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes
import pytest
import yaml
from jobs import build_failing_ranks, build_job
from kubernetes.client.exceptions import ApiException
from localkube import images
from monitored import ScrapeTargets
from releases import REPOSITORY, Commands, merge_values, read_commands
from target import (
    GROUP,
    OPERATOR,
    OPERATOR_NAMESPACE,
    PATIENCE,
    PLURAL,
    VERSION,
    Namespace,
    Target,
    create_shared_claim,
    wait_for,
)

from conftest import MANIFESTS, apply_manifests
from monitoring.alerts import ALERTS
from monitoring.dashboards import DASHBOARDS
from monitoring.prometheus import Prometheus, fill_variables
from monitoring.server import BINARY, INTERVAL, prometheus

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
CHART = REPOSITORY / "charts/topkube"
CRD = f"{PLURAL}.{GROUP}"
NEW_COLUMN = "Samples/s"
"""A column of `kubectl get tj` that the earlier release does not have."""
TRAIN = (REPOSITORY / "tests/chart/train_cached.py").read_text()
MONITORS = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
MONITORING = "monitoring.coreos.com"
WEIGHTS_JOB = "one-bit"
PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]


class Life:
    """One release, called topkube as in the docs, and a namespace of jobs."""

    def __init__(self, on: Target, kubectl: Path, directory: Path) -> None:
        self.target, self.directory = on, directory
        self.commands = Commands(on.kubeconfig, kubectl, {"image": {"tag": images.TAG}})
        self.namespaces: list[str] = []
        self.jobs = self.create_namespace()
        self.installed: dict[str, Any] = {}
        self.seconds = 0.0

    def create_namespace(self) -> Namespace:
        """Create a new namespace for jobs."""
        name = f"chart-{uuid.uuid4().hex[:6]}"
        self.target.core.create_namespace({"metadata": {"name": name}})
        self.namespaces.append(name)
        wait_for(lambda: self.target.core.list_namespaced_service_account(name).items, "a service account", 30)
        return Namespace(self.target, name)

    def move(self, chart: Path) -> None:
        """Move from manifests/ to Helm with the commands of docs/install.md, with another chart."""
        *before, last = read_commands("install.md", "To move to Helm later")
        for line in before:
            self.commands.run(line)
        assert last.startswith("helm install")
        began = time.monotonic()
        self.installed = self.commands.run(last, chart)
        self.seconds = time.monotonic() - began

    def read_job_names(self) -> set[str]:
        """Return the names of the jobs in the namespace of jobs."""
        listed = self.target.custom.list_namespaced_custom_object(GROUP, VERSION, self.jobs.name, PLURAL)
        return {item["metadata"]["name"] for item in listed["items"]}

    def list_operators(self, namespace: str = OPERATOR_NAMESPACE, release: str = "topkube") -> list[Any]:
        labels = f"app.kubernetes.io/component=operator,app.kubernetes.io/instance={release}"
        pods = self.target.core.list_namespaced_pod(namespace, label_selector=labels).items
        return [pod for pod in pods if not pod.metadata.deletion_timestamp]

    def read_revision(self) -> int:
        with self.commands.open_helm(OPERATOR_NAMESPACE) as config:
            return int(config.status("topkube")["revision"])

    def read_columns(self) -> list[str]:
        """Return the columns of `kubectl get tj` in the stored definition."""
        crd = self.find_definitions().get(name=CRD).to_dict()
        return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]

    def find_definitions(self) -> Any:
        return self.target.dynamic.resources.get(api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition")


def write_earlier_release(directory: Path) -> Path:
    """Return a copy of the chart as an earlier release: another version, and a definition that lacks a column."""
    older = directory / "before/topkube"
    shutil.copytree(CHART, older)
    text = (older / "Chart.yaml").read_text()
    (older / "Chart.yaml").write_text(re.sub(r"(?m)^version: .*$", "version: 0.0.9", text))
    for path in (older / "files/crd.yaml", older / "files/crd-1.25.yaml"):
        definition = yaml.safe_load(path.read_text())
        version = definition["spec"]["versions"][0]
        columns = version["additionalPrinterColumns"]
        version["additionalPrinterColumns"] = [column for column in columns if column["name"] != NEW_COLUMN]
        assert len(version["additionalPrinterColumns"]) == len(columns) - 1
        path.write_text(yaml.safe_dump(definition))
    return older


@pytest.fixture(scope="module")
def life(target: Target, kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """Install an earlier release in place of the operator of manifests/."""
    directory = tmp_path_factory.mktemp("chart")
    life = Life(target, kubectl, directory)
    with life.commands.open_helm(OPERATOR_NAMESPACE) as config:  # from an interrupted test run
        config.uninstall("topkube", ignore_not_found=True)
    was_installed = _is_deployed(target)
    apply_manifests(target)
    try:
        life.move(write_earlier_release(directory))
        yield life
    except BaseException:
        for pod in life.list_operators():
            print(pod.metadata.name, pod.status.phase, pod.status.container_statuses)
        raise
    finally:
        with life.commands.open_helm(OPERATOR_NAMESPACE) as config:
            config.uninstall("topkube", ignore_not_found=True)
        for name in life.namespaces:
            target.core.delete_namespace(name)
        if was_installed:
            apply_manifests(target)


def _is_deployed(target: Target) -> bool:
    try:
        target.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def avoid_a_node(jobs: Namespace) -> None:
    """Create a job of another controller, which the test plays: its status contains a node that new pods avoid."""
    name = jobs.create(build_job("avoids", ["true"], runPolicy={"managedBy": "example.com/test"}))
    avoided = {"name": "node1", "reason": "HardwareFault", "message": "an attempt of this job ended there"}
    status = {"phase": "Running", "avoidedNodes": [avoided]}
    patch = jobs.target.custom.patch_namespaced_custom_object_status
    patch(GROUP, VERSION, jobs.name, PLURAL, name, {"status": status})


@pytest.fixture(scope="module")
def training(life: Life) -> Iterator[str]:
    """The name of a job that trains until it is deleted, on this machine's cluster with a claim for checkpoints. Beside
    it: the sample, a failed job, a job without a node, and a job that avoids a node."""
    options: dict[str, Any] = {"aggregation": {"algorithm": "hitopk", "density": 0.01}}
    if life.target.local is not None:
        create_shared_claim(life.jobs, life.target.local.layout.state / "volumes" / life.jobs.name, "checkpoints")
        options["checkpoint"] = {"claimName": "checkpoints", "everySteps": 100_000}
    command = ["python", "-c", TRAIN, "/tmp/data", "/tmp/cache"]
    name = life.jobs.create(build_job("trains", command, **options))
    sample = (MANIFESTS / "samples/digits-cnn.yaml").read_text().replace("topkube/runtime:0.1.0", images.RUNTIME.name)
    life.jobs.create(yaml.safe_load(sample))
    life.jobs.create(build_job("fails", build_failing_ranks(), runPolicy={"backoffLimit": 0}))
    stuck = build_job("stuck", ["true"])
    stuck["spec"]["template"]["spec"]["nodeSelector"] = {"no": "where"}
    life.jobs.create(stuck)
    avoid_a_node(life.jobs)
    yield name
    if life.target.local is not None:
        life.target.core.delete_persistent_volume(life.jobs.name)


def test_the_chart_is_ready_in_20_seconds_without_a_prometheus_operator(life: Life, training: str) -> None:
    assert life.seconds < 20 * PATIENCE
    assert len(life.list_operators()) == 2
    assert all(status.ready for pod in life.list_operators() for status in pod.status.container_statuses)
    kinds = {document["kind"] for document in yaml.safe_load_all(life.installed["manifest"]) if document}
    assert "PodDisruptionBudget" in kinds
    assert not kinds & set(MONITORS)


def test_helm_test_passes_and_leaves_nothing(life: Life) -> None:
    (line,) = [line for line in read_commands("install.md", "## With Helm") if line.startswith("helm test")]
    logs = life.commands.run(line)["logs"]
    assert "a replica leads" in logs
    assert "spec.template.spec.containers[0].command: is required" in logs, "the webhook has refused nothing"
    pods = life.target.core.list_namespaced_pod(OPERATOR_NAMESPACE).items
    assert [pod.metadata.name for pod in pods if "operator" not in pod.metadata.name] == []


def test_the_webhook_of_the_chart_refuses_a_bad_job_with_path_and_reason(life: Life) -> None:
    invalid = build_job("bad", ["true"])
    del invalid["spec"]["template"]["spec"]["containers"][0]["command"]

    def read_refusal() -> str:
        try:
            life.target.custom.create_namespaced_custom_object(
                GROUP, VERSION, life.jobs.name, PLURAL, invalid, dry_run="All"
            )
        except ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""

    reason = wait_for(read_refusal, "the webhook to be called", 60)
    assert "trainingjobs.topkube.dev" in reason  # the name of our webhook
    assert "spec.template.spec.containers[0].command: is required" in reason
    (hook,) = life.target.admission.read_validating_webhook_configuration("topkube").webhooks
    assert hook.client_config.ca_bundle


def test_a_wrong_value_is_refused_with_its_path_and_changes_nothing(life: Life) -> None:
    revision = life.read_revision()
    with pytest.raises(helm.HelmError, match=r"/operator/logLevel"):
        life.commands.run("helm upgrade topkube charts/topkube -n topkube-system --set operator.logLevel=loud")
    assert life.read_revision() == revision


@pytest.mark.parametrize("namespaces", ["", "--set namespaces={team-a,team-b}"])
def test_a_second_operator_for_the_same_jobs_is_refused_by_name(life: Life, namespaces: str) -> None:
    with pytest.raises(
        helm.HelmError, match=r"another operator, topkube-system/topkube-operator, looks after"
    ) as caught:
        life.commands.run(f"helm install second charts/topkube -n {life.jobs.name} {namespaces}")
    assert "Next:" in str(caught.value)
    with life.commands.open_helm(life.jobs.name) as config:
        assert config.list(all_states=True) == []


@pytest.fixture(scope="module")
def server(life: Life, training: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes what the chart's monitors select. A second job trains with onebit, for its metrics."""
    if BINARY is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    if life.target.local is None:
        pytest.skip("needs a cluster of this machine's own: pods must be reached from here")
    targets = ScrapeTargets(life.target, life.directory, [life.jobs.name])
    command = ["python", "-c", TRAIN, "/tmp/data", "/tmp/cache"]
    weights = life.jobs.create(build_job(WEIGHTS_JOB, command, aggregation={"algorithm": "onebit"}))
    with prometheus(life.directory, targets.jobs) as server:
        life.jobs.wait_phase(training, "Running", seconds=120)
        life.jobs.wait_phase(weights, "Running", seconds=120)
        targets.refresh()
        yield server


def test_every_panel_is_answered_from_the_running_job(life: Life, server: Prometheus) -> None:
    """The panels are waited for together. The operator's progress comes last, up to 15 seconds late. One more job
    begins, because some metrics count the starts of jobs."""
    life.jobs.wait_phase(life.jobs.create(build_job("begins", ["sleep", "30"])), "Running")
    variables, silent = {"namespace": life.jobs.name}, [query for panel in PANELS for query in panel.queries]
    silent = [query for query in silent if "topkube_node_cache_" not in query.expression]  # this release has none

    def has_values(expression: str) -> bool:
        values = [
            point[1]
            for series in server.query(fill_variables(expression, INTERVAL, **variables))
            for point in series.points
        ]
        return any(not math.isnan(value) for value in values)

    def do_all_report() -> bool:
        silent[:] = [query for query in silent if not has_values(query.expression)]
        return not silent

    try:
        wait_for(do_all_report, "answers", 150, interval=1)
    except AssertionError:
        raise AssertionError(f"no data for {[query.expression for query in silent]}") from None
    finally:
        life.jobs.delete(WEIGHTS_JOB)


def test_every_alert_is_evaluated_and_every_metric_and_label_named_is_scraped(server: Prometheus) -> None:
    def are_rules_healthy() -> bool:
        rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
        return {rule["name"] for rule in rules if rule["health"] == "ok"} == {alert.name for alert in ALERTS}

    wait_for(are_rules_healthy, "all alerts to be evaluated", 30)
    producers = server.query("count by (namespace, phase) (topkube_jobs)")
    assert {point[1] for series in producers for point in series.points} == {1.0}, "only the leader serves them"
    labels: dict[str, set[str]] = {}
    for series in server.ask("series", **{"match[]": '{__name__=~"topkube_.*|process_.*"}'}):
        labels.setdefault(series["__name__"], set()).update(series)
    expressions = [query.expression for panel in PANELS for query in panel.queries]
    for expression in [*expressions, *(alert.expression_for_all() for alert in ALERTS)]:
        for name, selector in re.findall(r"\b((?:topkube|process)_\w+)(\{[^}]*\})?", expression):
            if name.startswith("topkube_node_cache_"):
                continue  # this release has no cache on nodes
            assert name in labels, expression
            assert set(re.findall(r'(\w+)[=!]~?"', selector)) <= labels[name], expression


def test_a_scrape_is_small(life: Life, server: Prometheus, training: str) -> None:
    for pod in life.jobs.list_pods("worker", training):
        (series,) = server.query(f'scrape_samples_scraped{{pod="{pod.metadata.name}"}}')
        assert 0 < series.points[-1][1] < 500


@pytest.mark.timeout(1200)
def test_the_sample_runs_to_its_end(life: Life, training: str) -> None:
    status = life.jobs.wait_phase("digits-cnn", "Succeeded", seconds=300)
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 300
    assert life.jobs.wait_phase("fails", "Failed", seconds=60)["firstFailure"]["exitCode"] == 7
    for line in read_commands("quickstart.md", "To see more of the job:"):
        output = life.commands.run(f"{line.replace('char-gpt', 'digits-cnn')} -n {life.jobs.name}")["output"]
        assert output.strip(), line


@pytest.fixture(scope="module")
def prometheus_operator(life: Life) -> Iterator[None]:
    """The definitions of the Prometheus operator, without the operator, so that its objects can be stored."""
    crds = life.find_definitions()
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
        wait_for(lambda plural=plural: list_monitors(life, plural) is not None, f"{plural} to be served", 30)
    yield
    for plural in MONITORS.values():
        crds.delete(name=f"{plural}.{MONITORING}")


def list_monitors(life: Life, plural: str) -> list[str] | None:
    """Return the names of the release's objects of a kind; None while the kind is not served."""
    try:
        answer = life.target.custom.list_namespaced_custom_object(MONITORING, "v1", OPERATOR_NAMESPACE, plural)
    except ApiException:
        return None
    return [item["metadata"]["name"] for item in answer["items"]]


def read_step(life: Life, name: str) -> int:
    return int((life.jobs.read_status(name).get("progress") or {}).get("step") or 0)


def find_line(action: str) -> str:
    lines = read_commands("install.md", "## Upgrade, roll back, uninstall")
    (matching_line,) = [line for line in lines if line.startswith(f"helm {action} ")]
    return matching_line


def test_an_upgrade_keeps_jobs_running_and_upgrades_the_definition(
    life: Life, training: str, prometheus_operator: None
) -> None:
    pods, operators = life.jobs.read_uids("worker"), {pod.metadata.uid for pod in life.list_operators()}
    assert len([name for name in pods if name.startswith(training)]) == 2
    assert NEW_COLUMN not in life.read_columns()
    life.commands.run(find_line("upgrade"), operator={"logLevel": "debug"})
    assert NEW_COLUMN in life.read_columns()
    assert not operators & {pod.metadata.uid for pod in life.list_operators()}
    assert {kind: len(list_monitors(life, plural) or ()) for kind, plural in MONITORS.items()} == dict.fromkeys(
        MONITORS, 1
    )
    before = read_step(life, training)
    wait_for(lambda: read_step(life, training) > before, "the new operator to report steps", 60)
    status = life.jobs.read_status(training)
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
    assert pods.items() >= life.jobs.read_uids("worker").items()
    (hook,) = life.target.admission.read_validating_webhook_configuration("topkube").webhooks
    assert hook.client_config.ca_bundle


def test_a_rollback_goes_back_and_keeps_jobs_running(life: Life, training: str) -> None:
    pods = {name: uid for name, uid in life.jobs.read_uids("worker").items() if name.startswith(training)}
    life.commands.run(find_line("rollback"))
    deployment = life.target.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    assert "--log-level=info" in deployment.spec.template.spec.containers[0].args
    assert NEW_COLUMN not in life.read_columns()
    assert pods.items() <= life.jobs.read_uids("worker").items()
    assert life.jobs.read_status(training)["attempt"] == 1
    assert [list_monitors(life, plural) for plural in MONITORS.values()] == [[], [], []]


def test_uninstalling_keeps_the_definition_the_jobs_and_their_pods(life: Life, training: str) -> None:
    pods = {name: uid for name, uid in life.jobs.read_uids("worker").items() if name.startswith(training)}
    stored = life.read_job_names()
    assert stored >= {"trains", "digits-cnn", "fails", "stuck", "avoids"}
    life.commands.run(find_line("uninstall"))
    assert life.list_operators() == []
    assert "Phase" in life.read_columns()
    assert life.read_job_names() == stored
    assert pods.items() <= life.jobs.read_uids("worker").items()
    labels = "app.kubernetes.io/instance=topkube,app.kubernetes.io/managed-by=Helm"
    roles = kubernetes.client.RbacAuthorizationV1Api(life.target.client)
    assert roles.list_cluster_role(label_selector=labels).items == []
    assert roles.list_cluster_role_binding(label_selector=labels).items == []
    assert life.target.admission.list_validating_webhook_configuration(label_selector=labels).items == []
    assert life.target.core.list_namespaced_config_map(OPERATOR_NAMESPACE, label_selector=labels).items == []


def test_two_releases_for_different_namespaces_run_side_by_side(life: Life, training: str) -> None:
    """Each release has rights only in its namespace. The release in the namespace of the former operator has the key of
    that operator, so it continues the job that had no operator."""
    other = life.create_namespace()
    pods = {name: uid for name, uid in life.jobs.read_uids("worker").items() if name.startswith(training)}
    releases = {"first": (OPERATOR_NAMESPACE, life.jobs), "second": (other.name, other)}
    small = {"replicas": 1, "crds": {"install": False}, "rbac": {"userRoles": False}}
    try:
        for name, (home, place) in releases.items():
            line = f"helm install {name} charts/topkube -n {home} --set namespaces={{{place.name}}}"
            life.commands.run(line, webhook={"name": place.name}, **small)
        with pytest.raises(helm.HelmError, match=rf"looks after namespace {other.name} already"):
            life.commands.run(
                f"helm install third charts/topkube -n {other.name} --set namespaces={{{other.name}}}",
                webhook={"name": "third"},
                **small,
            )
        line = f"helm install third charts/topkube -n {other.name} --set namespaces={{nowhere}}"
        with pytest.raises(
            helm.HelmError, match=r"belongs to release topkube in namespace topkube-system. Next: set crds"
        ):
            life.commands.run(line, **merge_values(small, {"crds": {"install": True}}))
        with pytest.raises(
            helm.HelmError, match=rf"belongs to release second in namespace {other.name}. Next: set webh"
        ):
            life.commands.run(line, webhook={"name": other.name}, **small)
        other.create(build_job("theirs", ["true"]))
        other.wait_phase("theirs", "Succeeded", seconds=90)
        before = read_step(life, training)
        wait_for(lambda: read_step(life, training) > before, "the first release to find the job", 60)
        assert pods.items() <= life.jobs.read_uids("worker").items()
        assert life.jobs.read_status(training)["attempt"] == 1
        life.jobs.delete(training)
        wait_for(lambda: not life.jobs.list_pods(job=training), "the job's pods to be gone", 60)
    finally:
        for name, (home, _) in releases.items():
            with life.commands.open_helm(home) as config:
                config.uninstall(name, ignore_not_found=True)
