"""The writer of a shard whose bytes arrive from another thread, and the part of the shard that has arrived."""

from __future__ import annotations

import contextlib
import os
import threading
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from topkube.errors import StoreError

_PIECE_BYTES = 256 << 10
"""The bytes that are hashed and written at once. They stay in the processor's cache between the two."""
_HASHED_AT_ONCE = 1 << 20


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
            while view:
                piece = view[:_PIECE_BYTES]
                if offset == self._written:  # the checksum is computed while the bytes are in the processor's cache
                    self._state.update(piece)
                    self._written += len(piece)
                else:
                    self._written = -1
                while piece:
                    done = os.pwrite(self._file, piece, offset)
                    piece, view, offset = piece[done:], view[done:], offset + done

    def digest(self, size: int) -> str:
        """Return the xxh3-128 of the shard if exactly `size` bytes were written, in order; otherwise an empty text."""
        with self._lock:
            return self._state.hexdigest() if self._written == size else ""

    @property
    def written(self) -> int:
        """The bytes from the start on that have been written; -1 if they were not written in order."""
        with self._lock:
            return self._written

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True


class ArrivingShard:
    """A shard that is being fetched. Other threads may read the first `written` bytes of `file`; the descriptor is
    closed when the last reference is gone."""

    def __init__(self, file: int, writer: ShardWriter, size: int) -> None:
        self.size = size
        self.file = os.dup(file)
        self._writer = writer
        self.digest = ""
        """The digest of the whole shard, after its bytes were compared with the listing."""
        self.is_over = False
        """True after the last byte, and if no more bytes arrive."""

    @property
    def written(self) -> int:
        return self._writer.written

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.file)


def digest(file: int, size: int, start: int = 0) -> str:
    """Return the xxh3-128 of `size` bytes from `start` on, 32 hexadecimal digits."""
    state, buffer, at = xxhash.xxh3_128(), bytearray(_HASHED_AT_ONCE), start
    view, end = memoryview(buffer), start + size
    while at < end:
        count = os.preadv(file, [view[: min(end - at, _HASHED_AT_ONCE)]], at)
        if count == 0:
            break
        state.update(view[:count])
        at += count
    return state.hexdigest()
