"""manifests/ and the chart install the same operator, with the same rights and the same protections."""

from __future__ import annotations

import json
from typing import Any

import yaml
from rendered import find_only, render, select_kind

from monitoring.generated import ROOT
from topkube_operator.__main__ import build_parser
from topkube_operator.node_cache.__main__ import build_parser as build_agent_parser


def read_manifests(name: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((ROOT / f"manifests/{name}.yaml").read_text()) if item]


def list_rules(role: dict[str, Any]) -> set[str]:
    return {json.dumps({name: sorted(value) for name, value in rule.items()}) for rule in role["rules"]}


def test_roles_grant_the_same_rights() -> None:
    chart, plain = render(), read_manifests("rbac")
    for kind in ("ClusterRole", "Role"):
        charts = {role["metadata"]["name"]: list_rules(role) for role in select_kind(kind, chart)}
        charts.pop("topkube-test", None)  # exists during helm test only
        assert {role["metadata"]["name"]: list_rules(role) for role in select_kind(kind, plain)} == charts
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        charts = {item["metadata"]["name"]: (item["roleRef"], item["subjects"]) for item in select_kind(kind, chart)}
        charts.pop("topkube-test", None)
        assert {
            item["metadata"]["name"]: (item["roleRef"], item["subjects"]) for item in select_kind(kind, plain)
        } == charts


def test_both_have_the_same_operator_pods_except_for_labels_and_default_arguments() -> None:
    pods = []
    for objects in (read_manifests("operator"), render()):
        pod = find_only("Deployment", objects)["spec"]["template"]["spec"]
        pod.pop("affinity")
        (container,) = pod["containers"]
        pods.append((pod, vars(build_parser().parse_args(container.pop("args")))))
    assert pods[0] == pods[1]
    assert (
        find_only("Deployment", read_manifests("operator"))["spec"]["replicas"]
        == find_only("Deployment", render())["spec"]["replicas"]
    )


def test_pods_wait_for_linux_nodes() -> None:
    """A cluster may have Windows nodes. The agents tolerate all taints, also those that keep Linux pods from them."""
    chart = render({"cache": {"node": {"enabled": True, "namespaces": ["team-a"]}}})
    plain = [*read_manifests("operator"), *read_manifests("node-cache/agent")]
    for objects in (chart, plain):
        templates = [find_only(kind, objects)["spec"]["template"] for kind in ("Deployment", "DaemonSet")]
        assert [pod["spec"]["nodeSelector"] for pod in templates] == 2 * [{"kubernetes.io/os": "linux"}]
    more = find_only("Deployment", render({"operator": {"nodeSelector": {"pool": "system"}}}))
    assert more["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "system"}


def test_both_have_the_same_service_and_webhook() -> None:
    plain, chart = find_only("Service", read_manifests("operator")), find_only("Service", render())
    assert plain["spec"]["ports"] == chart["spec"]["ports"]
    plain, chart = (find_only("ValidatingWebhookConfiguration", item) for item in (read_manifests("webhook"), render()))
    assert plain["metadata"]["name"] == chart["metadata"]["name"]
    assert plain["webhooks"] == chart["webhooks"]


def test_both_have_the_same_network_policy_for_the_operators_pods() -> None:
    plain, chart = (find_only("NetworkPolicy", item)["spec"] for item in (read_manifests("operator"), render()))
    assert plain["policyTypes"] == chart["policyTypes"] == ["Ingress"]
    pod = find_only("Deployment", read_manifests("operator"))["spec"]["template"]
    assert plain["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    test = {"app.kubernetes.io/instance": "topkube", "app.kubernetes.io/component": "test"}  # helm test's own pod
    (metrics,) = (rule for rule in chart["ingress"] if rule["ports"][0]["port"] == "metrics")
    metrics["from"].remove({"podSelector": {"matchLabels": test}})
    assert plain["ingress"] == chart["ingress"]
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    assert metrics["from"] == [{"namespaceSelector": {}, "podSelector": prometheus}]


def test_a_value_limits_the_callers_of_the_webhook() -> None:
    peers = [{"ipBlock": {"cidr": "172.18.0.2/32"}}]
    for values, expected in (({}, None), ({"webhookFrom": peers}, peers)):
        rules = find_only("NetworkPolicy", render({"networkPolicy": values}))["spec"]["ingress"]
        assert {rule["ports"][0]["port"]: rule.get("from") for rule in rules}["webhook"] == expected
    assert select_kind("NetworkPolicy", render({"networkPolicy": {"enabled": False}})) == []


def _remove_labels(item: dict[str, Any]) -> dict[str, Any]:
    """Return the object without its labels and annotations, because Helm adds labels."""
    stripped = json.loads(json.dumps(item))
    stripped["metadata"] = {key: stripped["metadata"].get(key) for key in ("name", "namespace")}
    return stripped


def test_the_node_cache_is_off_by_default_and_the_same_in_both_when_it_is_on() -> None:
    assert select_kind("DaemonSet", render()) == select_kind("PersistentVolume", render()) == []
    own = {"enabled": True, "namespaces": ["team-a"], "namespace": "topkube-node-cache"}
    chart = render({"cache": {"node": own}})
    plain = read_manifests("node-cache/agent") + read_manifests("node-cache/namespace")
    pods = []
    for objects in (plain, chart):
        pod = find_only("DaemonSet", objects)["spec"]["template"]["spec"]
        pods.append((pod, vars(build_agent_parser().parse_args(pod["containers"][0].pop("args")))))
    assert pods[0] == pods[1]
    assert (
        find_only("DaemonSet", chart)["metadata"]["namespace"] == find_only("DaemonSet", plain)["metadata"]["namespace"]
    )
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        role = next(item for item in select_kind(kind, chart) if item["metadata"]["name"] == "topkube-node-cache")
        assert _remove_labels(role) == _remove_labels(find_only(kind, plain))
    for kind in ("PersistentVolume", "PersistentVolumeClaim"):
        assert _remove_labels(find_only(kind, chart)) == _remove_labels(find_only(kind, plain))
        label = find_only(kind, chart)["metadata"]["labels"]["topkube.dev/node-cache"]
        assert label == find_only(kind, plain)["metadata"]["labels"]["topkube.dev/node-cache"] == "team-a"
    # The jobs' NetworkPolicies let operator pods in, and the operator's policies and budgets select them.
    policies = [find_only("NetworkPolicy", objects, "node-cache")["spec"] for objects in (plain, chart)]
    for policy in policies:
        policy.pop("podSelector")
    assert policies[0] == policies[1]
    (daemons, operator) = (find_only(kind, chart)["spec"] for kind in ("DaemonSet", "Deployment"))
    labels = daemons["template"]["metadata"]["labels"]
    assert daemons["selector"]["matchLabels"].items() <= labels.items()
    assert not operator["selector"]["matchLabels"].items() <= labels.items()


def test_the_operator_accepts_every_option_that_the_chart_sets() -> None:
    values = {
        "namespaces": ["a"],
        "operator": {"stallSeconds": 5, "gangScheduler": "g", "checkAddress": False},
        "webhook": {"certManager": {"enabled": True}},
    }
    (container,) = find_only("Deployment", render(values))["spec"]["template"]["spec"]["containers"]
    options = vars(build_parser().parse_args(container["args"]))
    assert options["namespace"] == ["a"]
    assert options["stall_seconds"] == 5
    assert options["gang_scheduler"] == "g"
    assert options["check_address"] is False
    assert str(options["webhook_certificate"]) == "/etc/topkube/webhook"
