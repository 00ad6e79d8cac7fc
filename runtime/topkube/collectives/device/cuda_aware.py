"""Ask the MPI library if it takes device pointers. A library that does not would crash on a device pointer."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def mpi_takes_device_pointers() -> bool:
    """Return what MPIX_Query_cuda_support reports, an extension that Open MPI and MPICH have."""
    from mpi4py import MPI

    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return False
    query.argtypes, query.restype = [], ctypes.c_int
    return bool(query() == 1)
