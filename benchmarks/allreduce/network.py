"""Simulated machines: nodes in Linux namespaces, connected by a bridge over links of a chosen speed.

Each node has its own network, host name, process ids, System V memory and /dev/shm. So its ranks can share memory, and
they reach other nodes only through their link. A node exists in the namespaces of a holder process, which ends when the
pipe from its owner closes. When the owner ends, also by SIGKILL, the kernel kills every process of every node and
removes the devices. So there is nothing to clean up, and the devices of other programs are never touched.

A token bucket (tc tbf) limits links in both directions. A full bucket lets 64 KiB pass at once, faster than the link's
rate. With a larger bucket, small messages would pass at the speed of memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_SUBNET = "10.77.0"
BURST_BYTES = 64 * 1024
"""The size of the token bucket: a link that was idle lets so many bytes pass at once."""
GSO_BYTES = 32 * 1024
"""The largest packet that leaves a socket. It is below the burst; otherwise tbf splits every packet into frames on the
processor, which a network card does in hardware."""
QUEUE_SECONDS = 0.05
"""A link's queue holds the bytes that the link sends in this time, at least 8 bursts. Further packets are dropped."""
RATES = {"200mbit": 200e6, "100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "25gbit": 25e9}
"""Link speeds by their tc names, in bits per second."""

_HOLDER_SCRIPT = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm && hostname "$1" && ip link set lo up && echo ready && exec cat > /dev/null
"""


class NetworkError(RuntimeError):
    """The namespaces could not be created: the user is not root, or a tool or a kernel feature is missing."""


def explain_why_unavailable() -> str | None:
    """Return why nodes cannot be created on this machine, None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run with sudo"
    absent = [tool for tool in ("ip", "tc", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found; on Debian: apt-get install iproute2 util-linux mount"
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")


@dataclass(frozen=True)
class LinkTraffic:
    """The bytes that a node's device has sent and received, including link headers."""

    sent: int
    received: int

    def __sub__(self, earlier: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(self.sent - earlier.sent, self.received - earlier.received)


class Node:
    """A simulated machine: a holder process and its namespaces."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _HOLDER_SCRIPT, "sh", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline().strip() != "ready":
            raise NetworkError(f"the kernel refused the namespaces of {name}: {self._holder.stderr.read().strip()}")
        self.pid = next(iter(_list_children(self._holder.pid)))

    def wrap_command(self, command: list[str], *, network_only: bool = False) -> list[str]:
        """Return the command line that runs `command` inside this node, in the current directory."""
        kinds = ["--net"] if network_only else ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *kinds, f"--wdns={os.getcwd()}", "--", *command]

    def read_traffic(self, device: str = "eth0") -> LinkTraffic:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == device:
                fields = counters.split()
                return LinkTraffic(sent=int(fields[8]), received=int(fields[0]))
        raise NetworkError(f"{self.name} has no device {device}")

    def close(self) -> None:
        """End every process of the node and release its namespaces."""
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()
        try:
            self._holder.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def _list_children(parent: int) -> list[int]:
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[1]) == parent:
                children.append(int(entry.name))
    return children


class Network:
    """`nodes` machines on one switch; a context manager.

    `control` is the namespace of the switch, which has its own address. mpiexec runs there, outside every node, so its
    start-up messages pass the links as in a cluster.
    """

    def __init__(self, nodes: int, rate: str | None = None) -> None:
        reason = explain_why_unavailable()
        if reason:
            raise NetworkError(reason)
        self.nodes: list[Node] = []
        self.control = Node("switch", f"{_SUBNET}.254")
        try:
            self._run_inside(self.control, "ip", "link", "add", "br0", "type", "bridge")
            self._run_inside(self.control, "ip", "address", "add", f"{self.control.address}/24", "dev", "br0")
            self._run_inside(self.control, "ip", "link", "set", "br0", "up")
            for index in range(nodes):
                self._add_node(index)
            self.shape(rate)
        except BaseException:
            self.close()
            raise

    def _run_inside(self, node: Node, *command: str) -> None:
        _run(*node.wrap_command(list(command), network_only=True))

    def _add_node(self, index: int) -> None:
        node = Node(f"node{index}", f"{_SUBNET}.{index + 1}")
        self.nodes.append(node)
        port = f"port{index}"
        # Both ends are created inside their namespaces; the host never sees the device.
        _run("ip", "link", "add", "eth0", "netns", str(node.pid), "type", "veth",
             "peer", "name", port, "netns", str(self.control.pid))  # fmt: skip
        self._run_inside(self.control, "ip", "link", "set", port, "master", "br0", "gso_max_size", str(GSO_BYTES), "up")
        self._run_inside(node, "ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        self._run_inside(node, "ip", "link", "set", "eth0", "gso_max_size", str(GSO_BYTES), "up")
        # The default congestion control of Linux, whatever the host uses.
        self._run_inside(node, "ip", "route", "replace", f"{_SUBNET}.0/24", "dev", "eth0", "src", node.address,
                     "congctl", "cubic")  # fmt: skip

    def shape(self, rate: str | None, only: Collection[int] | None = None) -> None:
        """Limit every link, or the links of the nodes in `only`, to `rate` in both directions (in tc's notation,
        "1gbit"). None removes the limit."""
        if only is None:
            self.rate = rate
        for index, node in enumerate(self.nodes):
            if only is not None and index not in only:
                continue
            for namespace, device in ((node, "eth0"), (self.control, f"port{index}")):
                if rate is None:
                    subprocess.run(
                        namespace.wrap_command(["tc", "qdisc", "del", "dev", device, "root"], network_only=True),
                        capture_output=True,
                    )
                    continue
                queue = max(BURST_BYTES * 8, int(RATES[rate] / 8 * QUEUE_SECONDS))
                self._run_inside(namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate,
                             "burst", str(BURST_BYTES), "limit", str(queue))  # fmt: skip

    def read_traffic(self) -> list[LinkTraffic]:
        """Return the bytes that each node's device has sent and received so far."""
        return [node.read_traffic() for node in self.nodes]

    def close(self) -> None:
        for node in [*self.nodes, self.control]:
            node.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
