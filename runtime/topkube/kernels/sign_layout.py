"""The places of several parts of an array, and of the signs of all of them in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube.arrays import is_tensor
from topkube.errors import ArgumentError
from topkube.kernels.arguments import SIGN_BLOCK

_ALIGNMENT = 8
"""Each part has a multiple of this number of bytes in a message."""


class SignLayout:
    """The layout of several parts of an array, and of a message with the signs of all of them. `places` are the slices
    of the array that belong to one part each. The message has, for each part in turn, its scales and then its bits,
    rounded up to a multiple of 8 bytes."""

    def __init__(self, places: Sequence[slice]) -> None:
        self._parts = [place for place in places if place.stop > place.start]
        lengths = np.array([part.stop - part.start for part in self._parts], np.uint64)
        blocks = -(-lengths.astype(np.int64) // SIGN_BLOCK)
        part_bytes = -(-(2 * blocks + -(-lengths.astype(np.int64) // 8)) // _ALIGNMENT) * _ALIGNMENT
        scales = np.concatenate([[0], np.cumsum(part_bytes)])[:-1]
        starts = [part.start for part in self._parts]
        self._arrays = [np.array(array, np.uint64) for array in (starts, lengths, scales, scales + 2 * blocks)]
        self.message_bytes = int(part_bytes.sum())
        self._end = max((part.stop for part in self._parts), default=0)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def addresses(self) -> list[int]:
        """The addresses of four arrays of uint64, with a number for each part: its first element, its length, and the
        first bytes of its scales and of its bits in the message."""
        return [array.ctypes.data for array in self._arrays]

    def check(self, length: int, message_bytes: int, name: str) -> None:
        """Raise ArgumentError if an array of `length` elements ends before the last part, or if the message called
        `name` has too few bytes."""
        if length < self._end or message_bytes < self.message_bytes:
            raise ArgumentError(
                f"the array has {length} elements and {name} {message_bytes} bytes; the layout needs {self._end} and"
                f" {self.message_bytes}",
                next_step="pass the layout of this array",
            )

    def cut(self, values: Any, message: Any) -> list[tuple[Any, Any, Any]]:
        """Return (values, scales, bits) of each part: views. Both are NumPy arrays, or both are torch tensors."""
        _, lengths, scales, bits = (array.tolist() for array in self._arrays)
        ends = [first + -(-length // 8) for first, length in zip(bits, lengths, strict=True)]
        return [
            (values[part], message[scale:bit].view(_find_scale_type(message)), message[bit:end])
            for part, scale, bit, end in zip(self._parts, scales, bits, ends, strict=True)
        ]


def _find_scale_type(message: Any) -> Any:
    """Return uint16 of torch for a tensor, and of NumPy for an array."""
    if not is_tensor(message):
        return np.uint16
    import torch

    return torch.uint16
