"""Memory of batches that nobody holds any more, used again: fresh pages cost more than filling them."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

_LEAST_BYTES = 256 << 10
_KEPT = 4
_UNUSED = 3
"""References to a buffer that only we know: the list's, the loop's and getrefcount's own."""


class Buffers:
    """Arrays to write a batch to. One that was handed out comes again once no array or tensor refers to it. Every
    thread has its own, so that two never find the same one free."""

    def __init__(self) -> None:
        self._local = threading.local()

    def bytes(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes of any content."""
        if size < _LEAST_BYTES:
            return np.empty(size, np.uint8)
        kept: list[npt.NDArray[np.uint8]] = getattr(self._local, "kept", [])
        for buffer in kept:
            if buffer.size == size and sys.getrefcount(buffer) == _UNUSED:
                return buffer[:]
        fresh = np.empty(size, np.uint8)
        self._local.kept = [*kept[1 - _KEPT :], fresh]
        return fresh[:]
