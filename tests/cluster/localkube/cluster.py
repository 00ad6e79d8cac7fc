"""A complete cluster: start, stop, and the faults that tests inject."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from localkube import network
from localkube.cgroups import Group
from localkube.control_plane import ControlPlane
from localkube.daemons import run, wait_until
from localkube.images import Image, Store
from localkube.layout import MOST_NODES, Layout
from localkube.node import Node, run_lone_containerd
from localkube.packages import TO_RUN, compile_kubernetes, install_packages

GPUS_PER_NODE = 4
VOLUMES = 8


class LocalCluster:
    """The cluster of `layout`. `start` starts it, and `find_running` returns it if it runs."""

    def __init__(self, layout: Layout, programs: Path, nodes: int) -> None:
        self.layout = layout
        self.kubectl_program = programs / "kubectl"
        self.control_plane = ControlPlane(layout, programs)
        self.nodes = {node.name: node for node in (Node(layout, programs, index + 1) for index in range(nodes))}
        self.store = Store(layout.cache)

    # -- start and stop

    @classmethod
    def start(cls, layout: Layout, nodes: int = 2, images: Sequence[Image] = ()) -> LocalCluster:
        """Remove what is left of an earlier cluster, and start a control plane and `nodes` nodes that have `images`.
        Return when the nodes are Ready.

        The first start on a machine installs Debian packages, compiles Kubernetes and builds the images: about ten
        minutes on two cores. Later starts take seconds. Raises RuntimeError or TimeoutError with the output of the
        program that failed.
        """
        if os.geteuid() != 0:
            raise RuntimeError(
                "a local cluster needs root (network namespaces, cgroups). Next: run the same command as root"
            )
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"a local cluster has 1 to {MOST_NODES} nodes, not {nodes}")
        install_packages(*TO_RUN)
        programs = compile_kubernetes(layout.cache)
        stop_cluster(layout)
        cluster = cls(layout, programs, nodes)
        layout.state.mkdir(parents=True, mode=0o700)
        (layout.state / "cluster.json").write_text(json.dumps({"nodes": nodes, "programs": str(programs)}))
        Group(layout.name).make()
        cluster.store.build_pause()
        cluster.store.build(images)
        cluster.store.grow_seed(images, lambda root: run_lone_containerd(layout, root))
        network.make_bridge(layout)
        authority = cluster.control_plane.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(authority, nodes, cluster.store, images), cluster.nodes.values()))
        network.route_services(layout, cluster.nodes["node1"])
        cluster.create_volumes()
        cluster.wait_ready()
        return cluster

    @classmethod
    def find_running(cls, layout: Layout) -> LocalCluster | None:
        """Return the cluster of `layout` if its API server answers, else None."""
        record = layout.state / "cluster.json"
        if not record.exists():
            return None
        recorded = json.loads(record.read_text())
        cluster = cls(layout, Path(recorded["programs"]), recorded["nodes"])
        return cluster if cluster.control_plane.api_server.is_alive() and cluster.control_plane.is_ready() else None

    def stop(self) -> None:
        stop_cluster(self.layout)

    def load_images(self, images: Sequence[Image], store: Store | None = None) -> list[Image]:
        """Build what changed, and send it to every running node. Return what was built."""
        store = store or self.store
        built = store.build(images)
        running = [node for node in self.nodes.values() if node.containerd.is_alive()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: store.load(node.socket, images), running))
        return built

    # -- state

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, check: bool = True) -> str:
        return run(self.kubectl_program, f"--kubeconfig={self.layout.kubeconfig}", *arguments, stdin=stdin, check=check)

    def list_ready_nodes(self) -> set[str]:
        path = "{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
        lines = self.kubectl("get", "nodes", "-o", f"jsonpath={path}").splitlines()
        return {line.split()[0] for line in lines if line.endswith(" True")}

    def wait_ready(self, names: Iterable[str] | None = None, seconds: float = 300.0) -> None:
        """Wait until the nodes (default: all) are Ready, and set the number of their GPUs."""
        awaited = set(names or self.nodes)
        try:
            wait_until(
                lambda: awaited <= self.list_ready_nodes(),
                f"{', '.join(sorted(awaited))} to be Ready",
                seconds,
                interval=0.3,
            )
        except TimeoutError as error:
            words = "\n".join(self.nodes[name].read_log_tail() for name in sorted(awaited - self.list_ready_nodes()))
            raise TimeoutError(f"{error}\n{words}") from None
        for name in awaited:
            self._set_gpus(name)

    def _set_gpus(self, name: str) -> None:
        """Set the node's capacity of nvidia.com/gpu, so that pods are placed as with GPUs. It lasts until kubelet
        starts again."""
        # kubectl 1.20 cannot patch a subresource. It replaces the whole status, and repeats this after a conflict.
        path = f"/api/v1/nodes/{name}"

        def has_gpus() -> bool:
            node = json.loads(self.kubectl("get", "--raw", path))
            for part in ("capacity", "allocatable"):
                node["status"][part]["nvidia.com/gpu"] = str(GPUS_PER_NODE)
            answer = self.kubectl("replace", "--raw", f"{path}/status", "-f", "-", stdin=json.dumps(node), check=False)
            return "nvidia.com/gpu" in answer

        wait_until(has_gpus, f"{name} to take its GPUs")

    def create_volumes(self) -> None:
        """Create ReadWriteMany volumes for claims. They are folders of the machine, whose disk all nodes share."""
        volumes = []
        for number in range(1, VOLUMES + 1):
            folder = self.layout.state / "volumes" / f"shared-{number}"
            folder.mkdir(parents=True)
            folder.chmod(0o777)
            spec = {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
                "hostPath": {"path": str(folder)},
                "persistentVolumeReclaimPolicy": "Retain",
            }
            metadata = {"name": f"shared-{number}"}
            volumes.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
        listed = {"apiVersion": "v1", "kind": "List", "items": volumes}
        self.kubectl("create", "-f", "-", stdin=json.dumps(listed))

    # -- faults

    def shape(self, rate: str) -> None:
        """Limit every node's link to `rate` ('200mbit'), in both directions; 'off' lifts it."""
        for node in self.nodes.values():
            network.shape(node, rate)

    def cut(self, first: str, second: str) -> None:
        network.cut(self.nodes[first], self.nodes[second])

    def mend(self, first: str, second: str) -> None:
        network.mend(self.nodes[first], self.nodes[second])

    def vanish(self, name: str) -> None:
        """Simulate a power failure of the node: kubelet, containerd and pods end at once, and its link is down."""
        self.nodes[name].vanish()

    def come_back(self, name: str) -> None:
        """Boot the vanished node. Return when it is Ready."""
        self.nodes[name].come_back(len(self.nodes))
        if name == "node1":
            network.route_services(self.layout, self.nodes[name])
        self.wait_ready([name])

    def restart_api_server(self) -> None:
        """Kill the API server with SIGKILL and start a new one. Return when it is ready."""
        self.control_plane.restart_api_server()


def stop_cluster(layout: Layout) -> None:
    """Stop the cluster and remove everything, including the remains of an interrupted run. Do nothing if there is
    none."""
    Group(layout.name).remove()
    network.remove_bridge(layout)
    deadline = time.monotonic() + 60
    while layout.state.exists():
        shutil.rmtree(layout.state, ignore_errors=time.monotonic() < deadline)
