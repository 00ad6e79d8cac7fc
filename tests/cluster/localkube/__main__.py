"""Start, use, disturb and stop a local Kubernetes: python -m localkube COMMAND."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from localkube import images
from localkube.cluster import LocalCluster, stop_cluster
from localkube.layout import Layout


def explain_usage(cluster: LocalCluster) -> str:
    return f"""\
export KUBECONFIG={cluster.layout.kubeconfig}
export PATH={cluster.kubectl_program.parent}:$PATH"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m localkube", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = commands.add_parser("up", help="start a cluster that has TopKube's images on its nodes")
    start.add_argument("--nodes", type=int, default=2)
    start.add_argument("--openmpi", action="store_true", help="also the runtime image with Open MPI")
    commands.add_parser("down", help="stop the cluster and remove all of it, also the remains of an interrupted start")
    load = commands.add_parser("images", help="build the images from this checkout and put them on every node")
    load.add_argument("--openmpi", action="store_true", help="also the runtime image with Open MPI")
    load.add_argument("--from", dest="sources", type=Path, default=images.REPOSITORY, help="another checkout")
    load.add_argument("--tag", default="", help="the tag of the images (default: TopKube's version)")
    commands.add_parser("env", help="print the environment variables with which kubectl uses the cluster")
    shape = commands.add_parser("shape", help="limit every node's link, e.g. 200mbit; off lifts the limit")
    shape.add_argument("rate")
    for name, words in (
        ("cut", "drop every packet between two nodes' pods"),
        ("mend", "repair the link that `cut` has cut"),
    ):
        link = commands.add_parser(name, help=words)
        link.add_argument("first")
        link.add_argument("second")
    for name, words in (("vanish", "a node's power fails"), ("return", "a vanished node boots")):
        commands.add_parser(name, help=words).add_argument("node")
    arguments = parser.parse_args()

    layout = Layout.from_environment()
    began = time.monotonic()
    selected = [images.RUNTIME, images.OPERATOR]
    if getattr(arguments, "openmpi", False):
        selected.append(images.RUNTIME_OPENMPI)
    if arguments.command == "up":
        cluster = LocalCluster.start(layout, arguments.nodes, selected)
        seconds = time.monotonic() - began
        print(f"up after {seconds:.0f} s: {len(cluster.nodes)} nodes. To use it:\n\n{explain_usage(cluster)}\n")
        print("kubectl get nodes        # make cluster-down stops it")
        return 0
    if arguments.command == "down":
        stop_cluster(layout)
        print(f"{layout.name} is gone")
        return 0
    running = LocalCluster.find_running(layout)
    if running is None:
        print(f"{layout.name} is not up. Next: make cluster", file=sys.stderr)
        return 1
    match arguments.command:
        case "env":
            print(explain_usage(running))
        case "images":
            if arguments.tag:
                selected = [image.with_tag(arguments.tag) for image in selected]
            built = running.load_images(selected, images.Store(layout.cache, arguments.sources.resolve()))
            names = ", ".join(image.name for image in built) or "nothing"
            print(f"built {names}; every node is up to date after {time.monotonic() - began:.1f} s")
        case "shape":
            running.shape(arguments.rate)
        case "cut":
            running.cut(arguments.first, arguments.second)
        case "mend":
            running.mend(arguments.first, arguments.second)
        case "vanish":
            running.vanish(arguments.node)
        case "return":
            running.come_back(arguments.node)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, TimeoutError, ValueError) as error:
        sys.exit(f"localkube: {error}")
