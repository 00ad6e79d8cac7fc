"""What the chart installs for monitoring: monitors, alerting rules, dashboards, and metrics that need a token."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from rendered import CHART, MONITORS, find_only, read_pod_spec, render, select_kind

from monitoring.alerts import ALERTS
from topkube_operator.__main__ import build_parser as build_operator_parser
from topkube_operator.node_cache.__main__ import build_parser as build_agent_parser


def test_monitors_wait_for_their_crds() -> None:
    kinds = {item["kind"] for item in render()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    kinds = {item["kind"] for item in render({"metrics": MONITORS})}
    assert kinds >= {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_series_of_workers_can_be_left_out() -> None:
    rule = {"sourceLabels": ["__name__"], "regex": "topkube_step_seconds_bucket", "action": "drop"}
    (endpoint,) = find_only("PodMonitor", render({"metrics": MONITORS}))["spec"]["podMetricsEndpoints"]
    assert "metricRelabelings" not in endpoint
    pod_monitor = {"enabled": True, "metricRelabelings": [rule]}
    (endpoint,) = find_only("PodMonitor", render({"metrics": {"podMonitor": pod_monitor}}))["spec"][
        "podMetricsEndpoints"
    ]
    assert endpoint["metricRelabelings"] == [rule]


def test_a_pod_of_a_user_cannot_fill_prometheus() -> None:
    """Everybody who may create pods can give them the labels of workers, and serve any number of series."""
    spec = find_only("PodMonitor", render({"metrics": MONITORS}))["spec"]
    largest_worker = (
        256 * 32 + 100
    )  # slotsPerWorker and the series of each rank (docs/monitoring.md), and those of the pod
    assert largest_worker < spec["sampleLimit"] < 2 * largest_worker
    unlimited = {"podMonitor": {"enabled": True, "sampleLimit": 0}}
    assert "sampleLimit" not in find_only("PodMonitor", render({"metrics": unlimited}))["spec"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_the_rules_are_those_of_the_file_with_complete_runbook_links(tmp_path: Path) -> None:
    values = {
        "metrics": {
            "alerts": {"enabled": True, "runbookBaseUrl": "https://example.com/", "disabled": ["TopKubeNoLeader"]}
        }
    }
    spec = find_only("PrometheusRule", render(values))["spec"]
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    assert "TopKubeNoLeader" not in [rule["alert"] for rule in rules]
    assert {rule["alert"] for rule in rules} == {alert.name for alert in ALERTS} - {"TopKubeNoLeader"}
    for rule in rules:
        assert re.fullmatch(r"https://example\.com/runbooks/[a-z-]+/", rule["annotations"]["runbook_url"])
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    ended = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def read_alloy(text: str) -> dict[tuple[str, str], str]:
    """Return the body of each component of an Alloy configuration, by the component's name and label. Fails if braces
    do not match."""
    components = re.findall(r'^([a-z_.]+) "([a-z_]+)" \{\n(.*?)^\}$', text, re.DOTALL | re.MULTILINE)
    unmatched = re.sub(r'^[a-z_.]+ "[a-z_]+" \{\n.*?^\}$', "", text, flags=re.DOTALL | re.MULTILINE)
    assert not unmatched.strip()
    assert all(body.count("{") == body.count("}") for *_, body in components)
    return {(name, label): body for name, label, body in components}


def read_attributes(body: str) -> dict[str, Any]:
    """Return the attributes of a body that has no blocks. Values are those of YAML, references are strings."""
    return {name: yaml.safe_load(value) for name, value in re.findall(r"^ *(\w+) += (.*)$", body, re.MULTILINE)}


def test_alloy_scrapes_what_prometheus_scrapes() -> None:
    """Alloy is not available to the tests, so its configuration is compared with that of Prometheus, which is run."""
    page = (CHART.parents[1] / "docs/monitoring.md").read_text()
    (prometheus,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    (text,) = re.findall(r"```alloy\n(.*?)```", page, re.DOTALL)
    components = read_alloy(text)
    for config in yaml.safe_load(prometheus)["scrape_configs"]:
        label = config["job_name"].replace("-", "_")
        (discovery,) = config["kubernetes_sd_configs"]
        selected_pods = read_attributes(components["discovery.kubernetes", label])
        assert selected_pods == {"role": discovery["role"], **discovery.get("namespaces", {})}
        body = components["discovery.relabel", label]
        rules = [read_attributes(rule) for rule in re.findall(r"rule \{\n(.*?)\}", body, re.DOTALL)]
        assert rules == config["relabel_configs"]
        assert f"targets = discovery.kubernetes.{label}.targets\n" in body
        scrape = read_attributes(components["prometheus.scrape", label])
        assert scrape.pop("targets") == f"discovery.relabel.{label}.output"
        assert scrape.pop("forward_to") == ["prometheus.remote_write.default.receiver"]
        assert scrape == {
            name: value for name, value in config.items() if name in ("job_name", "honor_labels", "sample_limit")
        }
    assert ("prometheus.remote_write", "default") in components


def render_rules(alerts: dict[str, Any], name: str = "topkube", **values: Any) -> dict[str, dict[str, Any]]:
    objects = render({**values, "metrics": {"alerts": {"enabled": True, **alerts}}}, name=name)
    groups = find_only("PrometheusRule", objects)["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_without_changes_the_rules_are_the_file_for_one_release() -> None:
    raw = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    expected = {rule["alert"]: rule for group in raw["groups"] for rule in group["rules"]}
    own = 'namespace="topkube-system",release="topkube",'
    for name, rule in render_rules({}).items():
        expression = rule["expr"].replace(own, "").replace('release="topkube",', "").replace("{}", "")
        assert {**rule, "expr": expression} == expected[name]


def test_the_rules_of_two_releases_select_their_own_jobs_and_operators() -> None:
    for name, namespaces in (("first", ["a", "b"]), ("second", ["c"])):
        for rule in render_rules({}, name=f"{name}-topkube", namespaces=namespaces).values():
            jobs, own = f'namespace=~"{"|".join(namespaces)}"', f'release="{name}-topkube"'
            selectors = re.findall(r"\btopkube_\w+(\{[^}]*\})?", rule["expr"])
            assert selectors
            assert all(jobs in selector or own in selector for selector in selectors), rule["expr"]


def test_severities_labels_times_and_thresholds_are_values() -> None:
    change = {"severity": "page", "for": "10m", "labels": {"team": "x"}, "thresholds": {"seconds": 1234.5}}
    alerts = {
        "extraLabels": {"cluster": "c", "team": "ml"},
        "severities": {"warning": "ticket"},
        "rules": {"TopKubeCheckpointTooOld": change},
    }
    rules = render_rules(alerts)
    changed, other = rules["TopKubeCheckpointTooOld"], rules["TopKubeJobFailed"]
    assert changed["labels"] == {"severity": "page", "team": "x", "cluster": "c"}
    assert changed["for"] == "10m"
    assert changed["expr"].endswith("> 1234.5")
    assert other["labels"] == {"severity": "ticket", "team": "ml", "cluster": "c"}
    assert other["expr"].endswith("< 3600")
    assert rules["TopKubeNoLeader"]["labels"]["severity"] == "critical"
    zero = render_rules({"rules": {"TopKubeRestartStorm": {"thresholds": {"restarts": 0}}}})
    assert zero["TopKubeRestartStorm"]["expr"].endswith(">= 0")


@pytest.mark.parametrize(
    ("alerts", "message"),
    [
        (
            {"disabled": ["TopKubeJobFaild"]},
            'there is no alert "TopKubeJobFaild". Next: use one of: .*TopKubeJobFailed',
        ),
        ({"rules": {"JobFailed": {"severity": "page"}}}, 'there is no alert "JobFailed"'),
        (
            {"rules": {"TopKubeJobFailed": {"thresholds": {"minutes": 1}}}},
            'TopKubeJobFailed.thresholds has no "minutes". Next: use one of: seconds',
        ),
    ],
)
def test_names_of_alerts_and_thresholds_that_do_not_exist_are_refused(alerts: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render_rules(alerts)


def test_scrapers_are_admitted_everywhere_by_one_value() -> None:
    peers = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "vmagent"}}}]
    objects = render({"networkPolicy": {"metricsFrom": peers}, "cache": {"node": {"enabled": True}}})
    (container,) = read_pod_spec(objects)["containers"]
    assert vars(build_operator_parser().parse_args(container["args"]))["metrics_from"] == peers
    agent = find_only("NetworkPolicy", objects, "node-cache")["spec"]
    assert agent["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}], "from": peers}]
    template = find_only("DaemonSet", objects)["spec"]["template"]
    assert agent["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (ports,) = (port["containerPort"] for port in template["spec"]["containers"][0]["ports"])
    service = find_only("Service", objects, "node-cache")["spec"]
    assert [port["port"] for port in service["ports"]] == [ports]
    assert peers[0] in find_only("NetworkPolicy", objects)["spec"]["ingress"][0]["from"]


PROTECTED: dict[str, Any] = {
    "tls": True,
    "authentication": "kubernetes",
    "readers": [{"name": "prometheus", "namespace": "monitoring"}],
}


@pytest.mark.parametrize("secret", ["", "metrics-tls"])
def test_metrics_are_protected_on_the_operator_and_on_the_nodes(secret: str) -> None:
    metrics = {**MONITORS, "protection": {**PROTECTED, "secretName": secret}}
    objects = render({"metrics": metrics, "cache": {"node": {"enabled": True}}})
    pods = {
        "operator": read_pod_spec(objects),
        "node-cache": find_only("DaemonSet", objects)["spec"]["template"]["spec"],
    }
    parsers = {"operator": build_operator_parser(), "node-cache": build_agent_parser()}
    for component, pod in pods.items():
        (container,) = pod["containers"]
        options = parsers[component].parse_args(container["args"])
        assert options.metrics_authentication == "kubernetes"
        assert options.metrics_tls == (not secret)
        assert (str(options.metrics_certificate) == "/etc/topkube/metrics") == bool(secret)
        mounted = {"secretName": secret} in [volume.get("secret") for volume in pod["volumes"]]
        assert mounted == bool(secret)
        endpoint = find_only("ServiceMonitor", objects, component)["spec"]["endpoints"][0]
        assert endpoint["scheme"] == "https"
        assert endpoint["bearerTokenFile"].endswith("/token")
        assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
    for probe in ("livenessProbe", "readinessProbe"):
        assert pods["operator"]["containers"][0][probe]["httpGet"]["scheme"] == "HTTPS"
    roles = {role["metadata"]["name"]: role["rules"] for role in select_kind("ClusterRole", objects)}
    for name in ("topkube-operator", "topkube-node-cache"):
        created = [rule["resources"] for rule in roles[name] if rule["verbs"] == ["create"]]
        assert ["tokenreviews"] in created
        assert ["subjectaccessreviews"] in created
    assert roles["topkube-operator-metrics-reader"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    readers = next(
        item["subjects"]
        for item in select_kind("ClusterRoleBinding", objects)
        if item["metadata"]["name"] == "topkube-operator-metrics-reader"
    )
    assert readers == [{"kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring"}]
    for item in objects:
        if not item["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes_validate.validate(item, "1.32", strict=True)


def test_tokens_without_tls_are_refused() -> None:
    with pytest.raises(helm.HelmError, match=r"authentication needs metrics\.protection\.tls=true"):
        render({"metrics": {"protection": {"authentication": "kubernetes"}}})


def test_dashboards_are_complete_and_in_the_place_that_values_name() -> None:
    dashboards = {"labels": {"find": "me"}, "annotations": {"grafana_folder": "TopKube"}, "namespace": "grafana"}
    maps = select_kind("ConfigMap", render({"metrics": {"dashboards": dashboards}}))
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: text for config_map in maps for name, text in config_map["data"].items()} == files
    for config_map in maps:
        assert config_map["metadata"]["namespace"] == "grafana"
        assert config_map["metadata"]["labels"]["find"] == "me"
        assert config_map["metadata"]["annotations"] == {"grafana_folder": "TopKube"}
    assert select_kind("ConfigMap", render({"metrics": {"dashboards": {"enabled": False}}})) == []
