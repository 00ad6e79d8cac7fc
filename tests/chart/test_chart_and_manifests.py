"""manifests/ and the chart install the same operator: who takes one of them by hand gets no more rights, and no fewer
guards, than who takes the other."""

from __future__ import annotations

import json
from typing import Any

import yaml
from test_chart import of, one, render

from monitoring.generated import ROOT
from topkube_operator.__main__ import _parser
from topkube_operator.node_cache.__main__ import parser as agent_parser


def manifests(name: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all((ROOT / f"manifests/{name}.yaml").read_text()) if found]


def rules(role: dict[str, Any]) -> set[str]:
    return {json.dumps({name: sorted(value) for name, value in rule.items()}) for rule in role["rules"]}


def test_roles_give_the_same_rights() -> None:
    chart, plain = render(), manifests("rbac")
    for kind in ("ClusterRole", "Role"):
        charts = {role["metadata"]["name"]: rules(role) for role in of(kind, chart)}
        charts.pop("topkube-test", None)  # of helm test, and gone after it
        charts.pop("topkube-admin", None)
        assert {role["metadata"]["name"]: rules(role) for role in of(kind, plain)} == charts
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        charts = {found["metadata"]["name"]: (found["roleRef"], found["subjects"]) for found in of(kind, chart)}
        charts.pop("topkube-test", None)
        assert {found["metadata"]["name"]: (found["roleRef"], found["subjects"]) for found in of(kind, plain)} == charts


def test_the_operators_pods_are_the_same_but_for_labels_and_arguments_that_are_defaults() -> None:
    pods = []
    for objects in (manifests("operator"), render()):
        pod = one("Deployment", objects)["spec"]["template"]["spec"]
        pod.pop("affinity")
        (container,) = pod["containers"]
        pods.append((pod, vars(_parser().parse_args(container.pop("args")))))
    assert pods[0] == pods[1]
    assert (
        one("Deployment", manifests("operator"))["spec"]["replicas"] == one("Deployment", render())["spec"]["replicas"]
    )


def test_service_and_webhook_are_the_same() -> None:
    plain, chart = one("Service", manifests("operator")), one("Service", render())
    assert plain["spec"]["ports"] == chart["spec"]["ports"]
    plain, chart = (one("ValidatingWebhookConfiguration", found) for found in (manifests("webhook"), render()))
    assert plain["metadata"]["name"] == chart["metadata"]["name"]
    assert plain["webhooks"] == chart["webhooks"]


def _bare(found: dict[str, Any]) -> dict[str, Any]:
    """Without labels, which Helm has more of."""
    rest = json.loads(json.dumps(found))
    rest["metadata"] = {key: rest["metadata"].get(key) for key in ("name", "namespace")}
    return rest


def test_the_node_cache_is_off_until_it_is_turned_on_and_then_the_same() -> None:
    assert of("DaemonSet", render()) == of("PersistentVolume", render()) == []
    own = {"enabled": True, "namespaces": ["team-a"], "namespace": "topkube-node-cache"}
    chart = render({"cache": {"node": own}})
    plain = manifests("node-cache/agent") + manifests("node-cache/namespace")
    pods = []
    for objects in (plain, chart):
        pod = one("DaemonSet", objects)["spec"]["template"]["spec"]
        pods.append((pod, vars(agent_parser().parse_args(pod["containers"][0].pop("args")))))
    assert pods[0] == pods[1]
    assert one("DaemonSet", chart)["metadata"]["namespace"] == one("DaemonSet", plain)["metadata"]["namespace"]
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        role = next(found for found in of(kind, chart) if found["metadata"]["name"] == "topkube-node-cache")
        assert _bare(role) == _bare(one(kind, plain))
    for kind in ("PersistentVolume", "PersistentVolumeClaim"):
        assert _bare(one(kind, chart)) == _bare(one(kind, plain))
        label = one(kind, chart)["metadata"]["labels"]["topkube.dev/node-cache"]
        assert label == one(kind, plain)["metadata"]["labels"]["topkube.dev/node-cache"] == "team-a"
    # The jobs' NetworkPolicies let operator pods in, and the operator's policies and budgets select them.
    (daemons, operator) = (one(kind, chart)["spec"] for kind in ("DaemonSet", "Deployment"))
    labels = daemons["template"]["metadata"]["labels"]
    assert daemons["selector"]["matchLabels"].items() <= labels.items()
    assert not operator["selector"]["matchLabels"].items() <= labels.items()


def test_the_chart_knows_every_option_that_it_sets() -> None:
    given = {
        "namespaces": ["a"],
        "operator": {"stallSeconds": 5, "gangScheduler": "g"},
        "webhook": {"certManager": {"enabled": True}},
    }
    (container,) = one("Deployment", render(given))["spec"]["template"]["spec"]["containers"]
    options = vars(_parser().parse_args(container["args"]))
    assert options["namespace"] == ["a"]
    assert options["stall_seconds"] == 5
    assert options["gang_scheduler"] == "g"
    assert str(options["webhook_certificate"]) == "/etc/topkube/webhook"
