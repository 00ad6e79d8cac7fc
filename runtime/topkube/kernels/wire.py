"""The wire format of a sparse shard, and scatter-add."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, Array, as_bytes, view_flat
from topkube.errors import ArgumentError, WireError
from topkube.kernels.arguments import (
    FLOAT32,
    build_order_error,
    build_range_error,
    check_apart,
    check_length,
    check_same_length,
    find_wire_code,
)
from topkube.kernels.device import NO_FAULT, find_device_kernels

_INDEX_DTYPES = tuple(np.dtype(kind) for kind in (np.uint32, np.int64, np.int32, np.uint64))
_UINT8 = np.dtype(np.uint8)
_CHECKSUM = slice(16, 24)  # its bytes in the header (csrc/cpu/wire/wire.hpp)
_FAULTS = (
    "",
    "it is shorter than a header",
    "it does not begin with the mark of a TopKube buffer",
    "its format version is unknown",
    "its value type is unknown",
    "its size does not fit the length and the number of entries that it declares",
    "its entries per block do not add up",
    "its indices are out of order or out of range",
    "bytes that must be zero are not",
    "its checksum does not match: bytes changed on the way",
)
_CHECKSUM_FAULT = 9  # the last of _FAULTS; fault 10 of a GPU is another length than was expected (csrc/cuda/wire.hpp)


def scatter_add_(dense: Any, indices: Any, values: Any, *, wait: bool = True) -> Any:
    """Compute dense[indices] += values, entry by entry in order. Return `dense`.

    dense: (d,) float32, bfloat16 or float16 (each sum is rounded once). indices: (k,) uint32 as `topk` returns them,
    or another integer type; values of repeated indices add up. values: (k,) float32, bfloat16 or float16. Raises
    ArgumentError if an index is outside 0..d-1 or lengths differ; nothing is written then. On a GPU the call waits for
    the check; with wait=False it does not wait, and invalid indices write nothing without an error.
    """
    if gpu := find_device_kernels(dense=dense, indices=indices, values=values):
        verdict, gpu_indices = gpu.scatter_add_(dense, indices, values)
        if wait and (position := gpu.read_verdict(verdict).fault) != NO_FAULT:
            raise build_range_error(position, int(gpu_indices[position]), dense.numel())
        return dense
    dense_view = view_flat(dense, "dense", writable=True)
    flat_indices, flat_values = _flatten_indices(indices), view_flat(values, "values")
    check_same_length("values", flat_values.size, "indices", flat_indices.size)
    check_apart("dense", dense_view, "values", flat_values)
    check_apart("dense", dense_view, "indices", flat_indices)
    position = _kernels.scatter_add(
        as_bytes(dense_view),
        DTYPE_CODES[dense_view.dtype],
        flat_indices,
        as_bytes(flat_values),
        DTYPE_CODES[flat_values.dtype],
    )
    if position < flat_indices.size:
        raise build_range_error(position, flat_indices[position], dense_view.size)
    return dense


def encoded_size(length: int, k: int, wire: str = "fp32") -> int:
    """Return the bytes of k encoded entries of an array of `length` elements. A receiver can compute them before the
    message arrives."""
    return int(_kernels.encoded_size(length, k, find_wire_code(wire)))


def encode(
    indices: Any,
    values: Any,
    length: int,
    *,
    wire: str = "fp32",
    residual: Any = None,
    out: Any = None,
    wait: bool = True,
) -> Any:
    """Encode a sparse shard as bytes: (encoded_size(length, k, wire),) uint8. csrc/cpu/wire/wire.hpp has the format.

    indices: (k,) ascending, below `length`; values: (k,) float32, bfloat16 or float16, rounded to `wire` ("fp32",
    "bf16" or "fp16") to nearest even; a value beyond the range of fp16 becomes infinite. residual: (length,) float32 or
    None; if given, value minus rounded value is added at each index, so that the error is sent in a later step. out:
    (encoded_size,) uint8 or None; if given, the bytes are written there, and `out` is returned. Raises
    ArgumentError if indices are out of order or out of range; nothing is written then. On a GPU the call waits for the
    check; with wait=False it does not wait, and invalid indices make a buffer that readers refuse."""
    if gpu := find_device_kernels(indices=indices, values=values, residual=residual, out=out):
        encoded, verdict, gpu_indices = gpu.encode(indices, values, length, wire, residual, out)
        if wait and (position := gpu.read_verdict(verdict).fault) != NO_FAULT:
            raise build_order_error(position, int(gpu_indices[position]), length)
        return encoded
    flat_indices, flat_values = _flatten_indices(indices), view_flat(values, "values")
    check_same_length("values", flat_values.size, "indices", flat_indices.size)
    length, code = check_length(length), find_wire_code(wire)
    flat_residual = None if residual is None else view_flat(residual, "residual", writable=True, dtypes=(FLOAT32,))
    if flat_residual is not None:
        if flat_residual.size != length:
            raise ArgumentError(
                f"residual has {flat_residual.size} elements, length is {length}",
                next_step="pass the residual of the whole shard",
            )
        check_apart("residual", flat_residual, "values", flat_values)
        check_apart("residual", flat_residual, "indices", flat_indices)
    size = _kernels.encoded_size(length, flat_indices.size, code)
    buffer = np.empty(size, np.uint8) if out is None else view_flat(out, "out", writable=True, dtypes=(_UINT8,))
    check_same_length("out", buffer.size, "the encoded shard", size)
    for name, array in (("indices", flat_indices), ("values", flat_values), ("residual", flat_residual)):
        if out is not None and array is not None:
            check_apart(name, array, "out", buffer)
    position = _kernels.encode(
        flat_indices,
        as_bytes(flat_values),
        DTYPE_CODES[flat_values.dtype],
        length,
        code,
        None if flat_residual is None else as_bytes(flat_residual),
        buffer,
    )
    if position < flat_indices.size:
        raise build_order_error(position, flat_indices[position], length)
    buffer[_CHECKSUM] = _compute_checksum(buffer)
    return buffer if out is None else out


def decode(buffer: Any, *, length: int | None = None) -> tuple[Any, Any]:
    """Return the (indices, values) of an encoded shard: (k,) uint32 ascending, (k,) float32. Values are exactly those
    on the wire.

    buffer: bytes, or a uint8 array or tensor (on a GPU the call waits for it). Raises WireError if it is truncated,
    corrupt, in another format, or for another `length`.
    """
    if gpu := find_device_kernels(buffer=buffer):
        verdict = gpu.read_verdict(gpu.check_wire(buffer, length))
        _raise_fault(buffer.numel(), verdict.fault, verdict.length, length)
        gpu_indices, gpu_values, _ = gpu.decode(buffer, length, verdict.entries)
        return gpu_indices, gpu_values
    raw, entries = _check_buffer(buffer, length)
    indices, values = np.empty(entries, np.uint32), np.empty(entries, np.float32)
    _kernels.decode(raw, indices, as_bytes(values))
    return indices, values


def decode_add_(dense: Any, buffer: Any, scale: float = 1.0, *, wait: bool = True) -> Any:
    """Compute dense[indices] += values * scale of an encoded shard, without intermediate arrays. Return True if all
    values were finite.

    dense: (length,) float32, bfloat16 or float16. Raises WireError as `decode` does, also if the shard's length is
    not dense's; nothing is written then. On a GPU the call waits for the check. With wait=False it does not wait, and
    returns a bool tensor on the device, which is also False if the buffer cannot be decoded; nothing is added then.
    """
    if gpu := find_device_kernels(dense=dense, buffer=buffer):
        device_verdict = gpu.decode_add_(dense, buffer, scale)
        if not wait:
            return gpu.flag_valid_and_finite(device_verdict)
        verdict = gpu.read_verdict(device_verdict)
        _raise_fault(buffer.numel(), verdict.fault, verdict.length, dense.numel())
        return verdict.is_finite
    dense_view = view_flat(dense, "dense", writable=True)
    raw, _ = _check_buffer(buffer, dense_view.size)
    check_apart("dense", dense_view, "buffer", raw)
    return bool(_kernels.decode_add(raw, as_bytes(dense_view), DTYPE_CODES[dense_view.dtype], scale))


def sum_rows_(out: Any, rows: Any, size: int, *, wait: bool = True) -> Any:
    """Replace `out` by the sum of the encoded shards in `rows`: row 0 + row 1 + ..., in float32, rounded once to out's
    dtype. Return True if all values were finite.

    out: (length,) float32, bfloat16 or float16. rows: (n, row_bytes) uint8, contiguous, with row_bytes a multiple of 8;
    the first `size` bytes of each row are a shard of `length` elements. Raises ArgumentError for other rows, and
    WireError as `decode` does; nothing is written then. On a GPU, the number of launches does not depend on n, and
    `wait` means the same as in `decode_add_`.
    """
    if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] % 8 or not 0 <= size <= rows.shape[1]:
        raise ArgumentError(
            f"rows has shape {tuple(rows.shape)} for encoded shards of {size} bytes",
            cause="it needs at least one row, and row_bytes must be a multiple of 8 and hold a shard",
            next_step="round the size of a row up to a multiple of 8",
        )
    if gpu := find_device_kernels(out=out, rows=rows):
        device_verdicts = gpu.sum_rows_(out, rows, size)
        if not wait:
            return gpu.flag_valid_and_finite(device_verdicts)
        verdicts = [gpu.read_verdict(device_verdict) for device_verdict in device_verdicts]
        for verdict in verdicts:
            _raise_fault(size, verdict.fault, verdict.length, out.numel())
        return all(verdict.is_finite for verdict in verdicts)
    out_view, raw = view_flat(out, "out", writable=True), view_flat(rows, "rows", dtypes=(_UINT8,))
    check_apart("out", out_view, "rows", raw)
    parts = [decode(row[:size], length=out_view.size) for row in raw.reshape(rows.shape)]
    _kernels.sum_sparse(as_bytes(out_view), DTYPE_CODES[out_view.dtype], parts)
    return all(bool(np.isfinite(values).all()) for _, values in parts)


def _flatten_indices(indices: object) -> Array:
    """Return a flat view of indices as uint32. Raises ArgumentError if a number does not fit."""
    view = view_flat(indices, "indices", dtypes=_INDEX_DTYPES)
    if view.dtype == np.uint32:
        return view
    if view.size and (view.min() < 0 or view.max() >= 2**32):
        raise ArgumentError("indices hold numbers outside 0..2^32-1", next_step="pass indices as topk returns them")
    return view.astype(np.uint32)


def _compute_checksum(buffer: Array) -> Array:
    """Return the 8 bytes of the checksum of an encoded shard: all bytes but those of the checksum itself are hashed."""
    state = xxhash.xxh3_64(buffer[: _CHECKSUM.start].data)
    state.update(buffer[_CHECKSUM.stop :].data)
    return np.frombuffer(state.intdigest().to_bytes(8, "little"), np.uint8)


def _check_buffer(buffer: Any, length: int | None) -> tuple[Array, int]:
    """Return a valid buffer as a uint8 view, and its number of entries. Raises WireError if the buffer is invalid."""
    raw = (
        np.frombuffer(buffer, np.uint8)
        if isinstance(buffer, (bytes, bytearray, memoryview))
        else view_flat(buffer, "buffer", dtypes=(_UINT8,))
    )
    fault, declared, entries, _ = _kernels.check_wire(raw)
    if not fault and not np.array_equal(raw[_CHECKSUM], _compute_checksum(raw)):
        fault = _CHECKSUM_FAULT
    _raise_fault(raw.size, fault or NO_FAULT, declared, length)
    return raw, entries


def _raise_fault(size: int, fault: int, declared: int, length: int | None) -> None:
    """Raise WireError if `fault` is the number of a fault, or if the `declared` length of a buffer of `size` bytes is
    not `length`."""
    if fault <= _CHECKSUM_FAULT:
        raise WireError(
            f"the buffer of {size} bytes cannot be decoded: {_FAULTS[fault]}",
            cause="the message is truncated or corrupt, or comes from another program",
            next_step="check that sender and receiver run the same version and post the same sizes",
        )
    if length is not None and declared != length:
        raise WireError(
            f"the buffer holds a shard of {declared} elements, {length} were expected",
            cause="ranks divided their arrays differently",
            next_step="pass arrays of equal length on all ranks",
        )
