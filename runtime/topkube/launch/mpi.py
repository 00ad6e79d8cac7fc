"""Which MPI is here, and the command lines of its mpiexec: MPICH (Hydra) and Open MPI 5 (PRRTE)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topkube.errors import LaunchError

_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Mpi:
    """An installed MPI: `implementation` is MPICH or OpenMPI, as in spec.mpiImplementation."""

    implementation: str
    version: str
    mpiexec: Path

    def __str__(self) -> str:
        return f"{self.implementation} {self.version}"

    def command(self, ranks: int, program: list[str]) -> list[str]:
        """The command line that starts `ranks` copies of `program` on this machine, unbound, more than cores if need
        be."""
        if self.implementation == "MPICH":
            options = ["-launcher", "fork", "-localhost", "127.0.0.1", "-bind-to", "none", "-n", str(ranks)]
        else:
            options = ["--oversubscribe", "--bind-to", "none", "--host", f"localhost:{ranks}", "-n", str(ranks)]
        return [str(self.mpiexec), *options, *program]

    def environment(self) -> dict[str, str]:
        """What mpiexec and its proxies need in their environment. Open MPI refuses root without the first two, and
        containers often have only root. Without the third a prted whose host has only private addresses, as pods have,
        does not even try its own loopback, a "public" address: here no address that anybody has is private."""
        if self.implementation == "MPICH":
            return {}
        return {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PMIX_MCA_pmix_net_private_ipv4": "240.0.0.0/4",
        }


def find(beside: Path | None = None, path: str | None = None) -> Mpi:
    """The MPI whose mpiexec lies beside this Python, or else is on `path` (default: PATH).

    Raises LaunchError where there is none, or it is neither MPICH nor Open MPI.
    """
    beside = Path(sys.executable).parent if beside is None else beside
    found = shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec", path=path)
    if found is None:
        raise LaunchError(
            "there is no mpiexec, neither beside this Python nor on PATH",
            cause="no MPI is installed",
            next_step=f"{sys.executable} -m pip install 'topkube[mpich]'",
        )
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False)
        text = answer.stdout + answer.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    if "HYDRA" in text:
        version = re.search(r"Version:\s*(\S+)", text)
        return Mpi("MPICH", version.group(1) if version else "?", Path(found))
    if "Open MPI" in text or "OpenRTE" in text:
        version = re.search(r"\)\s*(\d\S*)", text)
        return Mpi("OpenMPI", version.group(1) if version else "?", Path(found))
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"{found} is neither MPICH's nor Open MPI's: it says {first!r}",
        cause="another MPI, or a broken installation",
        next_step=f"{sys.executable} -m pip install 'topkube[mpich]', which puts mpiexec beside this Python",
    )


def library(python: str = sys.executable) -> str:
    """What mpi4py loads in `python`, as one line such as 'MPICH 5.0.2' or 'OpenMPI 5.0.11'.

    Raises LaunchError where it loads none.
    """
    answer = subprocess.run([python, "-c", _LIBRARY], capture_output=True, text=True, check=False)
    text = answer.stdout.replace("\0", "").strip()
    if answer.returncode or not text:
        reason = next(iter(reversed(answer.stderr.strip().splitlines())), "no reason given")
        raise LaunchError(
            f"mpi4py finds no MPI library: {reason}",
            cause="mpi4py is there, but no libmpi that it can load",
            next_step=f"{python} -m pip install 'topkube[mpich]'",
        )
    version = re.search(r"\d+\.\d\S*", text)
    name = "OpenMPI" if text.startswith("Open MPI") else text.split()[0].rstrip(",")
    return f"{name} {version.group().rstrip(',') if version else '?'}"


def check_match(mpi: Mpi, loaded: str) -> None:
    """Raises LaunchError when mpiexec and the library that Python loads are of two different MPIs: every rank would
    be alone."""
    if loaded.split()[0] == mpi.implementation:
        return
    wanted, other = ("openmpi", "mpich") if mpi.implementation == "MPICH" else ("mpich", "openmpi")
    raise LaunchError(
        f"{mpi.mpiexec} is of {mpi}, but mpi4py loads {loaded}",
        cause="two MPIs are installed in one environment, and their files overwrite each other",
        next_step=f"keep one: {sys.executable} -m pip uninstall {wanted}, then pip install --force-reinstall {other}",
    )


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher wrote into `environment`; None where none did."""
    for variable in _RANK_VARIABLES:
        if environment.get(variable, "").isdigit():
            return int(environment[variable])
    return None


def cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use: its affinity, less what the cgroup (version 2 or 1) withholds."""
    usable = len(os.sched_getaffinity(0))
    limits = [line.split() for line in _lines(cgroups / "cpu.max")]
    limits += [[*_lines(cgroups / "cpu/cpu.cfs_quota_us"), *_lines(cgroups / "cpu/cpu.cfs_period_us")]]
    for quota, period in (limit for limit in limits if len(limit) == 2):
        if quota.isdigit() and int(period):  # neither "max" nor -1
            return max(1, min(usable, round(int(quota) / int(period))))
    return usable


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
