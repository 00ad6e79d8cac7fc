"""The chart as Helm renders it, without a cluster: real Helm (its Go SDK), real Kubernetes schemas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from monitoring.alerts import ALERTS
from monitoring.generated import ROOT
from monitoring.values import values
from topkube_operator.__main__ import build_parser as build_operator_parser
from topkube_operator.node_cache.__main__ import build_parser as build_agent_parser

CHART = ROOT / "charts/topkube"
VERSIONS = ["1.27", "1.32", "1.37"]
"""Versions that we support. The test cluster itself covers 1.20."""
MONITORS = {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}, "alerts": {"enabled": True}}
EVERYTHING: dict[str, Any] = {
    "metrics": MONITORS,
    "webhook": {"certManager": {"enabled": True}},
    "imagePullSecrets": [{"name": "registry"}],
    "namespaces": ["team-a", "team-b"],
    "operator": {
        "stallSeconds": 600,
        "gangScheduler": "volcano",
        "checkAddress": False,
        "extraArgs": ["--lost-seconds=30"],
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
    },
    "serviceAccount": {"annotations": {"iam": "role"}},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"team": "sre"}}}]},
    "cache": {
        "node": {"enabled": True, "namespaces": ["team-a"], "sizeLimit": "2Ti", "nodeSelector": {"disk": "fast"}}
    },
}


def render(given: dict[str, Any] | None = None, name: str = "topkube") -> list[dict[str, Any]]:
    """Return all objects that the chart makes, hooks included."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(given or {}, name=name, namespace="topkube-system")
    documents = [yaml.safe_load_all(text) for path, text in files.items() if path.endswith(".yaml")]
    return [item for document in documents for item in document if item]


def select_kind(kind: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def find_only(kind: str, objects: list[dict[str, Any]], component: str = "operator") -> dict[str, Any]:
    """Return the only object of a kind. The node cache has further objects of some kinds, under names of its own."""
    items = select_kind(kind, objects)
    if len(items) > 1:
        items = [
            item for item in items if item["metadata"]["name"].endswith("-node-cache") == (component == "node-cache")
        ]
    (item,) = items
    return item


def read_pod_spec(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = find_only("Deployment", objects)["spec"]["template"]["spec"]
    return spec


def test_helm_lint_reports_no_problem() -> None:
    for version in ("1.20", *VERSIONS):
        report = helm.lint(CHART, strict=True, kube_version=f"v{version}.0")
        assert report["errors"] == []
        assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "given", [{}, EVERYTHING, {"replicas": 1, "webhook": {"enabled": False}}], ids=["plain", "all", "small"]
)
def test_objects_are_valid_in_every_supported_kubernetes(version: str, given: dict[str, Any]) -> None:
    objects = render({**given, "kubeVersionOverride": f"v{version}.0"})
    assert len(objects) > 10
    for item in objects:
        if item["apiVersion"].startswith(("monitoring.coreos.com", "cert-manager.io")):
            continue  # not Kubernetes' own
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize(
    ("version", "api", "rules"),
    [("1.20", "policy/v1beta1", False), ("1.21", "policy/v1", False), ("1.25", "policy/v1", True)],
)
def test_api_versions_follow_the_cluster(version: str, api: str, rules: bool) -> None:
    objects = render({"kubeVersionOverride": f"v{version}.2"})
    assert find_only("PodDisruptionBudget", objects)["apiVersion"] == api
    assert ("x-kubernetes-validations" in json.dumps(select_kind("CustomResourceDefinition", objects))) == rules


def test_crds_are_upgraded_with_the_chart_and_kept_without_it() -> None:
    crds = select_kind("CustomResourceDefinition", render())
    assert {crd["spec"]["names"]["kind"] for crd in crds} == {"TrainingJob", "CachedDataset"}
    for crd in crds:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert crd["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert select_kind("CustomResourceDefinition", render({"crds": {"install": False}})) == []
    with helm.Chart.load(CHART) as chart:
        assert chart.crds == []  # what lies in crds/ is never upgraded


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"replicas": 0}, "/replicas"),
        ({"replica": 3}, "replica"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"namespaces": "team-a"}, "/namespaces"),
        ({"namespaces": ["Team_A"]}, "/namespaces/0"),
        ({"metrics": {"port": 70000}}, "/metrics/port"),
        ({"metrics": {"podMonitor": {"enabled": "yes"}}}, "/metrics/podMonitor/enabled"),
        ({"metrics": {"podMonitor": {"interval": "often"}}}, "/metrics/podMonitor/interval"),
        ({"webhook": {"failurePolicy": "Maybe"}}, "/webhook/failurePolicy"),
        ({"operator": {"resources": {"limit": {}}}}, "/operator/resources"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(given: dict[str, Any], path: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError) as caught:
        chart.validate_schema(given)
    assert path in str(caught.value)


def test_every_value_is_documented_and_in_the_schema() -> None:
    def list_leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, below in node.items():
            here = f"{path}.{name}".lstrip(".")
            if isinstance(below, dict) and below and here not in documented:
                yield from list_leaves(below, here)
            else:
                yield here

    text = (CHART / "values.yaml").read_text()
    documented = {value.path: value for value in values(text)}
    assert set(list_leaves(yaml.safe_load(text))) == set(documented)
    assert all(value.meaning.endswith(".") for value in documented.values())

    def properties(schema: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, below in schema["properties"].items():
            here = f"{path}.{name}".lstrip(".")
            if "properties" in below and here not in documented:
                assert below["additionalProperties"] is False, here
                yield from properties(below, here)
            else:
                yield here

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert set(properties(schema)) - {"global"} == set(documented)


def test_the_operator_runs_restricted() -> None:
    objects = render(EVERYTHING)
    pods = [read_pod_spec(objects), find_only("Pod", objects)["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(container["resources"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))
    (operator,) = pods[0]["containers"]
    assert {"livenessProbe", "readinessProbe"} <= set(operator)


def test_a_list_of_namespaces_gives_no_right_elsewhere() -> None:
    objects = render({"namespaces": ["team-a", "team-b"]})
    roles = {role["metadata"]["name"]: role["rules"] for role in select_kind("ClusterRole", objects)}
    bound = [binding["roleRef"]["name"] for binding in select_kind("ClusterRoleBinding", objects)]
    for rule in (rule for name in bound for rule in roles[name]):
        assert rule["resources"] in (
            ["nodes"],
            ["customresourcedefinitions"],
            ["validatingwebhookconfigurations"],
            ["resourceflavors", "workloadpriorityclasses"],  # Kueue's; these and the next have no namespace
            ["priorityclasses"],
        )
        assert not {"create", "delete", "patch"} & set(rule["verbs"])
    where = {
        binding["metadata"]["namespace"]
        for binding in select_kind("RoleBinding", objects)
        if "-jobs" in binding["metadata"]["name"]
    }
    assert where == {"team-a", "team-b"}
    (container,) = read_pod_spec(objects)["containers"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(container["args"])
    selector = find_only("ValidatingWebhookConfiguration", objects)["webhooks"][0]["namespaceSelector"]
    assert selector["matchExpressions"][0]["values"] == ["team-a", "team-b"]


def test_no_role_of_the_operator_has_a_wildcard_or_exec() -> None:
    for given in ({}, {"namespaces": ["team-a"]}):
        objects = render(given)
        for role in [*select_kind("ClusterRole", objects), *select_kind("Role", objects)]:
            if role["metadata"]["name"] in ("topkube-view", "topkube-edit", "topkube-admin"):
                continue
            for rule in role["rules"]:
                assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
                assert "pods/exec" not in rule["resources"]


def test_selectors_match_the_pods_and_named_ports_exist() -> None:
    objects = render(EVERYTHING)
    labels = find_only("Deployment", objects)["spec"]["template"]["metadata"]["labels"]
    (container,) = read_pod_spec(objects)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = find_only("Service", objects)
    assert service["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    for item in (
        find_only("PodDisruptionBudget", objects)["spec"]["selector"],
        find_only("NetworkPolicy", objects)["spec"]["podSelector"],
    ):
        assert item["matchLabels"].items() <= labels.items()
    allowed = [
        port["port"] for rule in find_only("NetworkPolicy", objects)["spec"]["ingress"] for port in rule["ports"]
    ]
    assert set(allowed) == set(ports)
    monitor = find_only("ServiceMonitor", objects)["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["endpoints"][0]["honorLabels"] is True
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} <= set(ports)


def test_monitors_wait_for_their_crds() -> None:
    kinds = {item["kind"] for item in render()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    kinds = {item["kind"] for item in render({"metrics": MONITORS})}
    assert kinds >= {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_the_rules_are_those_of_the_file_with_complete_runbook_links(tmp_path: Path) -> None:
    given = {
        "metrics": {
            "alerts": {"enabled": True, "runbookBaseUrl": "https://example.com/", "disabled": ["TopKubeNoLeader"]}
        }
    }
    spec = find_only("PrometheusRule", render(given))["spec"]
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    assert "TopKubeNoLeader" not in [rule["alert"] for rule in rules]
    assert {rule["alert"] for rule in rules} == {alert.name for alert in ALERTS} - {"TopKubeNoLeader"}
    for rule in rules:
        assert re.fullmatch(r"https://example\.com/runbooks/[a-z-]+/", rule["annotations"]["runbook_url"])
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    ended = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def render_rules(alerts: dict[str, Any], name: str = "topkube", **given: Any) -> dict[str, dict[str, Any]]:
    objects = render({**given, "metrics": {"alerts": {"enabled": True, **alerts}}}, name=name)
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


def test_cert_manager_issues_the_webhooks_certificate() -> None:
    objects = render(EVERYTHING)
    certificate = find_only("Certificate", objects)
    webhook = find_only("ValidatingWebhookConfiguration", objects)
    service = webhook["webhooks"][0]["clientConfig"]["service"]
    assert certificate["spec"]["dnsNames"] == [f"{service['name']}.{service['namespace']}.svc"]
    annotation = webhook["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert annotation == f"topkube-system/{certificate['metadata']['name']}"
    pod = read_pod_spec(objects)
    assert {"secretName": certificate["spec"]["secretName"]} in [volume.get("secret") for volume in pod["volumes"]]
    assert find_only("Issuer", objects)["metadata"]["name"] == certificate["spec"]["issuerRef"]["name"]
    own = {"certManager": {"enabled": True, "issuerRef": {"name": "corporate", "kind": "ClusterIssuer"}}}
    objects = render({"webhook": own})
    assert select_kind("Issuer", objects) == []
    assert find_only("Certificate", objects)["spec"]["issuerRef"] == {"name": "corporate", "kind": "ClusterIssuer"}


def test_names_follow_the_release_and_stay_within_63_characters() -> None:
    names = [item["metadata"]["name"] for item in render(EVERYTHING, name="r" * 53)]
    assert max(map(len, names)) <= 63
    assert find_only("Deployment", render(name="second"))["metadata"]["name"] == "second-topkube-operator"
    assert find_only("Deployment", render({"fullnameOverride": "own"}))["metadata"]["name"] == "own-operator"


def test_the_notes_name_the_next_step() -> None:
    with helm.Chart.load(CHART) as chart:
        notes = chart.render({"namespaces": ["team-a"]}, name="topkube", namespace="topkube-system")[
            "topkube/templates/NOTES.txt"
        ]
    for word in (
        "rollout status deployment/topkube-operator",
        "helm test topkube",
        "-n team-a",
        "kubectl get tj",
        "Uninstalling keeps",
    ):
        assert word in notes
    assert "{{" not in notes
