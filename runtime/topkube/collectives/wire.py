"""Sparse vectors as bytes, between nodes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from topkube.arrays import Array

_TYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


def most_bytes(k: int, length: int, wire: str) -> int:
    """The most that `pack` makes of k entries."""
    return 16 + 8 * k


def pack(indices: Array, values: Array, length: int, wire: str) -> tuple[Array, Array]:
    """(bytes, values as the receivers will see them)."""
    rounded = values.astype(_TYPES[wire])
    head = np.array([indices.size, rounded.itemsize], np.int64)
    data = np.concatenate([head.view(np.uint8), indices.view(np.uint8), rounded.view(np.uint8)])
    return data, rounded.astype(np.float32)


def unpack(data: Array, length: int, wire: str) -> tuple[Array, Array]:
    k = int(data[:8].view(np.int64)[0])
    indices = data[16 : 16 + 4 * k].view(np.uint32)
    return indices, data[16 + 4 * k :].view(_TYPES[wire]).astype(np.float32)
