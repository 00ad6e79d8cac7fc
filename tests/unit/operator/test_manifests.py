"""The manifests: they fit the operator's code, and they grant no forbidden rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from topkube import __version__
from topkube_operator.children import datasets
from topkube_operator.http import webhook
from topkube_operator.model import names
from topkube_operator.node_cache.agent import is_node_cache_claim

MANIFESTS = Path(__file__).parents[3] / "manifests"
NAMESPACE, NAME = "topkube-system", "topkube-operator"


def read_objects() -> Iterator[dict[str, Any]]:
    """Yield all objects, in the order in which `kubectl apply -f manifests/` takes them."""
    for path in sorted(MANIFESTS.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def find_object(kind: str, name: str = NAME) -> dict[str, Any]:
    matches = [item for item in read_objects() if item["kind"] == kind and item["metadata"]["name"] == name]
    assert len(matches) == 1, (kind, name)
    return matches[0]


def test_objects_come_after_the_objects_that_they_need() -> None:
    kinds = [item["kind"] for item in read_objects()]
    for earlier, later in [
        ("CustomResourceDefinition", "Deployment"),
        ("Namespace", "ServiceAccount"),
        ("ServiceAccount", "Deployment"),
        ("Deployment", "ValidatingWebhookConfiguration"),
    ]:
        assert kinds.index(earlier) < kinds.index(later)
    for item in read_objects():
        assert item["metadata"].get("namespace", NAMESPACE) == NAMESPACE


def test_the_disruption_budget_selects_the_operators_pods_and_allows_a_drain() -> None:
    budget = yaml.safe_load((MANIFESTS / "kubernetes-1.25/disruption-budget.yaml").read_text())
    deployment = find_object("Deployment")
    assert budget["apiVersion"] == "policy/v1"
    labels, selector = deployment["spec"]["template"]["metadata"]["labels"], budget["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert budget["metadata"]["namespace"] == NAMESPACE
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_roles_name_their_verbs_and_resources() -> None:
    for role in (item for item in read_objects() if item["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], role["metadata"]["name"]
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"]) or (
                role["metadata"]["name"] in ("topkube-edit", "topkube-admin")
            )
            if "rbac.authorization.k8s.io/aggregate-to-admin" in role["metadata"]["labels"]:
                assert all("/" not in resource or resource == "pods/log" for resource in rule["resources"])


@pytest.mark.parametrize(
    ("resource", "verbs"),
    [
        ("pods/exec", set()),
        ("pods/attach", set()),
        ("pods/portforward", set()),
        ("serviceaccounts/token", set()),
        ("roles", set()),
        ("nodes", {"list", "watch"}),
        ("validatingwebhookconfigurations", {"get", "update"}),
        ("customresourcedefinitions", {"list", "watch"}),
        ("trainingjobs", {"get", "list", "watch", "delete"}),
        ("pods", {"get", "list", "watch", "create", "patch", "delete"}),
    ],
)
def test_the_operator_has_exactly_these_rights(resource: str, verbs: set[str]) -> None:
    allowed: set[str] = set()
    for rule in find_object("ClusterRole")["rules"] + find_object("Role")["rules"]:
        if resource in rule["resources"]:
            allowed |= set(rule["verbs"])
    assert allowed == verbs


def test_the_operator_is_a_restricted_pod() -> None:
    pod = find_object("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["image"].endswith(f":{__version__}")
        assert {"livenessProbe", "readinessProbe"} <= set(container)


def test_the_node_cache_is_installed_separately_and_has_few_rights() -> None:
    assert not {"DaemonSet", "PersistentVolume"} & {item["kind"] for item in read_objects()}
    by_kind = {item["kind"]: item for item in yaml.safe_load_all((MANIFESTS / "node-cache/agent.yaml").read_text())}
    assert {(rule["resources"][0], *rule["verbs"]) for rule in by_kind["ClusterRole"]["rules"]} == {
        ("persistentvolumeclaims", "list"),
        ("cacheddatasets", "get", "list", "create"),
        ("cacheddatasets/status", "patch"),
    }
    pod = by_kind["DaemonSet"]["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    (container,) = pod["containers"]
    assert container["image"].endswith(f":{__version__}")
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "SYS_CHROOT"]},
    }
    (folder,) = (volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume)
    volume, claim = yaml.safe_load_all((MANIFESTS / "node-cache/namespace.yaml").read_text())
    assert volume["spec"]["hostPath"] == {"path": f"{folder}/team-a", "type": "Directory"}, "only the agent makes it"
    assert claim["metadata"]["name"] == datasets.CLAIM
    assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == f"{datasets.CLAIM}-team-a"
    assert is_node_cache_claim({**claim, "status": {"phase": "Bound"}})
    assert names.NODE_CACHE in claim["metadata"]["labels"]


def test_the_webhook_is_called_by_the_name_in_its_certificate() -> None:
    configuration = find_object("ValidatingWebhookConfiguration", webhook.CONFIGURATION)
    [hook] = configuration["webhooks"]
    service = hook["clientConfig"]["service"]
    container = find_object("Deployment")["spec"]["template"]["spec"]["containers"][0]
    service_names = [
        value for flag, value in zip(container["args"], container["args"][1:], strict=False) if flag == "--webhook"
    ]
    assert service_names == [f"{service['name']}.{service['namespace']}.svc"]
    assert service["path"] == webhook.PATH
    assert {"name": "webhook", "containerPort": webhook.PORT, "protocol": "TCP"} in container["ports"]
    [port] = [port for port in find_object("Service")["spec"]["ports"] if port["port"] == service["port"]]
    assert port["targetPort"] == "webhook"
    assert "caBundle" not in hook["clientConfig"], "the operator writes it"
    assert hook["failurePolicy"] == "Ignore", "a dead operator must not keep people from deleting jobs"


def test_every_selector_of_the_operators_pods_matches_them() -> None:
    labels = find_object("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert find_object("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert find_object("Service")["spec"]["selector"].items() <= labels.items()
    assert {"app.kubernetes.io/name": "topkube", "app.kubernetes.io/component": "operator"}.items() <= labels.items()
    assert find_object("Namespace", NAMESPACE)["metadata"]["labels"]["kubernetes.io/metadata.name"] == NAMESPACE


def test_every_role_binding_names_existing_objects() -> None:
    for binding in (item for item in read_objects() if item["kind"].endswith("Binding")):
        find_object(binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for subject in binding["subjects"]:
            find_object(subject["kind"], subject["name"])
            assert subject["namespace"] == NAMESPACE
