"""The writer of a shard whose bytes arrive from another thread."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from topkube.errors import StoreError


class Received(NamedTuple):
    """The checksums (xxh3-128, 32 hexadecimal digits) of a shard that was written. `expected`: the checksum that its
    bytes must have; `digest`: the checksum of the bytes as they were received. Empty if it is not known."""

    expected: str = ""
    digest: str = ""


class ShardWriter:
    """Writes to the descriptor `file` until the end of its `with` block.

    After a timeout another thread or an event loop may still deliver bytes. By then the number of the descriptor may
    belong to another file, so `write` raises StoreError.
    """

    def __init__(self, file: int) -> None:
        self._file, self._ended, self._lock = file, False, threading.Lock()
        self._state, self._written = xxhash.xxh3_128(), 0

    def write(self, offset: int, data: Any) -> None:
        """Write the bytes (a buffer) at `offset`. Raises OSError of the volume, StoreError after the end."""
        view = memoryview(data)
        with self._lock:
            if self._ended:
                raise StoreError("bytes arrived for a shard that is no longer being written")
            if offset == self._written:  # the checksum is computed while the bytes are in the processor's cache
                self._state.update(view)
                self._written += len(view)
            else:
                self._written = -1
            while view:
                done = os.pwrite(self._file, view, offset)
                view, offset = view[done:], offset + done

    def digest(self, size: int) -> str:
        """Return the xxh3-128 of the shard if exactly `size` bytes were written, in order; otherwise an empty text."""
        with self._lock:
            return self._state.hexdigest() if self._written == size else ""

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
