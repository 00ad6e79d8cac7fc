"""Selection, error feedback, wire and dense kernels, on NumPy arrays and torch tensors, CPU or CUDA.

Every function checks its arguments before it writes anything, and returns the same bits on every instruction set, any
number of threads and on the GPU. On the CPU it releases the GIL while it works; on the GPU it works on torch's
current stream and returns before the work is done. `docs/kernels.md` and `docs/gpu.md` explain how.
"""

from __future__ import annotations

from topkube import _kernels
from topkube.errors import SettingsError
from topkube.kernels.arguments import SETTINGS, SIGN_BLOCK
from topkube.kernels.dense import add_, cast_, is_finite, scale_, sum_
from topkube.kernels.low_rank import low_rank_product_
from topkube.kernels.parts import IntegerLayout, SignLayout, pack_parts_, unpack_add_parts_
from topkube.kernels.previous_threshold import PreviousThreshold
from topkube.kernels.quantised import (
    QUANTISED_BITS,
    QUANTISED_BLOCK,
    quantised_bytes,
    quantised_pack_,
    quantised_unpack_add_,
)
from topkube.kernels.selection import (
    Effort,
    Thresholds,
    compress_,
    entries_kept,
    last_effort,
    last_thresholds,
    mstopk,
    topk,
)
from topkube.kernels.sign import (
    sign_pack_,
    sign_pack_differences,
    sign_unpack_add_,
    sign_unpack_add_tensors_,
    top_sign_bytes,
    top_sign_pack_,
    top_sign_unpack_add_,
)
from topkube.kernels.tensors import are_finite, gather_, scatter_
from topkube.kernels.wire import decode, decode_add_, encode, encoded_size, scatter_add_, sum_rows_

__all__ = [
    "QUANTISED_BITS",
    "QUANTISED_BLOCK",
    "SIGN_BLOCK",
    "Effort",
    "IntegerLayout",
    "PreviousThreshold",
    "SignLayout",
    "Thresholds",
    "add_",
    "are_finite",
    "cast_",
    "compress_",
    "decode",
    "decode_add_",
    "encode",
    "encoded_size",
    "entries_kept",
    "gather_",
    "is_finite",
    "last_effort",
    "last_thresholds",
    "low_rank_product_",
    "mstopk",
    "pack_parts_",
    "quantised_bytes",
    "quantised_pack_",
    "quantised_unpack_add_",
    "scale_",
    "scatter_",
    "scatter_add_",
    "sign_pack_",
    "sign_pack_differences",
    "sign_unpack_add_",
    "sign_unpack_add_tensors_",
    "simd",
    "simd_paths",
    "sum_",
    "sum_rows_",
    "top_sign_bytes",
    "top_sign_pack_",
    "top_sign_unpack_add_",
    "topk",
    "unpack_add_parts_",
    "use_simd",
]


def simd_paths() -> list[str]:
    """Return the instruction sets that this processor can run, best first: some of "avx512", "avx2", "portable"."""
    return list(_kernels.simd_paths())


def simd() -> str:
    """Return the instruction set in use."""
    return str(_kernels.simd())


def use_simd(path: str) -> str:
    """Use the instruction set `path` ("auto": the best) in all threads of this process. Return the previous one.

    The setting TOPKUBE_SIMD does the same when this module is loaded. Results are the same on every path.
    Raises SettingsError if this processor cannot run it.
    """
    before = simd()
    if not _kernels.use_simd(simd_paths()[0] if path == "auto" else path):
        raise SettingsError(
            f"this processor has no SIMD path {path!r}; it runs {', '.join(simd_paths())}",
            next_step="unset TOPKUBE_SIMD, or set it to one of these paths",
        )
    return before


use_simd(SETTINGS.simd)
