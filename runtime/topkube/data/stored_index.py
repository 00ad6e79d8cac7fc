"""Sample indexes on disk, beside their shards. Derived data: one that is damaged is made again."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from pathlib import Path

import numpy as np
import xxhash

from topkube.data.sample_index import SampleIndex

_DIGEST_BYTES = 16


def write_index(path: Path, index: SampleIndex) -> None:
    """Writes the index under its name at once, its checksum first. Raises OSError."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **index.columns())
    data = buffer.getvalue()
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(xxhash.xxh3_128_digest(data) + data)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def read_index(path: Path) -> SampleIndex | None:
    """None where there is none, or it is not what was written."""
    try:
        stored = path.read_bytes()
        if stored[:_DIGEST_BYTES] != xxhash.xxh3_128_digest(stored[_DIGEST_BYTES:]):
            return None
        return SampleIndex.load(io.BytesIO(stored[_DIGEST_BYTES:]))
    except (OSError, ValueError, KeyError):
        return None
