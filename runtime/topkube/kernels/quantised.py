"""The kernels of 3, 4 or 8 bits per element and one scale per block of 256 elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import Array, as_bytes, view_flat
from topkube.errors import ArgumentError
from topkube.kernels.arguments import FLOAT32, check_apart, check_message_size, check_same_length
from topkube.kernels.device import find_device_kernels

QUANTISED_BITS = (3, 4, 8)
QUANTISED_BLOCK = 256
_UINT8 = np.dtype(np.uint8)


def quantised_bytes(length: int, bits: int) -> int:
    """Return the bytes of a message about `length` elements, a multiple of 8. Raises ArgumentError if `bits` is not
    3, 4 or 8, or if `length` is negative."""
    if bits not in QUANTISED_BITS:
        raise ArgumentError(f"bits is {bits!r}", next_step="pass 3, 4 or 8")
    if length < 0:
        raise ArgumentError(f"length is {length}", next_step="pass the number of elements")
    return int(_kernels.quantised_bytes(length, bits))


def quantised_pack_(values: Any, bits: int, message: Any, *, wait: bool = True) -> Any:
    """Write a message about `values` (float32), and subtract in place the values that the message sends. Return False
    if a scale is NaN: a NaN or infinite element makes the scale of its block NaN.

    With 8 bits, an element is sent as the nearest multiple of its block's scale. With 4 bits, it is sent as the nearest
    of 0, 1, 4, 9, 16, 25, 36 and 49 times the scale, with the sign of the element. The scale of a block of 256 elements
    is its largest |x| divided by 127 (8 bits) or 49 (4 bits), rounded up to a bfloat16 number. A block whose scale
    would be below 2^-126 is not sent. With 3 bits, an element is sent as the nearest of 0, 3, 8 and 14
    units, with its sign; every 32 elements have a unit of their own.

    message: (quantised_bytes(n, bits),) uint8, in the format of csrc/cpu/quantised/quantised.hpp. On a GPU the call
    waits for its result; with wait=False it does not wait, and returns a bool tensor on the device.
    Raises ArgumentError before anything is written.
    """
    if gpu := find_device_kernels(values=values, message=message):
        flag = gpu.quantised_pack_(values, bits, message, quantised_bytes(values.numel(), bits))
        return gpu.read_flag(flag, wait)
    view = view_flat(values, "values", writable=True, dtypes=(FLOAT32,))
    message_view = _view_message(message, "message", view.size, bits, writable=True)
    check_apart("values", view, "message", message_view)
    return bool(_kernels.quantised_pack(as_bytes(view), bits, message_view))


def quantised_unpack_add_(
    out: Any, bits: int, messages: Sequence[Any], weights: Sequence[float], *, replaces: bool = False
) -> Any:
    """Compute out += the sum over `messages` of weight * the values of the message. Return `out` (float32). With
    `replaces`, the sum replaces what `out` holds.

    `quantised_pack_` wrote the messages about arrays of `out`'s length. Each scale is multiplied by its weight in
    float32, the products are summed in the list's order, and the sum is added to `out`. Raises ArgumentError before
    anything is written.
    """
    if gpu := find_device_kernels(out=out, **{f"messages[{i}]": message for i, message in enumerate(messages)}):
        gpu.quantised_unpack_add_(out, bits, messages, weights, quantised_bytes(out.numel(), bits), replaces)
        return out
    view = view_flat(out, "out", writable=True, dtypes=(FLOAT32,))
    check_same_length("weights", len(weights), "messages", len(messages))
    views = [_view_message(message, f"messages[{i}]", view.size, bits) for i, message in enumerate(messages)]
    for i, message in enumerate(views):
        check_apart("out", view, f"messages[{i}]", message)
    _kernels.quantised_unpack_add(as_bytes(view), bits, views, list(map(float, weights)), replaces)
    return out


def _view_message(message: Any, name: str, length: int, bits: int, writable: bool = False) -> Array:
    """Check a message about `length` elements, and return a view of it."""
    view = view_flat(message, name, writable=writable, dtypes=(_UINT8,))
    check_message_size(name, view.size, quantised_bytes(length, bits), length, bits)
    return view
