"""A node: a network namespace, a mount namespace and a cgroup, with containerd, kubelet and kube-proxy in them.

A process that only waits holds the namespaces. They have no name outside the node. When the node's processes are
killed, the kernel removes the node's mounts, links and addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localkube.certificates import ClusterAuthority
from localkube.cgroups import Group
from localkube.daemons import Daemon, run, wait_until
from localkube.images import PAUSE, Image, Store
from localkube.layout import Layout

CONTAINERD = """\
version = 2
root = "{root}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  netns_mounts_under_state_dir = true
  disable_tcp_service = true
  # without this, no pod starts on a machine without CAP_SYS_RESOURCE
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


class Node:
    """Node `index` (1, 2, ...) of the cluster `layout`."""

    def __init__(self, layout: Layout, programs: Path, index: int) -> None:
        self.layout, self.index = layout, index
        self.name = f"node{index}"
        self.address = layout.compute_node_address(index)
        self.folder = layout.state / self.name
        self.group = Group(layout.name) / self.name
        self.link = f"{layout.name}-{index}"  # the bridge's end of the node's cable
        self.socket = self.folder / "containerd.sock"
        logs, system = layout.state / "logs", self.group / "system"
        self.holder = Daemon(
            f"{self.name}/holder", system / "holder", logs / f"{self.name}-holder.log",
            ["sh", "-ec", self._build_mount_script()],
            lambda: ["unshare", "--net", "--mount", "--propagation", "slave", "--"],
        )  # fmt: skip
        self.containerd = self._build_daemon("containerd", "containerd", "--config", self.folder / "containerd.toml")
        self.kubelet = self._build_daemon(
            "kubelet", programs / "kubelet", f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={self.folder / 'kubelet.conf'}", f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{self.socket}",
            "--housekeeping-interval=20s",
        )  # fmt: skip
        self.proxy = self._build_daemon(
            "proxy", programs / "kube-proxy", f"--kubeconfig={layout.state / 'proxy.conf'}",
            f"--hostname-override={self.name}", f"--cluster-cidr={layout.pods_range}", "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",
            "--healthz-bind-address=", "--metrics-bind-address=127.0.0.1:10249",
        )  # fmt: skip
        self.daemons = (self.holder, self.containerd, self.kubelet, self.proxy)

    def _build_daemon(self, name: str, *command: str | Path) -> Daemon:
        log = self.layout.state / "logs" / f"{self.name}-{name}.log"
        return Daemon(f"{self.name}/{name}", self.group / "system" / name, log, command, self.build_enter_command)

    def build_enter_command(self) -> list[str]:
        """Return the prefix of a command that runs in the node's namespaces. Raises RuntimeError if the node is
        down."""
        processes = self.holder.group.list_processes()
        if not processes:
            raise RuntimeError(f"{self.name} is not up")
        namespaces = f"/proc/{min(processes)}/ns"
        return ["nsenter", f"--net={namespaces}/net", f"--mount={namespaces}/mnt", "--"]

    def run_inside(self, *command: str | Path, check: bool = True) -> str:
        """Run a command in the node's namespaces."""
        return run(*self.build_enter_command(), *command, check=check)

    # -- life

    def start(self, authority: ClusterAuthority, nodes: int, store: Store, images: Sequence[Image]) -> None:
        """Start the node for the first time, with `images`, in a cluster of `nodes` nodes."""
        self.folder.mkdir(parents=True)
        self._write_configuration(authority)
        store.plant_seed(self.folder / "containerd")
        self._boot(nodes)
        store.load(self.socket, images)
        self._start_kubernetes()

    def vanish(self) -> None:
        """Simulate a power failure: disconnect the cable first, so that nobody is notified, then kill every process."""
        run("ip", "link", "set", self.link, "down")
        self.group.kill()

    def come_back(self, nodes: int) -> None:
        """Boot after `vanish`: the disk has kept its files, and no process runs."""
        self._boot(nodes)
        self._start_kubernetes()

    def _boot(self, nodes: int) -> None:
        self.group.make()
        self.holder.start()
        wait_until(self._has_own_namespaces, f"{self.name}'s namespaces", interval=0.01)
        self._plug_in(nodes)
        self.containerd.start()
        ready = ("ctr", "-a", str(self.socket), "version")
        wait_until(lambda: "Server" in run(*ready, check=False), f"{self.name}'s containerd")

    def _has_own_namespaces(self) -> bool:
        """Return True if the holder is in its own namespaces and waits there."""
        processes = self.holder.group.list_processes()
        return bool(processes) and Path(f"/proc/{min(processes)}/comm").read_text().strip() == "sleep"

    def _start_kubernetes(self) -> None:
        self.kubelet.start()
        self.proxy.start()

    def _plug_in(self, nodes: int) -> None:
        """Connect the node to the bridge. Routes to the pods of another node lead directly to that node."""
        layout, process = self.layout, str(min(self.holder.group.list_processes()))
        run("ip", "link", "del", self.link, check=False)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", process)
        run("ip", "link", "set", self.link, "master", layout.name, "up")
        self.run_inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run_inside("ip", "link", "set", "eth0", "up")
        self.run_inside("ip", "link", "set", "lo", "up")
        self.run_inside("ip", "route", "add", "default", "via", layout.gateway)
        for other in range(1, nodes + 1):
            if other != self.index:
                self.run_inside(
                    "ip", "route", "add", layout.compute_pod_range(other), "via", layout.compute_node_address(other)
                )
        self.run_inside("sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "route", "replace", layout.compute_pod_range(self.index), "via", self.address)

    def _build_mount_script(self) -> str:
        """Return a shell script that replaces the folders with fixed names of kubelet and containerd by folders of this
        node, and then waits."""
        lines = []
        for place in ("/var/lib/kubelet", "/var/lib/cni", "/var/lib/topkube", "/var/log/pods", "/var/log/containers"):
            own = self.folder / place.strip("/").replace("/", "-")
            lines.append(f"mkdir -p {place} {own} && mount --bind {own} {place}")
        lines.append("mkdir -p /run/containerd && mount -t tmpfs tmpfs /run/containerd")
        return "\n".join([*lines, "mount --make-rshared /", "exec sleep infinity"])

    def _write_configuration(self, authority: ClusterAuthority) -> None:
        folder, layout = self.folder, self.layout
        (folder / "cni").mkdir()
        (folder / "containerd.toml").write_text(
            CONTAINERD.format(root=folder / "containerd", socket=self.socket, cni=folder / "cni", pause=PAUSE)
        )
        # ptp rather than bridge: packets between two pods of a node are routed too, so that services work between them
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(folder / "ipam"),
                        "ranges": [[{"subnet": layout.compute_pod_range(self.index)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        (folder / "cni/10-pods.conflist").write_text(json.dumps(network))
        authority.issue(
            self.name, f"system:node:{self.name}", organization="system:nodes", names=(self.name, self.address)
        )
        authority.write_kubeconfig(folder / "kubelet.conf", f"https://{layout.gateway}:{layout.api_port}", self.name)
        keys = authority.folder
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group.path}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "clusterDomain": "cluster.local",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(keys / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(keys / f"{self.name}.crt"),
            "tlsPrivateKeyFile": str(keys / f"{self.name}.key"),
            "volumePluginDir": str(folder / "plugins"),
            "nodeStatusUpdateFrequency": "4s",
            "nodeLeaseDurationSeconds": 16,
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": "10s",  # how often kubelet 1.20 looks for ends of containers that it has missed
            "volumeStatsAggPeriod": "10s",  # how often kubelet compares an emptyDir with its limit
            "evictionHard": {
                "memory.available": "0%",
                "nodefs.available": "0%",
                "imagefs.available": "0%",
                "nodefs.inodesFree": "0%",
            },
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "eventRecordQPS": 0,
            "serializeImagePulls": False,
        }
        (folder / "kubelet.yaml").write_text(json.dumps(kubelet, indent=1))

    def find_container(self, identity: str) -> Group:
        """Return the cgroup of a running container, by its ID in containerd."""
        for group in (self.group / "kubepods").list_subgroups():
            if group.path.endswith(f"/{identity}"):
                return group
        raise LookupError(f"no container {identity} runs on {self.name}")

    def read_log_tail(self) -> str:
        return "\n".join(f"--- {daemon.name}\n{daemon.read_log_tail()}" for daemon in self.daemons)


@contextmanager
def run_lone_containerd(layout: Layout, root: Path) -> Iterator[Path]:
    """Run a containerd on `root` without kubelet, so that images can be imported. Yield its socket."""
    folder = layout.state / "seed"
    folder.mkdir(parents=True, exist_ok=True)
    socket = folder / "containerd.sock"
    (folder / "containerd.toml").write_text(f"""\
version = 2
root = "{root}"
state = "{folder / "state"}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
""")
    daemon = Daemon(
        "seed", Group(layout.name) / "seed", layout.state / "logs/seed.log",
        ["containerd", "--config", folder / "containerd.toml"],
    )  # fmt: skip
    daemon.start()
    try:
        wait_until(lambda: "Server" in run("ctr", "-a", str(socket), "version", check=False), "containerd to start")
        yield socket
    finally:
        daemon.terminate()
        daemon.group.remove()
