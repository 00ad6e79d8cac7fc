"""The chart as Helm renders it, by Helm's own Go SDK."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import yaml

from monitoring.generated import ROOT

CHART = ROOT / "charts/topkube"
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


def render(
    values: dict[str, Any] | None = None, name: str = "topkube", namespace: str = "topkube-system"
) -> list[dict[str, Any]]:
    """Return all objects that the chart makes, hooks included."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name=name, namespace=namespace)
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
