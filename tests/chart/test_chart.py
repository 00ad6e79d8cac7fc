"""The chart as Helm renders it, without a cluster: real Helm (its Go SDK), real Kubernetes schemas."""

from __future__ import annotations

import http.server
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from rendered import CHART, EVERYTHING, MONITORS, find_only, read_pod_spec, render, select_kind

from monitoring.values import list_values

VERSIONS = ["1.25", "1.32", "1.37"]
"""Versions whose schemas the objects must match. The test cluster itself runs 1.20."""


def test_helm_lint_reports_no_problem() -> None:
    for version in ("1.20", *VERSIONS):
        report = helm.lint(CHART, strict=True, kube_version=f"v{version}.0")
        assert report["errors"] == []
        assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, {"replicas": 1, "webhook": {"enabled": False}}], ids=["plain", "all", "small"]
)
def test_objects_are_valid_in_every_supported_kubernetes(version: str, values: dict[str, Any]) -> None:
    objects = render({**values, "kubeVersionOverride": f"v{version}.0"})
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
        assert chart.crds == []  # Helm never upgrades what is in crds/


@pytest.mark.parametrize(
    ("values", "path"),
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
        ({"operator": {"podLabels": {"app.kubernetes.io/name": "other"}}}, "/operator/podLabels"),
        ({"operator": {"podLabels": {"app.kubernetes.io/part-of": "other"}}}, "/operator/podLabels"),
        ({"cache": {"node": {"hostPath": "/var/lib/../../etc"}}}, "/cache/node/hostPath"),
        ({"cache": {"node": {"hostPath": "/var/.."}}}, "/cache/node/hostPath"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], path: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError) as caught:
        chart.validate_schema(values)
    assert path in str(caught.value)


def test_a_host_path_may_contain_dots_in_its_names() -> None:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema({"cache": {"node": {"hostPath": "/var/..cache/v1.2/a.."}}})


def test_every_value_is_documented_and_in_the_schema() -> None:
    def list_leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, child in node.items():
            full_path = f"{path}.{name}".lstrip(".")
            if isinstance(child, dict) and child and full_path not in documented:
                yield from list_leaves(child, full_path)
            else:
                yield full_path

    text = (CHART / "values.yaml").read_text()
    documented = {value.path: value for value in list_values(text)}
    assert set(list_leaves(yaml.safe_load(text))) == set(documented)
    assert all(value.meaning.endswith(".") for value in documented.values())

    def list_properties(schema: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, child in schema["properties"].items():
            full_path = f"{path}.{name}".lstrip(".")
            if "properties" in child and full_path not in documented:
                assert child["additionalProperties"] is False, full_path
                yield from list_properties(child, full_path)
            else:
                yield full_path

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert set(list_properties(schema)) - {"global"} == set(documented)


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


def test_a_list_of_namespaces_grants_no_right_in_other_namespaces() -> None:
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
    namespaces = {
        binding["metadata"]["namespace"]
        for binding in select_kind("RoleBinding", objects)
        if "-jobs" in binding["metadata"]["name"]
    }
    assert namespaces == {"team-a", "team-b"}
    (container,) = read_pod_spec(objects)["containers"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(container["args"])
    selector = find_only("ValidatingWebhookConfiguration", objects)["webhooks"][0]["namespaceSelector"]
    assert selector["matchExpressions"][0]["values"] == ["team-a", "team-b"]


def test_no_role_has_a_wildcard_or_exec_and_no_role_of_users_has_a_status() -> None:
    users_roles = {"topkube-view", "topkube-edit", "topkube-admin"}
    for values in ({}, {"namespaces": ["team-a"]}, EVERYTHING):
        objects = render(values)
        roles = [*select_kind("ClusterRole", objects), *select_kind("Role", objects)]
        assert users_roles <= {role["metadata"]["name"] for role in roles}
        for role in roles:
            for rule in role["rules"]:
                resources = rule.get("resources", [])
                assert "*" not in [*rule["verbs"], *resources, *rule.get("apiGroups", [])], role["metadata"]["name"]
                assert "pods/exec" not in resources
                if role["metadata"]["name"] in users_roles:
                    assert {resource for resource in resources if "/" in resource} <= {"pods/log"}


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


@pytest.mark.parametrize("name", ["2024", "topkube.prod", "1.2", "a." + "b" * 40])
def test_objects_have_valid_names_whatever_the_name_of_the_release(name: str) -> None:
    """Helm accepts such releases. A Service must have a name that begins with a letter and contains no dots."""
    for objects in (render(EVERYTHING, name=name), render({"fullnameOverride": "1st"}, name=name)):
        for item in objects:
            if item["kind"] == "Service":
                assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", item["metadata"]["name"])
            assert re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", item["metadata"]["name"])
            assert len(item["metadata"]["name"]) <= 63
        service = find_only("Service", objects)["metadata"]["name"]
        hook = find_only("ValidatingWebhookConfiguration", objects)["webhooks"][0]
        assert hook["clientConfig"]["service"]["name"] == service
        (operator,) = read_pod_spec(objects)["containers"]
        assert f"--webhook={service}.topkube-system.svc" in operator["args"]


def test_a_digest_replaces_the_tag_of_the_image() -> None:
    digest = "sha256:" + "0a" * 32
    objects = render(
        {"image": {"repository": "r.example.com/o", "digest": digest}, "cache": {"node": {"enabled": True}}}
    )
    pods = [read_pod_spec(objects), find_only("Pod", objects)["spec"]]
    pods.append(find_only("DaemonSet", objects)["spec"]["template"]["spec"])
    assert {container["image"] for pod in pods for container in pod["containers"]} == {f"r.example.com/o@{digest}"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics": {"protection": {"secretName": "tls"}}}, r"secretName needs metrics\.protection\.tls=true"),
        ({"metrics": {"protection": {"scrapeTlsConfig": {"serverName": "a"}}}}, "scrapeTlsConfig needs"),
        (
            {"metrics": {"protection": {"tls": True, "readers": [{"name": "a", "namespace": "b"}]}}},
            r"readers needs metrics\.protection\.authentication=kubernetes",
        ),
        (
            {"networkPolicy": {"enabled": False, "webhookFrom": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}},
            r"webhookFrom needs networkPolicy\.enabled=true",
        ),
        ({"webhook": {"certManager": {"issuerRef": {"name": "a"}}}}, r"issuerRef needs webhook\.certManager\.enabled"),
        ({"cache": {"node": {"namespaces": ["team-a"]}}}, r"namespaces needs cache\.node\.enabled=true"),
        ({"podDisruptionBudget": {"minAvailable": 2}}, "minAvailable=2 of 2 replicas blocks every drain"),
        ({"podDisruptionBudget": {"minAvailable": "51%"}}, "minAvailable=51% of 2 replicas blocks every drain"),
        ({"metrics": {"port": 9443}}, "metrics/port"),  # the webhook's port
        ({"webhook": {"certManager": {"enabled": True, "issuerRef": {"kind": "Issuer"}}}}, "issuerRef"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    def install(chart: helm.Chart) -> None:
        chart.validate_schema(values)
        chart.render(values, name="topkube", namespace="topkube-system")

    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=message):
        install(chart)


@pytest.mark.parametrize(
    "values",
    [
        {"podDisruptionBudget": {"minAvailable": 2}, "replicas": 3},
        {"podDisruptionBudget": {"minAvailable": "50%"}},
        {"podDisruptionBudget": {"minAvailable": 5}, "replicas": 1},
        {"podDisruptionBudget": {"minAvailable": 5, "enabled": False}},
    ],
)
def test_budgets_that_let_a_pod_go_are_accepted(values: dict[str, Any]) -> None:
    assert find_only("Deployment", render(values))


def test_the_test_pod_runs_where_operator_pods_run() -> None:
    """On a cluster whose nodes all have taints, it would wait; on a node with another processor, it would fail."""
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    values = {**EVERYTHING, "operator": {**EVERYTHING["operator"], "affinity": affinity}}
    objects = render(values)
    operator, test = find_only("Deployment", objects)["spec"]["template"], find_only("Pod", objects)
    for field in ("nodeSelector", "tolerations", "imagePullSecrets", "affinity"):
        assert test["spec"][field] == operator["spec"][field]
    assert test["metadata"]["labels"]["c"] == "d"  # such as the label that keeps a mesh's sidecar away
    assert test["metadata"]["annotations"]["a"] == "b"


STAND_IN = """
class ApiException(Exception):
    body = '{"message": "spec.workers, command"}'

class CustomObjectsApi:
    def create_namespaced_custom_object(self, group, version, namespace, plural, job, dry_run):
        if job["spec"]["workers"] == 0 or "command" not in job["spec"]["template"]["spec"]["containers"][0]:
            raise ApiException

def load_incluster_config():
    pass
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_test_pod_reaches_the_operator_by_both_families_of_addresses(address: str, tmp_path: Path) -> None:
    class Server(http.server.HTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'topkube_leader{release="topkube"} 1.0\n')

    (tmp_path / "kubernetes").mkdir()
    for name in ("__init__", "client", "config"):
        (tmp_path / f"kubernetes/{name}.py").write_text(STAND_IN if name != "__init__" else "")
    try:
        server = Server((address, 0), Handler)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (container,) = find_only("Pod", render({"metrics": {"port": server.server_port}}))["spec"]["containers"]
        service = {"$(TOPKUBE_OPERATOR_SERVICE_HOST)": address}  # which Kubernetes puts in its place
        environment = {entry["name"]: service.get(entry["value"], entry["value"]) for entry in container["env"]}
        ended = subprocess.run(
            [sys.executable, "-c", *container["args"]],
            env={**environment, "PYTHONPATH": str(tmp_path), "no_proxy": "*"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        server.shutdown()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a replica leads" in ended.stdout


def _list_texts(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values below `node` that Kubernetes reads as text, with their paths: names, labels, arguments, …"""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _list_texts(item, f"{path}[{index}]")
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in ("labels", "annotations", "matchLabels", "nodeSelector"):
            yield from ((f"{path}.{key}.{name}", text) for name, text in value.items())
        elif key in ("args", "command", "dnsNames", "matchNames", "resourceNames", "values") and isinstance(
            value, list
        ):
            yield from ((f"{path}.{key}", text) for text in value)
        elif key in ("image", "name", "namespace", "path", "value", "interval") or key.endswith(("Name", "namespace")):
            yield f"{path}.{key}", value
        else:
            yield from _list_texts(value, f"{path}.{key}")


@pytest.mark.parametrize("name", ["2024", "no", "1e3", "0x1f", "2024-01-01", "null", "topkube"])
def test_names_that_look_like_other_types_are_text(name: str) -> None:
    """Unquoted, YAML reads `no` as false and 2024 as a number, and the API server refuses the object."""
    account = {"name": name, "namespace": name}
    protection = {"tls": True, "secretName": name, "authentication": "kubernetes", "readers": [account]}
    values = {
        **EVERYTHING,
        "namespaces": [name],
        "cache": {
            "node": {
                "enabled": True,
                "namespace": name,
                "namespaces": [name],
                "priorityClassName": name,
                "sizeLimit": "1Ti",
            }
        },
        "fullnameOverride": name,
        "image": {"repository": "1", "tag": "2"},
        "metrics": {**MONITORS, "protection": protection, "dashboards": {"enabled": True, "namespace": name}},
        "operator": {"priorityClassName": name},
        "serviceAccount": {"name": name},
        "webhook": {"name": name, "certManager": {"enabled": True, "issuerRef": {"name": name}}},
    }
    without_crds = {"crds": {"install": False}}
    for objects in (render(values | without_crds, name, name), render(without_crds, name, name)):
        texts = [(f"{item['kind']}{path}", text) for item in objects for path, text in _list_texts(item)]
        assert len(texts) > 100
        assert [(path, text) for path, text in texts if not isinstance(text, str)] == []
        assert {item["metadata"].get("namespace", name) for item in objects} <= {name}


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
