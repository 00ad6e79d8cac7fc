"""The support of the MPI library for device pointers. A library without it would crash on such a pointer."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def mpi_takes_device_pointers() -> bool:
    """Return True if MPI takes device pointers: Open MPI and MPICH report it by the extension
    MPIX_Query_cuda_support."""
    from mpi4py import MPI

    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return False
    query.argtypes, query.restype = [], ctypes.c_int
    return bool(query() == 1)
