"""Training on several nodes with tensors on a GPU. Each rank is a node of its own, and all of them share the first GPU,
so all stages between nodes run as on real nodes. NCCL allows one rank per GPU, so what several GPUs of a node exchange
is not part of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from gpu_plan.device import Device
from gpu_plan.programs import run_group
from gpu_plan.rows import Row, Rows

NODES = (2, 3)
"""The numbers of nodes for which the weights are compared."""
_PROGRAM = Path(__file__).with_name("node_rank.py")


def run(device: Device, rows: Rows, quick: bool, work: Path) -> None:
    """Compare weights after training on the GPU with those after training on the CPU, and time steps of two nodes."""
    for nodes in NODES:
        rows.measure(
            f"training on {nodes} nodes",
            lambda nodes=nodes: _run_ranks(device, work, nodes, 90, "compare", "cpu" if device.dry else "cuda"),
        )
    size = "small" if quick or device.dry else "large"
    rows.measure(
        "step of 2 nodes", lambda: _run_ranks(device, work, 2, 150, "time", "cpu" if device.dry else "cuda", size)
    )


def _run_ranks(device: Device, work: Path, nodes: int, seconds: float, *arguments: str) -> Row:
    """Run node_rank.py on `nodes` ranks. Return what rank 0 wrote."""
    launcher = find_mpiexec(work)
    if launcher is None:
        return {"skipped": "there is no mpiexec. Next: run gpu.py --prepare on a machine on which pip works"}
    answer = work / "nodes.json"
    answer.unlink(missing_ok=True)
    environment = {**os.environ, "TOPKUBE_RANKS_PER_NODE": ",".join(["1"] * nodes), "OMP_NUM_THREADS": "4"}
    status, output = run_group(
        [launcher, "-n", str(nodes), sys.executable, str(_PROGRAM), str(answer), *arguments],
        seconds,
        environment,
        capture=True,
    )
    if status != 0 or not answer.exists():
        state = "did not end in time" if status is None else f"ended with status {status}"
        raise RuntimeError(f"{nodes} ranks {state}: {output[-1500:]}")
    row: Row = json.loads(answer.read_text())
    return row


def find_mpiexec(work: Path) -> str | None:
    """Return the mpiexec of the carried MPICH, else that of this Python's environment or of the machine."""
    places = (work / "site" / "bin" / "mpiexec", Path(sys.executable).parent / "mpiexec")
    return next((str(place) for place in places if place.exists()), shutil.which("mpiexec"))
