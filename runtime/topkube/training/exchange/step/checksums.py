"""Checksums of tensors: a hash of their bytes in host memory; on a device, sums there that the host has not read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import xxhash

_COLUMNS = 4093
"""The number of columns into which bits are divided. A prime: if two rows of a matrix change places, their values come
into other columns."""

_GROUP = 64
"""The tensors whose columns are in memory at a time: 2 MB."""

_PIECE = 4096 * _COLUMNS
"""The values that are summed at a time. torch converts all of them to int64 first, which takes 134 MB."""


def view_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor in host memory as an array."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def hash_bytes(tensor: torch.Tensor) -> int:
    """Return a hash of 64 bits of a tensor in host memory, which is not complex."""
    return xxhash.xxh3_64_intdigest(view_bytes(tensor))


@torch.no_grad()
def sum_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum of each tensor, an int64 tensor on their device: the sum of its bits as integers, in columns
    with a weight per column. None of them is complex. A swap of two values changes it, unless they are a multiple of
    4,093 elements apart. Two launches per tensor, more if it is very large, and a few for a group of them."""
    groups = (tensors[first : first + _GROUP] for first in range(0, len(tensors), _GROUP))
    return torch.cat([_sum_bits_of_group(group) for group in groups])


def _sum_bits_of_group(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    device = tensors[0].device
    by_column = torch.zeros(len(tensors), _COLUMNS, dtype=torch.int64, device=device)
    for sums, tensor in zip(by_column, tensors, strict=True):
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.detach().contiguous().reshape(-1).view(width)
        whole = bits.numel() // _COLUMNS * _COLUMNS
        for start in range(0, whole, _PIECE):
            rows = bits[start : min(start + _PIECE, whole)].view(-1, _COLUMNS)
            if start == 0:
                torch.sum(rows, 0, dtype=torch.int64, out=sums)
            else:
                sums += torch.sum(rows, 0, dtype=torch.int64)
        sums[: bits.numel() - whole] += bits[whole:]
    return (by_column * _build_weights(device)).sum(1)


@cache
def _build_weights(device: torch.device) -> torch.Tensor:
    """Return an odd weight of 64 bits for each column: numbers of SplitMix64 (Steele et al., 2014), the same on all
    ranks."""
    weights, state, mask = [], 0, 2**64 - 1
    for _ in range(_COLUMNS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        weights.append((z ^ (z >> 31)) | 1)
    signed = [weight - 2**64 if weight >= 2**63 else weight for weight in weights]
    return torch.tensor(signed, dtype=torch.int64, device=device)
