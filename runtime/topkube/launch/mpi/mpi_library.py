"""The installed MPI and the command lines of its mpiexec: MPICH (Hydra), Open MPI 4 (ORTE) and 5 (PRRTE)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from topkube.errors import LaunchError
from topkube.installation import build_install_command

_VERSION_SCRIPT = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)

_ALLOCATORS = "^slurm,pbs,tm,lsf,gridengine,cobalt,flux"
_STARTERS = "^slurm,pbs,tm,lsf,pals,flux"
"""What Open MPI does not use on one machine: components that read the nodes of a batch system's allocation, and
components that start processes with its programs, such as srun."""


@dataclass(frozen=True)
class Mpi:
    """An installed MPI: `implementation` is MPICH or OpenMPI, as in spec.mpiImplementation."""

    implementation: str
    version: str
    mpiexec: Path

    def __str__(self) -> str:
        return f"{self.implementation} {self.version}"

    @property
    def parameter_option(self) -> str:
        """The option of Open MPI's mpiexec for a parameter of its launcher."""
        release = self.version.split(".")[0]
        return "--mca" if release.isdigit() and int(release) < 5 else "--prtemca"

    def build_command(self, ranks: int, program: list[str]) -> list[str]:
        """Return the command line that starts `ranks` copies of `program` on this machine, not bound to cores. There
        may be more ranks than cores. In the allocation of a batch system such as Slurm, the ranks start on this machine
        too, not on the nodes of the allocation, and the number of its tasks is no limit."""
        if self.implementation == "MPICH":
            options = ["-launcher", "fork", "-rmk", "user", "-localhost", "127.0.0.1", "-bind-to", "none"]
        else:
            options = [self.parameter_option, "ras", _ALLOCATORS, self.parameter_option, "plm", _STARTERS]
            options += ["--oversubscribe", "--bind-to", "none", "--host", f"localhost:{ranks}"]
        options += ["-n", str(ranks)]
        return [str(self.mpiexec), *options, *program]

    def build_environment(self) -> dict[str, str]:
        """Return the variables that mpiexec and its proxies need. Without the first two, Open MPI refuses to run as
        root, and containers often have only root. The third makes Open MPI treat no usable address as private: without
        it, a prted whose host has only private addresses, as in pods, does not try its own loopback address, which
        counts as public."""
        if self.implementation == "MPICH":
            return {}
        return {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PMIX_MCA_pmix_net_private_ipv4": "240.0.0.0/4",
        }


def find_mpi(beside: Path | None = None, path: str | None = None) -> Mpi:
    """Return the MPI whose mpiexec is in the folder of this Python, or else on `path` (default: PATH).

    Raises LaunchError if there is no mpiexec, or if it is neither MPICH's nor Open MPI's.
    """
    beside = Path(sys.executable).parent if beside is None else beside
    mpiexec = shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec", path=path)
    if mpiexec is None:
        raise LaunchError(
            "there is no mpiexec, neither in the folder of this Python nor on PATH",
            cause="no MPI is installed",
            next_step=f"{sys.executable} -m {build_install_command('mpich')}",
        )
    try:
        answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)
        text = answer.stdout + answer.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    if "HYDRA" in text:
        version = re.search(r"Version:\s*(\S+)", text)
        return Mpi("MPICH", version.group(1) if version else "?", Path(mpiexec))
    if "Open MPI" in text or "OpenRTE" in text:
        version = re.search(r"\)\s*(\d\S*)", text)
        return Mpi("OpenMPI", version.group(1) if version else "?", Path(mpiexec))
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"{mpiexec} belongs to neither MPICH nor Open MPI: it prints {first!r}",
        cause="another MPI, or a broken installation",
        next_step=f"{sys.executable} -m {build_install_command('mpich')}, which installs mpiexec beside this Python",
    )


def find_required_mpi(implementation: str) -> Mpi:
    """Return the MPI of a launcher whose plan asks for `implementation`. Raises LaunchError, with exit code 127, if
    another MPI or none is installed."""
    try:
        mpi = find_mpi()
    except LaunchError as error:
        error.exit_code = 127
        raise
    if mpi.implementation != implementation:
        raise LaunchError(
            f"the job asks for {implementation}, and the launcher's image has {mpi}",
            exit_code=127,
            cause="spec.mpiImplementation names another MPI than the image contains",
            next_step=f"set spec.mpiImplementation to {mpi.implementation}, or use an image with {implementation}",
        )
    return mpi


def read_library(python: str = sys.executable) -> str:
    """Return the MPI that mpi4py loads in `python`, for example 'MPICH 5.0.2' or 'OpenMPI 5.0.11'.

    Raises LaunchError if it loads none.
    """
    answer = subprocess.run([python, "-P", "-c", _VERSION_SCRIPT], capture_output=True, text=True, check=False)
    text = answer.stdout.replace("\0", "").strip()
    if answer.returncode or not text:
        reason = next(iter(reversed(answer.stderr.strip().splitlines())), "it gave no reason")
        raise LaunchError(
            f"mpi4py finds no MPI library: {reason}",
            cause="mpi4py is installed, but no libmpi that it can load",
            next_step=f"{python} -m {build_install_command('mpich')}",
        )
    version = re.search(r"\d+\.\d\S*", text)
    name = "OpenMPI" if text.startswith("Open MPI") else text.split()[0].rstrip(",")
    return f"{name} {version.group().rstrip(',') if version else '?'}"


def check_same_mpi(mpi: Mpi, loaded: str) -> None:
    """Raise LaunchError if mpiexec and the library that Python loads belong to different MPIs: every rank would be
    alone."""
    if loaded.split()[0] == mpi.implementation:
        return
    surplus, kept = ("openmpi", "mpich") if mpi.implementation == "MPICH" else ("mpich", "openmpi")
    raise LaunchError(
        f"{mpi.mpiexec} belongs to {mpi}, but mpi4py loads {loaded}",
        cause="two MPIs are installed in the same environment, and their files overwrite each other",
        next_step=f"keep one: {sys.executable} -m pip uninstall {surplus}, then pip install --force-reinstall {kept}",
    )
