"""Buffers that are reused from batch to batch: getting new pages from the kernel costs more than filling them."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

_SMALLEST_REUSED_BYTES = 256 << 10
_MOST_BUFFERS = 4
_REFERENCES_OF_FREE_BUFFER = 3
"""The number of references to a buffer that is free: the list, the loop variable and the argument of getrefcount."""


class BatchBuffers:
    """Arrays into which batches are written.

    An array is reused when no other array or tensor refers to it. Every thread has its own arrays, so that two threads
    never take the same array.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return an array of `size` bytes with undefined content: a free array, or a new array."""
        if size < _SMALLEST_REUSED_BYTES:
            return np.empty(size, np.uint8)
        buffers: list[npt.NDArray[np.uint8]] = getattr(self._local, "buffers", [])
        for buffer in buffers:
            is_close = size <= buffer.size <= 2 * size  # a larger buffer would waste memory
            if is_close and sys.getrefcount(buffer) == _REFERENCES_OF_FREE_BUFFER:
                return buffer[:size]
        fresh = np.empty(size, np.uint8)
        self._local.buffers = [*buffers[1 - _MOST_BUFFERS :], fresh]
        return fresh[:]
