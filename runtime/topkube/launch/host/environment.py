"""The environment of ranks: what they inherit, and the defaults that TopKube sets."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from topkube.environment import copy_environment
from topkube.processors import count_cores, count_threads_per_rank
from topkube.settings import Settings


def set_defaults(environment: dict[str, str], ranks: int) -> None:
    """Set what ranks need and the job has not set: threads that share the processors among `ranks`, unbuffered output,
    and a Python traceback if native code crashes."""
    environment.setdefault("OMP_NUM_THREADS", str(count_threads_per_rank(count_cores(), ranks)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.setdefault("PYTHONFAULTHANDLER", "1")


def read_container_environment() -> dict[str, str]:
    """Return the environment that ranks inherit from the worker's container: all variables, except those for the worker
    itself."""
    worker_variables = {
        "TOPKUBE_WORKER",
        "TOPKUBE_LAUNCH",
        "TOPKUBE_SOURCE",
        "TOPKUBE_CREDENTIALS",
        "TOPKUBE_TERMINATION_LOG",
    }
    return {name: value for name, value in copy_environment().items() if name not in worker_variables}


def disable_single_copy(environment: dict[str, str]) -> None:
    """Make ranks of a pod exchange through shared memory alone. By default MPI reads the memory of another rank
    directly (process_vm_readv), which the seccomp profile of a container refuses: MPI_Init or the first large message
    then fails with MPICH. The cost is small, because large arrays go through TopKube's own shared window."""
    environment.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    for module in ("sm", "vader"):
        environment.setdefault(f"OMPI_MCA_btl_{module}_single_copy_mechanism", "none")
    environment.setdefault("OMPI_MCA_smsc", "^cma")


def set_home(environment: dict[str, str], temporary: str) -> None:
    """Set HOME to `temporary`, and a user name, if the user has none: an arbitrary UID has neither, and libraries need
    both."""
    home = environment.get("HOME", "")
    if not (home and os.path.isdir(home) and os.access(home, os.W_OK)):
        environment["HOME"] = temporary
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        environment.setdefault("USER", "topkube")
        environment.setdefault("LOGNAME", environment["USER"])


def list_source_variables(settings: Settings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH and PATH of ranks whose code and packages are not in the image: the folders of the source and
    of its packages come before the entries of `inherited`. Return nothing if the job has neither.

    Only the ranks' commands get these variables. TopKube's own processes must not import the job's modules."""
    variables = {}
    folders = [folder for folder in (settings.source_directory, settings.packages_directory) if folder]
    if folders:
        variables["PYTHONPATH"] = _join_paths([*folders, inherited.get("PYTHONPATH", "")])
    if settings.packages_directory:
        variables["PATH"] = _join_paths([f"{settings.packages_directory}/bin", inherited.get("PATH", os.defpath)])
    return variables


def name_digest_file(source: Path) -> Path:
    """Return the file with the digest of the fetched folder `source`. It is beside the folder."""
    return source.with_name(source.name + ".sha256")


def read_source_digest(source: Path) -> str:
    """Return the digest that `topkube fetch-source` has written; empty if it has not written one."""
    try:
        return name_digest_file(source).read_text(encoding="ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


def _join_paths(paths: list[str]) -> str:
    return os.pathsep.join(path for path in paths if path)
