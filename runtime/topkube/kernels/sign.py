"""The sign kernels: one bit per element and one scale per block of 256, of all elements or of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import Array, as_bytes, view_flat
from topkube.errors import WireError
from topkube.kernels.arguments import (
    FLOAT32,
    SIGN_BLOCK,
    check_apart,
    check_count,
    check_indexable,
    check_same_length,
    check_sign_sizes,
    check_top_sign_size,
    choose_threads,
)
from topkube.kernels.device import find_device_kernels

_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
_PART_NAMES = ("scales", "bits")


def sign_pack_(
    values: Any, scales: Any | None = None, bits: Any | None = None, *, wait: bool = True
) -> tuple[Any, Any, Any]:
    """Pack `values` (float32) and subtract in place the values that are sent. Return (scales, bits, is_finite).

    scales: (ceil(n / 256),) uint16, the bits of a bfloat16: the mean |x| of each block of 256 elements. bits:
    (ceil(n / 8),) uint8; bit i % 8 of byte i // 8 is the sign bit of element i. Element i is sent as +scale or -scale
    of its block. `is_finite` is False if a scale is NaN or infinite, as a NaN or infinite element makes it. Both
    outputs are allocated unless they are passed. On a GPU the call waits for `is_finite`; with wait=False it does not
    wait, and `is_finite` is a bool tensor on the device. Raises ArgumentError before anything is written.
    """
    if gpu := find_device_kernels(values=values, scales=scales, bits=bits):
        scales, bits, flag = gpu.sign_pack_(values, scales, bits, -(-values.numel() // SIGN_BLOCK))
        return scales, bits, gpu.read_flag(flag, wait)
    view = view_flat(values, "values", writable=True, dtypes=(FLOAT32,))
    blocks, bit_bytes = -(-view.size // SIGN_BLOCK), -(-view.size // 8)
    scales = np.empty(blocks, _UINT16) if scales is None else scales
    bits = np.empty(bit_bytes, _UINT8) if bits is None else bits
    scales_view, bits_view = _view_parts(scales, bits, "", view.size, writable=True)
    check_apart("values", view, "scales", scales_view)
    check_apart("values", view, "bits", bits_view)
    check_apart("scales", scales_view, "bits", bits_view)
    return scales, bits, bool(_kernels.sign_pack(as_bytes(view), as_bytes(scales_view), bits_view))


def sign_unpack_add_(out: Any, parts: Sequence[tuple[Any, Any]], weights: Sequence[float]) -> Any:
    """Compute out += the sum over `parts` of weight * the values of the part. Return `out` (float32).

    `parts` holds the (scales, bits) of each node, as `sign_pack_` returned them for arrays of `out`'s length. Each
    scale is multiplied by its weight in float32, the products are summed in the list's order, and the sum is added to
    `out`. Raises ArgumentError before anything is written.
    """
    tensors = {
        f"{name} of parts[{i}]": x for i, part in enumerate(parts) for name, x in zip(_PART_NAMES, part, strict=True)
    }
    if gpu := find_device_kernels(out=out, **tensors):
        gpu.sign_unpack_add_(out, parts, weights)
        return out
    view = view_flat(out, "out", writable=True, dtypes=(FLOAT32,))
    check_same_length("weights", len(weights), "parts", len(parts))
    pairs = [_view_parts(scales, bits, f" of parts[{i}]", view.size) for i, (scales, bits) in enumerate(parts)]
    for i, (scales, bits) in enumerate(pairs):
        check_apart("out", view, f"the scales of parts[{i}]", scales)
        check_apart("out", view, f"the bits of parts[{i}]", bits)
    _kernels.sign_unpack_add(
        as_bytes(view),
        [as_bytes(scales) for scales, _ in pairs],
        [bits for _, bits in pairs],
        list(map(float, weights)),
    )
    return out


def sign_pack_differences(tensors: Sequence[Array], bases: Sequence[Array], message: Array) -> bool:
    """Write the signs of each of `tensors` - `bases` into `message`, one tensor after another, as `SignLayout` lays out
    parts. Return False if a scale is NaN or infinite.

    All are flat NumPy arrays: float32, and uint8 that begins at a multiple of 2 bytes. A call packs any number of
    tensors, because a call takes as long as packing some thousands of elements. Raises TypeError and ValueError for
    other arrays."""
    return bool(_kernels.sign_pack_differences(list(tensors), list(bases), message))


def sign_unpack_add_tensors_(tensors: Sequence[Array], messages: Sequence[Array], weights: Sequence[float]) -> None:
    """Add to each of `tensors` what `messages` send of it, times their weights, as `sign_unpack_add_` does. The
    messages are those of `sign_pack_differences`; arrays and errors are as there."""
    _kernels.sign_unpack_add_tensors(list(tensors), list(messages), list(map(float, weights)))


def top_sign_bytes(length: int, count: int) -> int:
    """Return the bytes of a message about `count` of `length` elements, a multiple of 8. Raises ArgumentError if
    `count` is outside 1..length."""
    check_indexable(length, "the array")
    return int(_kernels.top_sign_bytes(length, check_count(count, length)))


def top_sign_pack_(values: Any, count: int, message: Any, *, threads: int | None = None, wait: bool = True) -> Any:
    """Write a message about the `count` elements of `values` (float32) of largest magnitude, and subtract in place
    the values that are sent of these elements. Return False if a scale is NaN or infinite, as a NaN or infinite element
    makes it.

    The elements are selected as by `topk`, and sent as by `sign_pack_`: a block has 256 selected elements, in the order
    of their indices. message: (top_sign_bytes(n, count),) uint8: the scales and the bits of `sign_pack_`,
    zeros up to a multiple of 8, and the indices in the code of Elias and Fano (Elias, "Efficient storage and retrieval
    by content and address of static files", 1974), which has the same length for any indices. Its format is in
    csrc/cpu/sign/top_sign.hpp. threads: as in `topk`. On a GPU the call waits for its result; with wait=False it does
    not wait, and returns a bool tensor on the device. Raises ArgumentError before anything is written.
    """
    if gpu := find_device_kernels(values=values, message=message):
        count, size = _check_count_and_size(values.numel(), count)
        return gpu.read_flag(gpu.top_sign_pack_(values, count, message, size), wait)
    view = view_flat(values, "values", writable=True, dtypes=(FLOAT32,))
    message_view, count = _view_message(message, view.size, count, writable=True)
    check_apart("values", view, "message", message_view)
    return bool(_kernels.top_sign_pack(as_bytes(view), count, choose_threads(threads), message_view))


def top_sign_unpack_add_(out: Any, count: int, message: Any, weight: float, *, wait: bool = True) -> Any:
    """Compute out += weight * the values of `message`, and return `out` (float32). `top_sign_pack_` wrote the message
    about `count` elements of an array of `out`'s length. Each scale is multiplied by the weight in float32 first.

    Raises WireError if the message does not contain `count` ascending indices of `out`, and ArgumentError for other
    lengths and dtypes; nothing is written then. On a GPU the call waits for the check; with wait=False it does not
    wait, and a damaged message adds nothing without an error.
    """
    if gpu := find_device_kernels(out=out, message=message):
        count, size = _check_count_and_size(out.numel(), count)
        flag = gpu.top_sign_unpack_add_(out, count, message, float(weight), size)
        if wait and not gpu.read_flag(flag, wait):
            raise _build_damage_error(count, out.numel())
        return out
    view = view_flat(out, "out", writable=True, dtypes=(FLOAT32,))
    message_view, count = _view_message(message, view.size, count)
    check_apart("out", view, "message", message_view)
    if not _kernels.top_sign_unpack_add(as_bytes(view), count, message_view, float(weight)):
        raise _build_damage_error(count, view.size)
    return out


def _build_damage_error(count: int, length: int) -> WireError:
    """Return the error for a message that does not contain `count` ascending indices below `length`."""
    return WireError(
        f"{count} indices below {length} were expected, but the message holds others",
        cause="the message was damaged, or the nodes run different versions of TopKube",
        next_step="run the same version of TopKube on all nodes",
    )


def _check_count_and_size(length: int, count: int) -> tuple[int, int]:
    """Check `count`. Return it as an int, and the bytes of a message about `count` of `length` elements."""
    check_indexable(length, "the array")
    count = check_count(count, length)
    return count, top_sign_bytes(length, count)


def _view_message(message: Any, length: int, count: int, writable: bool = False) -> tuple[Array, int]:
    """Check a message about `count` of `length` elements. Return a view of it, and `count` as an int."""
    count, size = _check_count_and_size(length, count)
    view = view_flat(message, "message", writable=writable, dtypes=(_UINT8,))
    check_top_sign_size(view.size, size, count, length)
    return view, count


def _view_parts(scales: Any, bits: Any, name_suffix: str, length: int, writable: bool = False) -> tuple[Array, Array]:
    """Return views of scales and bits, checked for an array of `length` elements. `name_suffix` follows the names in
    messages."""
    scales_view = view_flat(scales, f"scales{name_suffix}", writable=writable, dtypes=(_UINT16,))
    bits_view = view_flat(bits, f"bits{name_suffix}", writable=writable, dtypes=(_UINT8,))
    check_sign_sizes(scales_view.size, bits_view.size, name_suffix, length)
    return scales_view, bits_view
