"""Transfers: which bytes of an object are read, where they are written, and where another try resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from topkube.data.remote.http.reading import Reading
from topkube.data.remote.object_version import build_condition
from topkube.data.remote.retry import Changed, FailedTries

Write = Callable[[int, Any], None]
"""A function that writes bytes at an offset: (offset, bytes). The bytes are a view of a buffer that is reused after the
call."""


@dataclass
class Transfer:
    """The read of bytes `start` to `stop` - 1 of an object. Byte i is written at `base + i`."""

    reading: Reading
    start: int
    stop: int
    base: int = 0
    at: int = field(init=False)
    """The byte that is read next."""
    failed: FailedTries | None = field(default=None, init=False)
    """The failed tries of the current range; None if no try has failed."""

    def __post_init__(self) -> None:
        self.at = self._range_start = self.start
        is_whole = self.start == 0 and self.stop == self.reading.listed.size
        self.checksum = xxhash.xxh3_128() if is_whole and self.reading.listed.checksum else None
        """The state of the checksum, if the listing has one."""
        self._held = bytearray()
        """Bytes of an object without a version: they are written when their range is complete."""

    def choose_range_end(self, most: int) -> int:
        """Return the end of the range in which `at` is. A range has at most `most` bytes."""
        return min(self._range_start + most, self.stop)

    def add(self, data: Any, end: int, write: Write, progress: Callable[[int], None]) -> None:
        """Take the next bytes of a range that ends at `end`. If the response has a version, another try can resume
        after these bytes, so they are written at once. Otherwise they are written when the range is complete."""
        self.at += len(data)
        if not self.reading.version:
            self._held += data
            if self.at < end:
                return
            data, self._held = self._held, bytearray()
        if self.checksum is not None:
            self.checksum.update(data)
        write(self.base + self.at - len(data), data)
        progress(len(data))

    def finish_range(self) -> None:
        """Begin the next range at `at`."""
        self._range_start, self.failed = self.at, None

    def rewind(self) -> None:
        """Prepare another try. Bytes that have arrived but are not written are read again."""
        self.at -= len(self._held)
        self._held = bytearray()

    @property
    def has_held_bytes(self) -> bool:
        """True if bytes have arrived that are not written."""
        return bool(self._held)

    def check(self) -> None:
        """Raise Changed if a whole object does not have the checksum of the listing."""
        listed = self.reading.listed
        if self.checksum is not None and (checksum := self.checksum.hexdigest()) != listed.checksum:
            raise Changed(
                f"{self.reading.url} has the checksum {checksum}, the manifest has {listed.checksum}",
                cause="the object was written after its manifest, or its bytes were changed in transit",
                next_step="compare the object with its source; if the object is right, write the manifest again "
                "(`topkube cache manifest --checksums`)",
            )

    def build_headers(self, end: int) -> dict[str, str]:
        """Return the headers of the request for bytes `at` to `end`."""
        headers = build_condition(self.reading.listed.version) or build_condition(self.reading.version)
        if not (self.at == 0 and end == self.reading.listed.size):
            headers["Range"] = f"bytes={self.at}-{end - 1}"
        return headers
