"""Whether the MPI library takes device pointers. Asked, never assumed: a library that does not would crash on one."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def mpi_takes_device_pointers() -> bool:
    """What the library itself answers to MPIX_Query_cuda_support, an extension that Open MPI and MPICH have."""
    from mpi4py import MPI

    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return False
    query.argtypes, query.restype = [], ctypes.c_int
    return bool(query() == 1)
