"""The places of several parts of an array, and of what one message sends of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import is_tensor
from topkube.errors import ArgumentError
from topkube.kernels.arguments import SIGN_BLOCK

_ALIGNMENT = 8
"""Each part has a multiple of this number of bytes in a message."""


class PartLayout:
    """The layout of several parts of an array, and of a message about all of them, one after another. `places` are the
    slices of the array that belong to one part each. `count_bytes(length)` returns the bytes of a part in the message,
    a multiple of 8. The addresses of the arrays in `arrays`, uint64 with a number for each part, are arguments of a
    kernel: its first element, its length, and its first byte in the message."""

    def __init__(self, places: Sequence[slice], count_bytes: Callable[[int], int]) -> None:
        self.parts = [place for place in places if place.stop > place.start]
        lengths = [part.stop - part.start for part in self.parts]
        ends = np.cumsum([0, *map(count_bytes, lengths)])
        self.message_bytes = int(ends[-1])
        self.arrays = [np.array(x, np.uint64) for x in ([part.start for part in self.parts], lengths, ends[:-1])]
        self._end = max((part.stop for part in self.parts), default=0)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def addresses(self) -> list[int]:
        """The addresses of `arrays`."""
        return [array.ctypes.data for array in self.arrays]

    def check(self, length: int, message_bytes: int, name: str) -> None:
        """Raise ArgumentError if an array of `length` elements ends before the last part, or if the message called
        `name` has too few bytes."""
        if length < self._end or message_bytes < self.message_bytes:
            raise ArgumentError(
                f"the array has {length} elements and {name} {message_bytes} bytes; the layout needs {self._end} and"
                f" {self.message_bytes}",
                next_step="pass the layout of this array",
            )


class SignLayout(PartLayout):
    """The layout of parts whose signs are in one message: for each part in turn, its scales and then its bits, rounded
    up to a multiple of 8 bytes. `places` are the slices of the array that belong to one part each. `arrays` also has
    the first bytes of the bits."""

    def __init__(self, places: Sequence[slice]) -> None:
        super().__init__(places, _count_sign_bytes)
        _, lengths, scales = self.arrays
        blocks = -(-lengths.astype(np.int64) // SIGN_BLOCK)
        self.arrays.append(scales + (2 * blocks).astype(np.uint64))

    def cut(self, values: Any, message: Any) -> list[tuple[Any, Any, Any]]:
        """Return (values, scales, bits) of each part: views. Both are NumPy arrays, or both are torch tensors."""
        _, lengths, scales, bits = (array.tolist() for array in self.arrays)
        ends = [first + -(-length // 8) for first, length in zip(bits, lengths, strict=True)]
        return [
            (values[part], message[scale:bit].view(_find_scale_type(message)), message[bit:end])
            for part, scale, bit, end in zip(self.parts, scales, bits, ends, strict=True)
        ]


class IntegerLayout(PartLayout):
    """The layout of parts that one message sends as integers of `bits` bits: for each part in turn, a message of
    `quantised_pack_`. `places` are the slices of the array that belong to one part each."""

    def __init__(self, places: Sequence[slice], bits: int) -> None:
        super().__init__(places, lambda length: int(_kernels.quantised_bytes(length, bits)))
        self.bits = bits

    def cut(self, values: Any, message: Any) -> list[tuple[Any, Any]]:
        """Return (values, message) of each part: views."""
        ends = [*self.arrays[2].tolist()[1:], self.message_bytes]
        starts = self.arrays[2].tolist()
        return [(values[part], message[start:end]) for part, start, end in zip(self.parts, starts, ends, strict=False)]


def _count_sign_bytes(length: int) -> int:
    return -(-(2 * -(-length // SIGN_BLOCK) + -(-length // 8)) // _ALIGNMENT) * _ALIGNMENT


def _find_scale_type(message: Any) -> Any:
    """Return uint16 of torch for a tensor, and of NumPy for an array."""
    if not is_tensor(message):
        return np.uint16
    import torch

    return torch.uint16
