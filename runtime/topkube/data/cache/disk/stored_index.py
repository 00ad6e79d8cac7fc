"""Sample indexes on disk, next to their shards. A damaged index is created again from its shard."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import xxhash

from topkube.data.formats.sample_index import SampleIndex

_DIGEST_BYTES = 16
_RULES = 2
"""The version of the rules that create an index. It is part of the digest, so an index of other rules is not used."""


def pack_index(index: SampleIndex) -> bytes:
    """Return the stored form of the index: its checksum, then its columns."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **index.to_columns())
    data = buffer.getvalue()
    return xxhash.xxh3_128_digest(data, seed=_RULES) + data


def read_index(path: Path) -> SampleIndex | None:
    """Read an index. Return None if there is no index or it is damaged."""
    try:
        stored = path.read_bytes()
        if stored[:_DIGEST_BYTES] != xxhash.xxh3_128_digest(stored[_DIGEST_BYTES:], seed=_RULES):
            return None
        return SampleIndex.load(io.BytesIO(stored[_DIGEST_BYTES:]))
    except (OSError, ValueError, KeyError):
        return None
