"""The line of `topkube doctor` about the cluster that the kubeconfig names."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.doctor.check import Check, report_ok
from topkube.environment import list_kubeconfig_paths


def check_cluster(location: ClusterLocation) -> Iterator[Check]:
    """Report which cluster `location` or the kubeconfig names, and whether it answers."""
    usual = [*list_kubeconfig_paths(), Path.home() / ".kube" / "config"]
    config = location.kubeconfig or next((path for path in usual if path.is_file()), None)
    inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
    kubectl = shutil.which("kubectl")
    if config is None and not inside:
        yield report_ok("cluster", "no kubeconfig; `topkube run` works without a cluster")
    elif kubectl is None:
        yield Check(
            "cluster",
            "warn",
            f"found {config or 'a service account'}, but no kubectl on PATH",
            "install kubectl to submit jobs",
        )
    else:
        yield _check_server(kubectl, location)


def _check_server(kubectl: str, location: ClusterLocation) -> Check:
    command = [kubectl, "version", "-o", "json", "--request-timeout=5s"]
    command += [f"--kubeconfig={location.kubeconfig}"] if location.kubeconfig else []
    command += [f"--context={location.context}"] if location.context else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        return _build_warning("the cluster does not answer")
    try:
        version = json.loads(answer.stdout or "{}").get("serverVersion", {}).get("gitVersion")
    except ValueError:
        version = None
    if version is None:
        # A cluster that refuses answers: kubectl's last line is the reason.
        reason = (answer.stderr.strip().splitlines() or ["kubectl prints no version of a server"])[-1]
        return _build_warning(f"the cluster cannot be used: {reason}")
    return report_ok("cluster", f"Kubernetes {version}")


def _build_warning(problem: str) -> Check:
    return Check("cluster", "warn", f"found a kubeconfig, but {problem}", "kubectl cluster-info")
