"""The start of MPI in a rank, and memory that the ranks of a node share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.environment import tune_messages
from topkube.errors import WorldError
from topkube.installation import build_install_command
from topkube.mpi_exit import take_over_finalize

SHARED_MEMORY = "/dev/shm"
_WINDOW_BYTES_PER_RANK = 1100 << 10
_WINDOW_BYTES_MOST = 20 << 20
_WINDOW_BYTES_PER_RANK_LEAST = 300 << 10
_SPARE_BYTES = 4 << 20
"""What a window leaves free in /dev/shm, for MPI and other programs."""
_MOST_COUNTED_BYTES = 2**31 - 1
"""The most bytes that a call can count before version 4 of MPI, as in Open MPI 5."""
_BLOCK_BYTES = 1 << 20
"""The unit in which longer messages are counted."""
_SUB_WORLDS = 8
"""The window of a sub-world has its usual size if so many of them fit into /dev/shm."""


def load_mpi() -> Any:
    """Return the module mpi4py.MPI, which will start MPI with MPI_THREAD_MULTIPLE. Raises WorldError if there is no
    MPI, or if another library has started it with fewer threads."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        take_over_finalize()
        tune_messages()
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise WorldError(
            f"MPI could not be loaded: {error}",
            cause="no MPI library is installed here",
            next_step=f"{build_install_command('mpich')}, or install the system's MPI and try `topkube doctor`",
        ) from error
    if MPI.Is_initialized() and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WorldError(
            "MPI was started without MPI_THREAD_MULTIPLE",
            cause="another library started MPI first, with fewer threads",
            next_step="call topkube.init() before anything else that uses MPI",
        )
    return MPI


@contextlib.contextmanager
def explain_mpi_errors(MPI: Any) -> Iterator[None]:
    """Convert an error of MPI in the creation of a world to a WorldError."""
    try:
        yield
    except MPI.Exception as error:
        raise WorldError(
            f"MPI could not create the communicators of a world: {str(error).splitlines()[0]}",
            cause="too many worlds exist: each has about seven communicators, and MPI has room for about 2,000",
            next_step="create a sub-world once and keep it, or close it when it is not used any more (World.close)",
        ) from error


def allow_long_messages(MPI: Any, comm: Any, most_bytes: int | None = None) -> Any:
    """Return `comm` itself if its messages may have any length, or the same communicator with `Isend` and `Irecv` that
    take arrays of more than `most_bytes`, by default what this MPI can count."""
    if most_bytes is None:
        if MPI.Get_version()[0] >= 4:
            return comm
        most_bytes = _MOST_COUNTED_BYTES

    def begin(method: Any, array: Any, peer: int, tag: int) -> Any:
        nbytes = getattr(array, "nbytes", 0)
        if nbytes <= most_bytes:
            return method(array, peer, tag)
        blocks, rest = divmod(nbytes, _BLOCK_BYTES)
        block = MPI.BYTE.Create_contiguous(_BLOCK_BYTES)
        whole = MPI.Datatype.Create_struct([blocks, rest], [0, nbytes - rest], [block, MPI.BYTE]).Commit()
        try:
            return method([array, 1, whole], peer, tag)
        finally:
            free_handles([block, whole])  # MPI keeps them until the message is complete

    class LongMessages(MPI.Intracomm):  # type: ignore[misc]
        def Isend(self, array: Any, dest: int, tag: int = 0) -> Any:
            return begin(super().Isend, array, dest, tag)

        def Irecv(self, array: Any, source: int, tag: int = 0) -> Any:
            return begin(super().Irecv, array, source, tag)

    return LongMessages(comm)


def free_handles(handles: Sequence[Any]) -> None:
    """Free communicators and windows of MPI. The ranks that share them call this together."""
    for handle in handles:
        handle.Free()


def plan_window(node_ranks: int, free_bytes: int, is_sub_world: bool) -> int:
    """Return the bytes of the memory that the ranks of a node share, or 0 if not even the least number of bytes is
    free. A sub-world is small if it would take much of what is free: other sub-worlds need memory too."""
    usual = node_ranks * max(
        _WINDOW_BYTES_PER_RANK_LEAST, min(_WINDOW_BYTES_PER_RANK, _WINDOW_BYTES_MOST // node_ranks)
    )
    available = max(0, free_bytes - _SPARE_BYTES)
    if usual <= (available // _SUB_WORLDS if is_sub_world else available):
        return usual
    least = node_ranks * _WINDOW_BYTES_PER_RANK_LEAST
    return least if least <= available else 0


def agree_on_window(MPI: Any, comm: Any, node_comm: Any, is_sub_world: bool = False) -> int:
    """Return the bytes of this node's window for `share_window`. All ranks of `comm` call this together. Raises
    WorldError on all of them if a node has too little shared memory: a rank that writes to a full /dev/shm is killed
    by SIGBUS."""
    if node_comm.size == 1:
        planned, lacking = _WINDOW_BYTES_PER_RANK, (0, 0, 0)
    else:
        free_bytes = count_free_bytes() if node_comm.rank == 0 else 0
        free_bytes = node_comm.bcast(free_bytes)
        planned = plan_window(node_comm.size, free_bytes, is_sub_world)
        needed = node_comm.size * _WINDOW_BYTES_PER_RANK_LEAST + _SPARE_BYTES
        lacking = (0, 0, 0) if planned else (needed - free_bytes, needed, free_bytes)
    _, needed, free_bytes = comm.allreduce(lacking, MPI.MAX)  # those of the node that lacks most
    if needed:
        raise WorldError(
            f"{SHARED_MEMORY} has {free_bytes / 2**20:.1f} MiB free on a node, and its ranks need"
            f" {needed / 2**20:.1f} MiB for this world",
            cause="a container has 64 MiB by default, and every world with several ranks on a node takes a part",
            next_step="make /dev/shm larger (docker run --shm-size=1g, or a memory-backed emptyDir at /dev/shm), or"
            " close sub-worlds that are not used any more (World.close)",
        )
    return planned


def count_free_bytes() -> int:
    """Return the free bytes of shared memory; if they are unknown, more than any world needs."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 1 << 62
    return status.f_bavail * status.f_frsize


def share_window(MPI: Any, node_comm: Any, nbytes: int) -> tuple[npt.NDArray[np.uint8], Any]:
    """Return zeroed memory of `nbytes` that all ranks of the node map, and its MPI window (None for a single rank)."""
    if node_comm.size == 1:
        return np.zeros(nbytes, np.uint8), None
    window = MPI.Win.Allocate_shared(nbytes if node_comm.rank == 0 else 0, 1, comm=node_comm)
    memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    if node_comm.rank == 0:
        memory[:] = 0
    node_comm.Barrier()
    return memory, window
