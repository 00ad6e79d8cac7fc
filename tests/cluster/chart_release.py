"""The release of the chart whose life test_chart_life.py follows, an earlier release to begin with, and its objects."""

from __future__ import annotations

import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import yaml
from jobs import build_job
from kubernetes.client.exceptions import ApiException
from localkube import images
from releases import REPOSITORY, Commands, read_commands
from target import (
    GROUP,
    OPERATOR,
    OPERATOR_NAMESPACE,
    PLURAL,
    VERSION,
    Namespace,
    Target,
    wait_for,
)

CHART = REPOSITORY / "charts/topkube"
CRD = f"{PLURAL}.{GROUP}"
NEW_COLUMN = "Rate"
"""A column of `kubectl get tj` that the earlier release does not have."""
MONITORS = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
MONITORING = "monitoring.coreos.com"


class ChartRelease:
    """One release, called topkube as in the docs, and a namespace of jobs."""

    def __init__(self, target: Target, kubectl: Path, directory: Path) -> None:
        self.target, self.directory = target, directory
        self.commands = Commands(target.kubeconfig, kubectl, {"image": {"tag": images.TAG}})
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


def is_deployed(target: Target) -> bool:
    try:
        target.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def avoid_a_node(jobs: Namespace) -> None:
    """Create a job that no operator manages. Write to its status, as an operator would, a node that new pods avoid."""
    name = jobs.create(build_job("avoids", ["true"], runPolicy={"managedBy": "example.com/test"}))
    avoided = {"name": "node1", "reason": "HardwareFault", "message": "an attempt of this job ended there"}
    status = {"phase": "Running", "avoidedNodes": [avoided]}
    patch = jobs.target.custom.patch_namespaced_custom_object_status
    patch(GROUP, VERSION, jobs.name, PLURAL, name, {"status": status})


def list_monitors(release: ChartRelease, plural: str) -> list[str] | None:
    """Return the names of the release's objects of a kind; None while the kind is not served."""
    try:
        answer = release.target.custom.list_namespaced_custom_object(MONITORING, "v1", OPERATOR_NAMESPACE, plural)
    except ApiException:
        return None
    return [item["metadata"]["name"] for item in answer["items"]]


def read_step(release: ChartRelease, name: str) -> int:
    return int((release.jobs.read_status(name).get("progress") or {}).get("step") or 0)
