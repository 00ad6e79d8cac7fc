"""The messages by which ranks exchange shards, and their buffers.

A request is the number of a shard and the tag of the reply. A reply is a header, the bytes of the shard in chunks, and
the digest of the sender's copy. An empty message ends a reply early.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 2 << 20
REQUEST, GOODBYE, FIRST_REPLY, REPLY_TAGS = 1, 2, 16, 30_000
"""The tags of messages: of a request, of the announcement that a rank answers no more, and of the first reply; then the
number of tags for replies. All tags are below 32,768: every MPI library has these tags."""
HEADER_LENGTH = 2
"""The number of elements in the header of a reply: the number of the shard, and its size."""
NO_SIZE = (1 << 64) - 1
"""The size in the header if the rank cannot send the shard."""
MOST_POSTED = 2
"""The most chunks of a shard that are posted at the same time."""
_SPARE_BUFFERS = 8
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class MessageBuffers:
    """Buffers for chunks, and the buffers of cancelled requests, which MPI may still use."""

    def __init__(self) -> None:
        self.abandoned: list[tuple[Any, Any]] = []
        """Cancelled requests and their buffers. MPI may write to the buffers until the requests are complete."""
        self._spare: list[Bytes] = []
        """Buffers of CHUNK_BYTES that are reused, because getting new pages takes as long as filling them."""

    def count_next_bytes(self, remaining: int) -> int:
        """Return the number of bytes of the next chunk, if `remaining` bytes of the shard are left."""
        return min(CHUNK_BYTES, remaining)

    def take(self, remaining: int) -> Bytes:
        """Return a buffer for the next chunk, if `remaining` bytes of the shard are left."""
        if remaining >= CHUNK_BYTES and self._spare:
            return self._spare.pop()
        return np.empty(self.count_next_bytes(remaining), np.uint8)

    def give_back(self, buffer: Any) -> None:
        """Keep the buffer of a complete request for another chunk."""
        if buffer.nbytes == CHUNK_BYTES and len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(buffer)

    def abandon(self, requests: Iterable[tuple[Any, Any]]) -> None:
        """Keep cancelled requests and their buffers until MPI has completed the requests."""
        self.abandoned += requests

    def drop_completed(self) -> None:
        """Release the abandoned buffers whose requests are complete."""
        self.abandoned = [(request, buffer) for request, buffer in self.abandoned if not request.Test()]


def print_message(text: str) -> None:
    """Print a message of the exchange."""
    print(f"topkube: {text}", file=sys.stderr, flush=True)
