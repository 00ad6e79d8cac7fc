"""Training on several nodes with tensors on a GPU. Each rank is a node of its own, and all of them share the first GPU,
so all stages between nodes run as on real nodes. NCCL allows one rank per GPU, so what several GPUs of a node exchange
is not part of it. As root, nodes are also network namespaces that a shaped link joins (benchmarks/allreduce)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from allreduce.network import Network, explain_why_unavailable
from allreduce.worlds import write_agent
from gpu_plan.device import Device
from gpu_plan.programs import run_group
from gpu_plan.rows import Row, Rows

NODES = (2, 3, 8)
"""The numbers of nodes for which the weights are compared. From eight nodes on, onebit exchanges in two stages."""
RATES = ("10gbit", "25gbit")
"""The links between two nodes for which steps are timed."""
CONNECTIONS = (1, 4)
"""The connections between two ranks for which dense steps are timed."""
CONNECTED = ("plain", "ddp", "hierarchical", "int4")
_PROGRAM = Path(__file__).with_name("node_rank.py")


def run(device: Device, rows: Rows, quick: bool, work: Path) -> None:
    """Compare weights after training on the GPU with those after training on the CPU, and time steps of two nodes."""
    place = "cpu" if device.dry else "cuda"
    order = ["time", place, "small" if quick or device.dry else "large"]

    def compare(nodes: int) -> None:
        rows.measure(f"training on {nodes} nodes", lambda: _run_ranks(work, nodes, 90, ["compare", place]))

    for nodes in NODES:
        compare(nodes)
    for rate in RATES[:1] if quick or device.dry else RATES:
        rows.measure(f"step of 2 nodes, {rate}", lambda rate=rate: _run_on_link(work, rate, order))
    rows.measure("step of 2 nodes", lambda: _run_ranks(work, 2, 150, order))
    for rate, connections in [] if quick or device.dry else itertools.product((RATES[-1], None), CONNECTIONS):
        rows.measure(
            f"{connections} connections, {rate or 'not limited'}",
            lambda rate=rate, connections=connections: _run_on_link(
                work, rate, [*order, ",".join(CONNECTED)], {"TOPKUBE_CONNECTIONS": str(connections)}
            ),
        )


def _run_on_link(
    work: Path, rate: str | None, order: list[str], environment: Mapping[str, str] = MappingProxyType({})
) -> Row:
    if reason := explain_why_unavailable():
        return {"skipped": reason}
    with Network(2, rate) as network:
        before = network.read_traffic()
        row = _run_ranks(work, 2, 200, order, network, environment)
        sent = max((after - start).sent for after, start in zip(network.read_traffic(), before, strict=True))
        return {**row, "GB through the link": sent / 1e9}


def _run_ranks(
    work: Path,
    nodes: int,
    seconds: float,
    order: list[str],
    network: Network | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Row:
    """Run node_rank.py on `nodes` ranks, in the namespaces of `network` if it is passed. Return what rank 0 wrote."""
    launcher = find_mpiexec(work)
    if launcher is None:
        return {"skipped": "there is no mpiexec. Next: run gpu.py --prepare on a machine on which pip works"}
    answer = work / "nodes.json"
    answer.unlink(missing_ok=True)
    Path(f"{answer}.store").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "4", **settings}
    command = [launcher, "-n", str(nodes)]
    if network is None:
        environment["TOPKUBE_RANKS_PER_NODE"] = ",".join(["1"] * nodes)
    else:
        environment |= {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
        hosts = ",".join(f"{node.address}:1" for node in network.nodes)
        placement = ["-localhost", network.control.address, "-launcher", "ssh", "-launcher-exec"]
        command += [*placement, str(write_agent(network, work)), "-hosts", hosts]
    command += [sys.executable, str(_PROGRAM), str(answer), *order]
    if network is not None:
        command = network.control.wrap_command(command, network_only=True)
    status, output = run_group(command, seconds, environment, capture=True)
    if status != 0 or not answer.exists():
        state = "did not end in time" if status is None else f"ended with status {status}"
        raise RuntimeError(f"{nodes} ranks {state}: {output[-1500:]}")
    row: Row = json.loads(answer.read_text())
    return row


def find_mpiexec(work: Path) -> str | None:
    """Return the mpiexec of the carried MPICH, else that of this Python's environment or of the machine."""
    places = (work / "site" / "bin" / "mpiexec", Path(sys.executable).parent / "mpiexec")
    return next((str(place) for place in places if place.exists()), shutil.which("mpiexec"))
