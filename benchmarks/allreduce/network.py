"""Machines that are not there: nodes in Linux namespaces, joined by a bridge over links of a chosen speed.

Each node has a network, a hostname, process ids, System V memory and a /dev/shm of its own, so its ranks can share
memory among themselves and reach other nodes only through their link. Nothing has a name outside: a node lives in the
namespaces of one holder process, which ends when the pipe from its owner closes. When the owner ends, by SIGKILL too,
the kernel kills every process of every node and takes the devices back; a later run finds nothing to clean and could
not remove a stranger's device.

Links are shaped in both directions by a token bucket (tc tbf) with a burst of at most 64 KB: a larger burst would let a
small message pass at memory speed.
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
GSO_BYTES = 32 * 1024
"""Largest packet that leaves a socket: below the burst, or tbf cuts every packet into frames on the processor, which a
network card does in hardware."""
QUEUE_SECONDS = 0.05
RATES = {"200mbit": 200e6, "100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
"""Link speeds by the name that tc gives them, bits per second."""

_HOLD = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm && hostname "$1" && ip link set lo up && echo ready && exec cat > /dev/null
"""


class NetworkError(RuntimeError):
    """The namespaces could not be made: this is not root, or a tool or a kernel feature is missing."""


def missing() -> str | None:
    """Why nodes cannot be made here, None when they can."""
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
class Traffic:
    """Bytes that a node's device has sent and received, link headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class Node:
    """One machine: a holder process and its namespaces."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _HOLD, "sh", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline().strip() != "ready":
            raise NetworkError(f"the kernel refused the namespaces of {name}: {self._holder.stderr.read().strip()}")
        self.pid = next(iter(_children(self._holder.pid)))

    def enter(self, command: list[str], *, network_only: bool = False) -> list[str]:
        """`command` as it runs inside this node, in the present directory."""
        kinds = ["--net"] if network_only else ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *kinds, f"--wdns={os.getcwd()}", "--", *command]

    def traffic(self, device: str = "eth0") -> Traffic:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == device:
                fields = counters.split()
                return Traffic(sent=int(fields[8]), received=int(fields[0]))
        raise NetworkError(f"{self.name} has no device {device}")

    def close(self) -> None:
        """Ends every process of the node and gives its namespaces back."""
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()
        try:
            self._holder.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


class Network:
    """`nodes` machines on one switch; a context manager.

    `control` is the switch's own place, with an address of its own: mpiexec runs there, outside every node, and its few
    bytes of start-up pass the links as they would in a cluster.
    """

    def __init__(self, nodes: int, rate: str | None = None) -> None:
        reason = missing()
        if reason:
            raise NetworkError(reason)
        self.nodes: list[Node] = []
        self.control = Node("switch", f"{_SUBNET}.254")
        try:
            self._inside(self.control, "ip", "link", "add", "br0", "type", "bridge")
            self._inside(self.control, "ip", "address", "add", f"{self.control.address}/24", "dev", "br0")
            self._inside(self.control, "ip", "link", "set", "br0", "up")
            for index in range(nodes):
                self._add(index)
            self.shape(rate)
        except BaseException:
            self.close()
            raise

    def _inside(self, node: Node, *command: str) -> None:
        _run(*node.enter(list(command), network_only=True))

    def _add(self, index: int) -> None:
        node = Node(f"node{index}", f"{_SUBNET}.{index + 1}")
        self.nodes.append(node)
        port = f"port{index}"
        # Both ends are born inside their namespaces; the host never sees the device.
        _run("ip", "link", "add", "eth0", "netns", str(node.pid), "type", "veth",
             "peer", "name", port, "netns", str(self.control.pid))  # fmt: skip
        self._inside(self.control, "ip", "link", "set", port, "master", "br0", "gso_max_size", str(GSO_BYTES), "up")
        self._inside(node, "ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        self._inside(node, "ip", "link", "set", "eth0", "gso_max_size", str(GSO_BYTES), "up")
        # The same everywhere, whatever the host prefers: the congestion control that Linux ships as its default.
        self._inside(node, "ip", "route", "replace", f"{_SUBNET}.0/24", "dev", "eth0", "src", node.address,
                     "congctl", "cubic")  # fmt: skip

    def shape(self, rate: str | None, only: Collection[int] | None = None) -> None:
        """Gives every link, or those of the nodes in `only`, `rate` (as tc writes it, "1gbit") in both directions; None
        takes the limit away."""
        if only is None:
            self.rate = rate
        for index, node in enumerate(self.nodes):
            if only is not None and index not in only:
                continue
            for place, device in ((node, "eth0"), (self.control, f"port{index}")):
                if rate is None:
                    subprocess.run(
                        place.enter(["tc", "qdisc", "del", "dev", device, "root"], network_only=True),
                        capture_output=True,
                    )
                    continue
                queue = max(BURST_BYTES * 8, int(RATES[rate] / 8 * QUEUE_SECONDS))
                self._inside(place, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate,
                             "burst", str(BURST_BYTES), "limit", str(queue))  # fmt: skip

    def traffic(self) -> list[Traffic]:
        """What each node's device has sent and received so far."""
        return [node.traffic() for node in self.nodes]

    def close(self) -> None:
        for node in [*self.nodes, self.control]:
            node.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
