"""The network between nodes: a bridge on the machine, and links that can be shaped and cut."""

from __future__ import annotations

from localkube.daemons import run
from localkube.layout import Layout
from localkube.node import Node


def make_bridge(layout: Layout) -> None:
    """Create the bridge, with the address of the machine itself."""
    run("ip", "link", "add", layout.name, "type", "bridge")
    run("ip", "addr", "add", f"{layout.gateway}/24", "dev", layout.name)
    run("ip", "link", "set", layout.name, "up")
    run("sysctl", "-qw", "net.ipv4.ip_forward=1")


def route_services(layout: Layout, node: Node) -> None:
    """Make services reachable from the machine itself, through `node`, whose kube-proxy routes them."""
    run("ip", "route", "replace", layout.service_range, "via", node.address)


def remove_bridge(layout: Layout) -> None:
    """Remove the bridge and the links that are connected to it, by name; the routes over it are removed too."""
    for line in run("ip", "-o", "link", "show", "type", "veth").splitlines():
        link = line.split(":")[1].strip().split("@")[0]
        if link.startswith(f"{layout.name}-"):
            run("ip", "link", "del", link, check=False)
    run("ip", "link", "del", layout.name, check=False)


def shape(node: Node, rate: str) -> None:
    """Limit the node's link to `rate` in both directions (tc's notation: 200mbit, 1gbit); 'off' lifts the limit."""
    run("tc", "qdisc", "del", "dev", node.link, "root", check=False)
    node.run_inside("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
    if rate != "off":
        # A queue of 50 ms, as a switch port has. The burst is enough for 1 Gbit/s.
        bucket = ("root", "tbf", "rate", rate, "burst", "128k", "latency", "50ms")
        run("tc", "qdisc", "add", "dev", node.link, *bucket)
        node.run_inside("tc", "qdisc", "add", "dev", "eth0", *bucket)


def cut(first: Node, second: Node) -> None:
    """Drop all packets between the pods of two nodes, in both directions and without any notice."""
    for node, other in ((first, second), (second, first)):
        node.run_inside("ip", "route", "replace", "blackhole", other.layout.compute_pod_range(other.index))


def mend(first: Node, second: Node) -> None:
    """Undo `cut`."""
    for node, other in ((first, second), (second, first)):
        pods = other.layout.compute_pod_range(other.index)
        node.run_inside("ip", "route", "del", "blackhole", pods, check=False)
        node.run_inside("ip", "route", "replace", pods, "via", other.address)
