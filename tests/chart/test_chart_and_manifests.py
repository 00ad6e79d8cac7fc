"""manifests/ and the chart install the same operator: who takes one of them by hand gets no more rights, and no fewer
guards, than who takes the other."""

from __future__ import annotations

import json
from typing import Any

import yaml
from test_chart import of, one, render

from monitoring.generated import ROOT
from topkube_operator.__main__ import _parser


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
