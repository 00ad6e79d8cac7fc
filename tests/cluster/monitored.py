"""The scrape targets that the chart's monitors select on a cluster. Debian's Prometheus cannot ask Kubernetes, so it
reads its targets from a file."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml
from releases import REPOSITORY
from target import Target

from monitoring.server import build_file_target


@functools.cache
def _read_monitor(kind: str) -> dict[str, Any]:
    """Return the spec of the chart's monitor of a kind."""
    values = {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}
    with helm.Chart.load(REPOSITORY / "charts/topkube") as chart:
        text = chart.render(values)["topkube/templates/monitoring.yaml"]
    (spec,) = (document["spec"] for document in yaml.safe_load_all(text) if document and document["kind"] == kind)
    assert isinstance(spec, dict)
    return spec


def _find_targets(on: Target, labels: dict[str, str], port: str, namespaces: Collection[str]) -> list[dict[str, Any]]:
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    targets = []
    for pod in on.core.list_pod_for_all_namespaces(label_selector=selector).items:
        ports = [
            container_port
            for container in pod.spec.containers
            for container_port in container.ports or ()
            if container_port.name == port
        ]
        if pod.status.pod_ip and ports and (not namespaces or pod.metadata.namespace in namespaces):
            where = {"namespace": pod.metadata.namespace, "pod": pod.metadata.name}
            targets.append({"targets": [f"{pod.status.pod_ip}:{ports[0].container_port}"], "labels": where})
    return targets


def find_worker_targets(on: Target, namespaces: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the scrape targets of all jobs in these namespaces, or in all namespaces."""
    spec = _read_monitor("PodMonitor")
    (endpoint,) = spec["podMetricsEndpoints"]
    return _find_targets(on, spec["selector"]["matchLabels"], endpoint["port"], namespaces)


def find_operator_targets(on: Target) -> list[dict[str, Any]]:
    """Return the scrape targets of all releases, and of manifests/."""
    labels = {
        name: value
        for name, value in _read_monitor("ServiceMonitor")["selector"]["matchLabels"].items()
        if name != "app.kubernetes.io/instance"
    }
    return _find_targets(on, labels, "metrics", ())


class ScrapeTargets:
    """Two scrape jobs for `prometheus`. `refresh` brings their targets up to date."""

    def __init__(self, on: Target, folder: Path, namespaces: Collection[str]) -> None:
        self._on, self._namespaces = on, namespaces
        self._files = {"workers": folder / "workers.json", "operator": folder / "operator.json"}
        self.jobs = [
            {**build_file_target(name, path), "honor_labels": name == "operator"} for name, path in self._files.items()
        ]
        self.refresh()

    def refresh(self) -> None:
        targets = {
            "workers": find_worker_targets(self._on, self._namespaces),
            "operator": find_operator_targets(self._on),
        }
        for name, path in self._files.items():
            path.with_suffix(".part").write_text(json.dumps(targets[name]))
            path.with_suffix(".part").rename(path)
