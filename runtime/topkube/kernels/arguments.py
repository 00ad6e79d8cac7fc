"""Checks of the kernels' arguments, made before anything is written, with the same messages for NumPy and torch."""

from __future__ import annotations

import operator

import numpy as np

from topkube.arrays import DTYPE_CODES, Array, view_flat
from topkube.errors import ArgumentError
from topkube.settings import Settings

SETTINGS = Settings.from_environment()
FLOAT32 = np.dtype(np.float32)
WIRE_CODES = dict(zip(("fp32", "bf16", "fp16"), DTYPE_CODES.values(), strict=True))
MOST_ELEMENTS = 2**32 - 1
"""The largest length of an array whose indices have 32 bits."""
SIGN_BLOCK = 256
"""The number of elements that share a scale (csrc/cpu/sign/layout.hpp)."""


def check_same_length(name: str, length: int, other_name: str, other_length: int) -> None:
    """Raise ArgumentError if two arrays differ in length."""
    if length != other_length:
        raise ArgumentError(
            f"{name} has {length} elements, {other_name} has {other_length}", next_step="pass arrays of equal length"
        )


def check_apart(name: str, view: Array, other_name: str, other: Array, *, same_allowed: bool = False) -> None:
    """Raise ArgumentError if two arrays share memory. `same_allowed` accepts arrays of exactly the same elements."""
    if not np.may_share_memory(view, other):  # compares the bounds, which is exact for contiguous arrays
        return
    start, other_start = view.__array_interface__["data"][0], other.__array_interface__["data"][0]
    if same_allowed and start == other_start and view.dtype == other.dtype:
        return
    raise_overlap(name, other_name)


def raise_overlap(name: str, other_name: str) -> None:
    """Raise ArgumentError: two arrays share memory."""
    raise ArgumentError(
        f"{name} and {other_name} overlap in memory",
        cause="both are views of one array",
        next_step=f"pass a copy of {other_name}",
    )


def check_selectable(x: object, name: str) -> Array:
    """Return a flat view of `x`. Raises ArgumentError if `x` has too many elements for 32-bit indices."""
    view = view_flat(x, name)
    check_indexable(view.size, name)
    return view


def check_indexable(length: int, name: str) -> None:
    """Raise ArgumentError if an array has more elements than 32-bit indices can name."""
    if length > MOST_ELEMENTS:
        raise ArgumentError(
            f"{name} has {length} elements; indices are 32-bit",
            next_step="select from parts of fewer than 2^32 elements",
        )


def parse_whole_number(value: object, name: str) -> int:
    """Return `value` as an int. Raises ArgumentError if it is not a whole number."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{name} = {value!r} is not a whole number", next_step=f"pass int({name})") from None


def check_count(k: int, d: int) -> int:
    """Return k as an int. Raises ArgumentError if it is outside 1..d, or if d is 0."""
    k = parse_whole_number(k, "k")
    if d == 0:
        raise ArgumentError("the array is empty: there is nothing to select", next_step="skip empty arrays")
    if not 1 <= k <= d:
        raise ArgumentError(
            f"k = {k} is outside 1..{d} (the array's length)", next_step="choose k = max(1, ceil(density * length))"
        )
    return k


def check_iterations(iterations: int) -> int:
    """Return `iterations` if MSTopK allows them. Raises ArgumentError otherwise."""
    if not 1 <= iterations <= 1000:
        raise ArgumentError(
            f"iterations = {iterations} is outside 1..1000", next_step="leave it at 30, the paper's choice"
        )
    return iterations


def choose_threads(threads: int | None) -> int:
    """Return `threads`, by default TOPKUBE_THREADS. Raises ArgumentError if it is outside 1..1024."""
    threads = SETTINGS.threads if threads is None else parse_whole_number(threads, "threads")
    if not 1 <= threads <= 1024:
        raise ArgumentError(f"threads = {threads} is outside 1..1024", next_step="pass the number of free cores")
    return threads


def find_wire_code(wire: str) -> int:
    """Return the code of a wire type. Raises ArgumentError if the type is unknown."""
    if wire not in WIRE_CODES:
        raise ArgumentError(f"wire = {wire!r} is unknown", next_step=f"choose one of {', '.join(WIRE_CODES)}")
    return WIRE_CODES[wire]


def check_length(length: int) -> int:
    """Return `length` as an int. Raises ArgumentError if it is outside 0..2^32-1."""
    length = parse_whole_number(length, "length")
    if not 0 <= length <= MOST_ELEMENTS:
        raise ArgumentError(f"length = {length} is outside 0..2^32-1", next_step="encode parts of fewer elements")
    return length


def check_sign_sizes(scale_count: int, bit_bytes: int, name_suffix: str, length: int) -> None:
    """Raise ArgumentError if `scale_count` scales and `bit_bytes` bytes of sign bits do not fit an array of `length`
    elements. `name_suffix` follows the names "scales" and "bits" in the message, such as " of parts[0]"."""
    needed_scales, needed_bytes = -(-length // SIGN_BLOCK), -(-length // 8)
    for name, size, needed in (("scales", scale_count, needed_scales), ("bits", bit_bytes, needed_bytes)):
        if size != needed:
            raise ArgumentError(
                f"{name}{name_suffix} has {size} elements; an array of {length} elements needs {needed}",
                next_step="pass scales and bits of one array, as sign_pack_ returned them",
            )


def check_message_size(name: str, size: int, needed: int, length: int, bits: int) -> None:
    """Raise ArgumentError if a message of integers has `size` bytes but `needed` bytes are needed."""
    if size != needed:
        raise ArgumentError(
            f"{name} has {size} bytes; {length} elements of {bits} bits need {needed}",
            next_step="pass an array of quantised_bytes(length, bits) bytes",
        )


def check_top_sign_size(size: int, needed: int, count: int, length: int) -> None:
    """Raise ArgumentError if a message about the largest elements has `size` bytes but `needed` bytes are needed."""
    if size != needed:
        raise ArgumentError(
            f"message has {size} bytes; {count} of {length} elements need {needed}",
            next_step="pass an array of top_sign_bytes(length, count) bytes",
        )


def build_range_error(position: int, index: object, length: int) -> ArgumentError:
    """Return the error for an index outside of the dense array."""
    return ArgumentError(
        f"indices[{position}] = {index} is outside dense (0..{length - 1})",
        cause="the indices belong to another array, or to another shard",
        next_step="pass the array that the indices were selected from, or an array of its length",
    )


def build_order_error(position: int, index: object, length: int) -> ArgumentError:
    """Return the error for an index that is out of order, or not below `length`."""
    return ArgumentError(
        f"indices[{position}] = {index} is out of order or not below length = {length}",
        cause="the indices are not ascending and distinct, or the length is wrong",
        next_step="pass the indices as topk or compress_ returned them",
    )
