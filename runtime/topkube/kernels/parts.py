"""Several parts of an array in one message. On a GPU, one call packs or adds all of them: a call from Python takes ten
times as long as a small kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from topkube.arrays import is_tensor
from topkube.errors import ArgumentError
from topkube.kernels.arguments import SIGN_BLOCK, check_same_length
from topkube.kernels.cuda_library import MOST_PARTS
from topkube.kernels.device import find_device_kernels
from topkube.kernels.quantised import quantised_bytes, quantised_pack_, quantised_unpack_add_
from topkube.kernels.sign import sign_pack_, sign_unpack_add_

_ALIGNMENT = 8


class PartLayout(ABC):
    """The layout of several parts of an array, and of a message about all of them, one after another. `places` are the
    slices of the array that belong to one part each; empty ones have no bytes. `message_bytes` is the size of the
    message.

    The library of CUDA kernels calls the format `kernel`. Its functions take `options`, and arrays of uint64 with a
    number for each part: its first element, its length, its first byte in the message, and `more_arrays`."""

    kernel: ClassVar[str]

    def __init__(self, places: Sequence[slice]) -> None:
        self.places = [place for place in places if place.stop > place.start]
        lengths = [place.stop - place.start for place in self.places]
        ends = np.cumsum([0, *map(self.count_bytes, lengths)])
        self.message_bytes = int(ends[-1])
        self._rows = [slice(start, stop) for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False)]
        self._end = max((place.stop for place in self.places), default=0)
        self._arrays = [np.array(x, np.uint64) for x in ([place.start for place in self.places], lengths, ends[:-1])]
        self._arrays += self.more_arrays(*self._arrays)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def options(self) -> tuple[int, ...]:
        """What the functions of the library take beside the parts."""
        return ()

    @property
    def addresses(self) -> list[int]:
        """The addresses of the arrays of uint64."""
        return [array.ctypes.data for array in self._arrays]

    def more_arrays(self, starts: Any, lengths: Any, bytes_before: Any) -> list[Any]:
        """Return further arrays of uint64 with a number for each part."""
        return []

    @abstractmethod
    def count_bytes(self, length: int) -> int:
        """Return the bytes of a part of `length` elements, at least one: a multiple of 8."""

    @abstractmethod
    def pack_part(self, values: Any, message: Any) -> Any:
        """Write what is sent of `values` into `message`, and subtract it from `values`. Return False if it is not
        finite."""

    @abstractmethod
    def unpack_add_part(self, out: Any, messages: Sequence[Any], weights: Sequence[float], replaces: bool) -> None:
        """Add messages about one part, times their weights, to `out`, or replace it by the sum."""

    def check(self, length: int, message_bytes: int, name: str) -> None:
        """Raise ArgumentError if an array of `length` elements ends before the last part, or if the message called
        `name` has too few bytes."""
        if length < self._end or message_bytes < self.message_bytes:
            raise ArgumentError(
                f"the array has {length} elements and {name} {message_bytes} bytes; the layout needs {self._end} and"
                f" {self.message_bytes}",
                next_step="pass the layout of this array",
            )

    def cut(self, values: Any, message: Any) -> list[tuple[Any, Any]]:
        """Return (values, message) of each part: views."""
        return [(values[place], message[row]) for place, row in zip(self.places, self._rows, strict=True)]


class SignLayout(PartLayout):
    """The layout of parts of which a message has the signs: for each part in turn, its scales and then its bits, as
    `sign_pack_` writes them, rounded up to a multiple of 8 bytes. `places` are the slices of the array that belong to
    one part each."""

    kernel = "sign"

    def count_bytes(self, length: int) -> int:
        return count_sign_bytes(length)

    def more_arrays(self, starts: Any, lengths: Any, bytes_before: Any) -> list[Any]:
        """Return the first byte of each part's bits."""
        scale_bytes = [2 * count_sign_blocks(length) for length in lengths.tolist()]
        return [bytes_before + np.array(scale_bytes, np.uint64)]

    def pack_part(self, values: Any, message: Any) -> Any:
        scales, bits = view_signs(message, len(values))
        return sign_pack_(values, scales, bits, wait=False)[2]

    def unpack_add_part(self, out: Any, messages: Sequence[Any], weights: Sequence[float], replaces: bool) -> None:
        if replaces:
            out[:] = 0
        sign_unpack_add_(out, [view_signs(message, len(out)) for message in messages], weights)


class IntegerLayout(PartLayout):
    """The layout of parts that a message sends as integers of `bits` bits (3, 4 or 8): for each part in turn, what
    `quantised_pack_` writes. `places` are the slices of the array that belong to one part each."""

    kernel = "quantised"

    def __init__(self, places: Sequence[slice], bits: int) -> None:
        self.bits = bits
        super().__init__(places)

    @property
    def options(self) -> tuple[int, ...]:
        """The number of bits."""
        return (self.bits,)

    def count_bytes(self, length: int) -> int:
        return quantised_bytes(length, self.bits)

    def pack_part(self, values: Any, message: Any) -> Any:
        return quantised_pack_(values, self.bits, message, wait=False)

    def unpack_add_part(self, out: Any, messages: Sequence[Any], weights: Sequence[float], replaces: bool) -> None:
        quantised_unpack_add_(out, self.bits, messages, weights, replaces=replaces)


def pack_parts_(values: Any, message: Any, layout: PartLayout, *, wait: bool = True) -> Any:
    """Pack each part of `values` (float32) into `message` (uint8), and subtract in place what is sent. Return False if
    what is sent of any part is not finite, else True.

    On a GPU this is one call for all parts, which waits for its result; with wait=False it does not wait, and returns a
    bool tensor on the device. Raises ArgumentError before anything is written.
    """
    if gpu := find_device_kernels(values=values, message=message):
        return gpu.read_flag(gpu.pack_parts_(values, message, layout), wait)
    layout.check(len(values), len(message), "message")
    return all([layout.pack_part(part, own) for part, own in layout.cut(values, message)])


def unpack_add_parts_(
    out: Any, messages: Sequence[Any], weights: Sequence[float], layout: PartLayout, *, replaces: bool = False
) -> Any:
    """Add to each part of `out` (float32) what the messages of `pack_parts_` send, times their weights, in the list's
    order. Return `out`. With `replaces`, the sums replace what the parts hold; the rest of `out` stays.

    On a GPU, up to 128 messages are one call for all parts. Raises ArgumentError before anything is written.
    """
    gpu = find_device_kernels(out=out, **{f"messages[{i}]": message for i, message in enumerate(messages)})
    if gpu and len(messages) <= MOST_PARTS:
        gpu.unpack_add_parts_(out, messages, weights, layout, replaces)
        return out
    check_same_length("weights", len(weights), "messages", len(messages))
    for i, message in enumerate(messages):
        layout.check(len(out), len(message), f"messages[{i}]")
    cuts = [layout.cut(out, message) for message in messages]
    for number, place in enumerate(layout.places):
        layout.unpack_add_part(out[place], [cut[number][1] for cut in cuts], weights, replaces)
    return out


def count_sign_bytes(length: int) -> int:
    """Return the bytes of the signs and the scales of `length` elements: a multiple of 8."""
    return align(2 * count_sign_blocks(length) + -(-length // 8))


def view_signs(message: Any, length: int) -> tuple[Any, Any]:
    """Return the scales, (blocks,) uint16, and the bits, (ceil(length / 8),) uint8, at the start of `message`."""
    blocks = count_sign_blocks(length)
    scales, bits = message[: 2 * blocks], message[2 * blocks : 2 * blocks + -(-length // 8)]
    if not is_tensor(message):
        return scales.view(np.uint16), bits
    import torch

    return scales.view(torch.uint16), bits


def count_sign_blocks(length: int) -> int:
    """Return the number of blocks of 256 in `length` elements."""
    return -(-length // SIGN_BLOCK)


def align(length: int) -> int:
    """Return `length` in bytes, rounded up to a multiple of 8."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT
