"""What every rank finds in its environment, however it is started."""

from __future__ import annotations

import os
import pwd

from topkube.launch.mpi import cores


def defaults(environment: dict[str, str], ranks: int) -> None:
    """What ranks need and may set otherwise: threads that share the processors among `ranks`, output when it is
    printed, a Python traceback when native code crashes."""
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.setdefault("PYTHONFAULTHANDLER", "1")


def without_peeking(environment: dict[str, str]) -> None:
    """Ranks of one pod exchange through shared memory alone. MPI would rather read a neighbour's memory directly
    (process_vm_readv), which a container's seccomp profile refuses: MPI_Init then fails, or the first large message."""
    environment.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    for module in ("sm", "vader"):
        environment.setdefault(f"OMPI_MCA_btl_{module}_single_copy_mechanism", "none")
    environment.setdefault("OMPI_MCA_smsc", "^cma")


def home(environment: dict[str, str], temporary: str) -> None:
    """An arbitrary UID has neither a home nor a name; libraries ask for both."""
    place = environment.get("HOME", "")
    if not (place and os.path.isdir(place) and os.access(place, os.W_OK)):
        environment["HOME"] = temporary
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        environment.setdefault("USER", "topkube")
        environment.setdefault("LOGNAME", environment["USER"])


def single_copy_off(environment: dict[str, str]) -> None:
    """A pod's seccomp profile forbids ranks to read each other's memory (process_vm_readv). MPICH tries all the same,
    and ends in MPI_Init; Open MPI finds out. Little is lost: large arrays go through our own shared window."""
    environment.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
