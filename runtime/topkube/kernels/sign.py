"""One bit per element and one scale per block of 256: the sign kernels, on NumPy arrays and torch CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.arrays import Array, as_bytes, flat_view
from topkube.errors import ArgumentError
from topkube.kernels.arguments import FLOAT32, check_apart, check_same_length

SIGN_BLOCK = 256
_BYTES, _WORDS = np.dtype(np.uint8), np.dtype(np.uint16)


def sign_pack_(values: Any, scales: Any | None = None, bits: Any | None = None) -> tuple[Any, Any, bool]:
    """Pack `values` (float32) and subtract what is sent from them in place. Return (scales, bits, is_finite).

    scales: (ceil(n / 256),) uint16, the bits of a bfloat16: the mean |x| of each block of 256 elements. bits:
    (ceil(n / 8),) uint8; bit i % 8 of byte i // 8 is the sign bit of element i. Element i is sent as +scale or -scale
    of its block. `is_finite` is False if a scale is NaN or infinite, as a NaN or infinite element makes it. Both
    outputs are allocated unless they are passed. Raises ArgumentError before anything is written.
    """
    view = flat_view(values, "values", writable=True, dtypes=(FLOAT32,))
    blocks, octets = -(-view.size // SIGN_BLOCK), -(-view.size // 8)
    scales = np.empty(blocks, _WORDS) if scales is None else scales
    bits = np.empty(octets, _BYTES) if bits is None else bits
    to_scales, to_bits = _parts(scales, bits, "", view.size, writable=True)
    check_apart("values", view, "scales", to_scales)
    check_apart("values", view, "bits", to_bits)
    check_apart("scales", to_scales, "bits", to_bits)
    return scales, bits, bool(_kernels.sign_pack(as_bytes(view), as_bytes(to_scales), to_bits))


def sign_unpack_add_(out: Any, parts: Sequence[tuple[Any, Any]], weights: Sequence[float]) -> Any:
    """Compute out += the sum over `parts` of weight * what the part sends. Return `out` (float32).

    `parts` holds the (scales, bits) of each node, as `sign_pack_` returned them for arrays of `out`'s length. Each
    scale is multiplied by its weight in float32, the products are summed in the list's order, and the sum is added to
    `out`. Raises ArgumentError before anything is written.
    """
    view = flat_view(out, "out", writable=True, dtypes=(FLOAT32,))
    check_same_length("weights", len(weights), "parts", len(parts))
    pairs = [_parts(scales, bits, f" of parts[{i}]", view.size) for i, (scales, bits) in enumerate(parts)]
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


def _parts(scales: Any, bits: Any, of: str, length: int, writable: bool = False) -> tuple[Array, Array]:
    """Return views of scales and bits, checked for an array of `length` elements."""
    views = []
    for name, x, dtype, wanted in (
        ("scales", scales, _WORDS, -(-length // SIGN_BLOCK)),
        ("bits", bits, _BYTES, -(-length // 8)),
    ):
        view = flat_view(x, f"{name}{of}", writable=writable, dtypes=(dtype,))
        if view.size != wanted:
            raise ArgumentError(
                f"{name}{of} has {view.size} elements; an array of {length} elements needs {wanted}",
                next_step="pass scales and bits of one array, as sign_pack_ returned them",
            )
        views.append(view)
    return views[0], views[1]
