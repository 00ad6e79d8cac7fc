"""Buffers that are reused from batch to batch: getting new pages from the kernel costs more than filling them."""

from __future__ import annotations

import itertools
import sys
import threading

import numpy as np
import numpy.typing as npt

_SMALLEST_REUSED_BYTES = 256 << 10
_MOST_BUFFERS = 4
Buffer = npt.NDArray[np.uint8]


def _find_free(buffers: list[Buffer], size: int, references: int) -> Buffer | None:
    """Return a buffer for `size` bytes to which at most `references` references exist; None if there is no such
    buffer."""
    for buffer in buffers:
        is_close = size <= buffer.size <= 2 * size  # a larger buffer would waste memory
        if is_close and sys.getrefcount(buffer) <= references:
            return buffer
    return None


_REFERENCES_OF_FREE_BUFFER = next(
    count for count in itertools.count(1) if _find_free([np.empty(1, np.uint8)], 1, count) is not None
)
"""The number of references to a buffer that only its list holds, as `_find_free` counts them. It is measured, because
Python 3.14 counts fewer references to the same object than older versions."""


class BatchBuffers:
    """Arrays into which batches are written.

    An array is reused when no other array or tensor refers to it. Every thread has its own arrays, so that two threads
    never take the same array.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size: int) -> Buffer:
        """Return an array of `size` bytes with undefined content: a free array, or a new array."""
        if size < _SMALLEST_REUSED_BYTES:
            return np.empty(size, np.uint8)
        buffers: list[Buffer] = getattr(self._local, "buffers", [])
        free = _find_free(buffers, size, _REFERENCES_OF_FREE_BUFFER)
        if free is not None:
            return free[:size]
        fresh = np.empty(size, np.uint8)
        self._local.buffers = [*buffers[1 - _MOST_BUFFERS :], fresh]
        return fresh[:]
