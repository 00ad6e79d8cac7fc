"""Messages between ranks that open a dataset: arrays and texts in buffers. Nothing is unpickled.

Every function is a collective.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

import topkube.errors
from topkube.data.remote.listing import Listing, Longs
from topkube.errors import TopKubeError

_BROADCAST_BYTES = 1 << 30
"""MPI counts elements in 32 bits."""


def share_listing(comm: Any, listing: Listing | None) -> Listing:
    """Return rank 0's listing on every rank."""
    packed = None
    if listing is not None:
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **listing.to_columns())
        packed = buffer.getvalue()
    with np.load(io.BytesIO(_broadcast_bytes(comm, packed, 0)), allow_pickle=False) as columns:
        return Listing.from_columns(columns)


def share_text(comm: Any, text: str) -> str:
    """Return rank 0's text on every rank."""
    return _broadcast_bytes(comm, text.encode(), 0).decode()


def share_counts(comm: Any, counts: Longs) -> Longs:
    """Return the largest count of all ranks, for every element."""
    from mpi4py import MPI

    result = np.empty_like(counts)
    comm.Allreduce(np.ascontiguousarray(counts), result, op=MPI.MAX)
    return result


def share_failure(comm: Any, failure: TopKubeError | None) -> TopKubeError | None:
    """Return, on every rank, the failure of the first rank that has a failure; None if no rank has a failure."""
    from mpi4py import MPI

    first = np.array([comm.rank if failure is not None else comm.size], np.int64)
    comm.Allreduce(MPI.IN_PLACE, first, op=MPI.MIN)
    if first[0] == comm.size:
        return None
    message = None
    if failure is not None:
        message = json.dumps([type(failure).__name__, failure.what, failure.cause, failure.next_step]).encode()
    kind, what, cause, next_step = json.loads(_broadcast_bytes(comm, message, int(first[0])))
    error_type = getattr(topkube.errors, kind, None)
    if not (isinstance(error_type, type) and issubclass(error_type, TopKubeError)):
        error_type = topkube.errors.StoreError  # a subclass of the data layer, such as Changed
    return failure if comm.rank == first[0] else error_type(what, cause=cause, next_step=next_step)


def _broadcast_bytes(comm: Any, data: bytes | None, root: int) -> bytes:
    """Return the bytes of rank `root` on every rank."""
    size = np.array([len(data) if data is not None and comm.rank == root else 0], np.int64)
    comm.Bcast(size, root)
    buffer = np.empty(int(size[0]), np.uint8)
    if comm.rank == root:
        assert data is not None
        buffer[:] = np.frombuffer(data, np.uint8)
    for start in range(0, buffer.size, _BROADCAST_BYTES):
        comm.Bcast(buffer[start : start + _BROADCAST_BYTES], root)
    return buffer.tobytes()
