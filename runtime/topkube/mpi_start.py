"""The start of MPI in a rank, and memory that the ranks of a node share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.environment import tune_messages
from topkube.errors import WorldError
from topkube.installation import build_install_command
from topkube.mpi_exit import take_over_finalize

_WINDOW_BYTES_PER_RANK = 1100 << 10
_WINDOW_BYTES_MOST = 20 << 20
_WINDOW_BYTES_PER_RANK_LEAST = 300 << 10


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


def share_window(MPI: Any, node_comm: Any) -> npt.NDArray[np.uint8]:
    """Return zeroed memory that all ranks of the node map. A few megabytes, because the default /dev/shm of a pod has
    64 MiB."""
    ranks = node_comm.size
    bytes_per_rank = max(_WINDOW_BYTES_PER_RANK_LEAST, min(_WINDOW_BYTES_PER_RANK, _WINDOW_BYTES_MOST // ranks))
    total = ranks * bytes_per_rank
    if ranks == 1:
        return np.zeros(total, np.uint8)
    window = MPI.Win.Allocate_shared(total if node_comm.rank == 0 else 0, 1, comm=node_comm)
    memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    if node_comm.rank == 0:
        memory[:] = 0
    node_comm.Barrier()
    return memory
