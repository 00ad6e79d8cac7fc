"""Functions for benchmarks on a real Kubernetes: the cluster of `make cluster`, and its description in results."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))

from localkube.cluster import LocalCluster
from localkube.layout import Layout
from target import Target


def find_running_cluster() -> tuple[Target, LocalCluster]:
    """Return the running cluster. End the program if no cluster is running."""
    cluster = LocalCluster.find_running(Layout.from_environment())
    if cluster is None:
        sys.exit("no cluster is up. Next: sudo make cluster NODES=3, kubectl apply -f manifests/")
    return Target(cluster.layout.kubeconfig, cluster), cluster


def describe_measurement(target: Target) -> dict[str, Any]:
    """Return when and on which machine and cluster a result was measured."""
    return {
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.release().partition('-')[0]}"},
        "kubernetes": target.release,
    }
