"""The writer of a shard whose bytes arrive from another thread, and the part of the shard that has arrived."""

from __future__ import annotations

import contextlib
import os
import threading
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from topkube.errors import StoreError

PIECE_BYTES = 256 << 10
"""The bytes that are hashed and written at once, at a multiple of this size. They are still in the processor's cache
when they are written. The kernel keeps them in large pages of the page cache, which later epochs read faster."""
_HASHED_AT_ONCE = 1 << 20


class ReceivedChecksums(NamedTuple):
    """The checksums (xxh3-128, 32 hexadecimal digits) of a shard that was written. `expected`: the checksum that its
    bytes must have. `digest`: the checksum of the bytes as they were received. Each is empty if it is unknown."""

    expected: str = ""
    digest: str = ""


class ShardWriter:
    """Writes to the descriptor `file` until the end of its `with` block. Bytes that arrive in order are written in
    pieces of PIECE_BYTES.

    After a timeout another thread or an event loop may still deliver bytes. By then the number of the descriptor may
    belong to another file, so `write` raises StoreError.
    """

    def __init__(self, file: int) -> None:
        self._file, self._ended, self._lock = file, False, threading.Lock()
        self._state, self._written = xxhash.xxh3_128(), 0
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._held = 0
        """The bytes in `_piece`. They follow the bytes that have been written."""

    def write(self, offset: int, data: Any) -> None:
        """Write the bytes (a buffer) at `offset`. Raises OSError of the volume, StoreError after the end."""
        view = memoryview(data)
        with self._lock:
            if self._ended:
                raise StoreError("bytes arrived for a shard that is no longer being written")
            if self._written < 0 or offset != self._written + self._held:
                self._write_held()
                self._written = -1
                self._write_at(offset, view)
                return
            size = len(self._piece)
            while view:
                room = size - (self._written + self._held) % size
                part, view = view[:room], view[room:]
                if not self._held and len(part) == room:
                    self._append(part)
                    continue
                self._piece[self._held : self._held + len(part)] = part
                self._held += len(part)
                if len(part) == room:
                    self._write_held()

    def _write_held(self) -> None:
        """Write the bytes in `_piece`."""
        count, self._held = self._held, 0
        if count:
            self._append(self._piece[:count])

    def _append(self, part: memoryview) -> None:
        """Hash and write the bytes that follow the bytes that have been written."""
        self._state.update(part)
        self._write_at(self._written, part)
        self._written += len(part)

    def _write_at(self, offset: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count

    def compute_digest(self, size: int) -> str:
        """Write the bytes that are still in the buffer. Return the xxh3-128 of the shard if exactly `size` bytes were
        written, and in order; otherwise an empty text. Raises OSError of the volume."""
        with self._lock:
            if not self._ended:
                self._write_held()
            return self._state.hexdigest() if self._written == size else ""

    @property
    def written_bytes(self) -> int:
        """The number of bytes that have been written, without a gap; -1 if bytes were not written in order."""
        with self._lock:
            return self._written

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            try:
                if kind is None:
                    self._write_held()
            finally:
                self._ended = True


class ArrivingShard:
    """A shard that is being fetched. Other threads may read the first `written_bytes` bytes of `file`. The descriptor
    is closed when the last reference is gone."""

    def __init__(self, file: int, writer: ShardWriter, size: int) -> None:
        self.size = size
        self.file = os.dup(file)
        self._writer = writer
        self.digest = ""
        """The digest of the whole shard; empty until its bytes have been compared with the listing."""
        self.is_over = False
        """True if no more bytes arrive: the shard is whole, or the fetch has failed."""

    @property
    def written_bytes(self) -> int:
        return self._writer.written_bytes

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.file)


def compute_digest(file: int, size: int, start: int = 0) -> str:
    """Return the xxh3-128 of `size` bytes of an open file from `start` on, 32 hexadecimal digits."""
    state, buffer, at = xxhash.xxh3_128(), bytearray(_HASHED_AT_ONCE), start
    view, end = memoryview(buffer), start + size
    while at < end:
        count = os.preadv(file, [view[: min(end - at, _HASHED_AT_ONCE)]], at)
        if count == 0:
            break
        state.update(view[:count])
        at += count
    return state.hexdigest()
