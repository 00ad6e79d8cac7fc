"""The writer of a shard whose bytes arrive from another thread."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from topkube.errors import StoreError


class ShardWriter:
    """Writes to the descriptor `file` until the end of its `with` block.

    After a timeout another thread or an event loop may still deliver bytes. By then the number of the descriptor may
    belong to another file, so `write` raises StoreError.
    """

    def __init__(self, file: int) -> None:
        self._file, self._ended, self._lock = file, False, threading.Lock()

    def write(self, offset: int, data: Any) -> None:
        """Write the bytes (a buffer) at `offset`. Raises OSError of the volume, StoreError after the end."""
        view = memoryview(data)
        with self._lock:
            if self._ended:
                raise StoreError("bytes arrived for a shard that is no longer being written")
            while view:
                done = os.pwrite(self._file, view, offset)
                view, offset = view[done:], offset + done

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
