"""Names, addresses and folders of a cluster. They depend on its number, so clusters on one machine do not conflict."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MOST_NODES = 9


def _find_folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "topkube"


@dataclass(frozen=True)
class Layout:
    """The folders of cluster `number` (0 to 9). `TOPKUBE_TEST_CLUSTER` sets the number; the default is 0."""

    number: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.number <= 9:
            raise ValueError(f"a cluster's number is between 0 and 9, not {self.number}")

    @classmethod
    def from_environment(cls) -> Layout:
        return cls(int(os.environ.get("TOPKUBE_TEST_CLUSTER") or 0))

    @property
    def cache(self) -> Path:
        """The folder that all clusters share and that stays: compiled Kubernetes, images."""
        return _find_folder("XDG_CACHE_HOME", ".cache")

    @property
    def state(self) -> Path:
        """The folder of one run, which `stop_cluster` removes: keys, etcd's data, folders of nodes, logs."""
        return _find_folder("XDG_STATE_HOME", ".local/state") / f"cluster{self.number}"

    @property
    def name(self) -> str:
        """The name of the cluster, of the bridge between its nodes, and of the cgroup of all its processes."""
        return f"topkube{self.number}"

    # addresses: nodes 10.200.0.0/24, pods 10.210.N.0/24 for node N, services 10.220.0.0/16; cluster 1 has 10.201, ...
    @property
    def gateway(self) -> str:
        """The machine's own address on the bridge, at which nodes and pods reach the API server."""
        return f"10.{200 + self.number}.0.1"

    def compute_node_address(self, index: int) -> str:
        return f"10.{200 + self.number}.0.{10 + index}"

    def compute_pod_range(self, index: int) -> str:
        return f"10.{210 + self.number}.{index}.0/24"

    @property
    def pods_range(self) -> str:
        return f"10.{210 + self.number}.0.0/16"

    @property
    def service_range(self) -> str:
        return f"10.{220 + self.number}.0.0/16"

    @property
    def kubernetes_service(self) -> str:
        return f"10.{220 + self.number}.0.1"

    @property
    def api_port(self) -> int:
        return 16443 + self.number

    @property
    def etcd_ports(self) -> tuple[int, int]:
        """The ports of etcd: for clients, and for peers."""
        return 12379 + 10 * self.number, 12380 + 10 * self.number

    @property
    def controller_manager_port(self) -> int:
        return 17257 + 10 * self.number

    @property
    def scheduler_port(self) -> int:
        return 17259 + 10 * self.number

    @property
    def kubeconfig(self) -> Path:
        return self.state / "admin.conf"
