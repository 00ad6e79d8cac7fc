"""Selection, error feedback, wire and dense kernels, on NumPy arrays and torch CPU tensors.

Every function checks its arguments before it writes anything, releases the GIL while it works, and gives the same
bits on every instruction set and any number of threads. `docs/kernels.md` explains how.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from topkube import _kernels
from topkube.arrays import BFLOAT16, Array, flat_view, like
from topkube.errors import ArgumentError, SettingsError, WireError
from topkube.settings import Settings

_SETTINGS = Settings.from_environment()
_FLOAT32 = np.dtype(np.float32)
_CODES = {_FLOAT32: 0, BFLOAT16: 1, np.dtype(np.float16): 2}  # csrc/cpu/dtype.hpp


def _bytes(view: Array) -> Array:
    return view.view(np.uint8)


def _same_length(name: str, view: Array, other_name: str, other: Array) -> None:
    if view.size != other.size:
        raise ArgumentError(
            f"{name} has {view.size} elements, {other_name} has {other.size}", next_step="pass arrays of equal length"
        )


def _overlap(a: Array, b: Array) -> bool:
    start_a, start_b = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    return bool(start_a < start_b + b.nbytes and start_b < start_a + a.nbytes)


def _apart(name: str, view: Array, other_name: str, other: Array, *, same_allowed: bool = False) -> None:
    """Raises ArgumentError where the two share memory; `same_allowed` lets through the very same elements."""
    if not _overlap(view, other):
        return
    same = view.__array_interface__["data"][0] == other.__array_interface__["data"][0]
    if same_allowed and same and view.dtype == other.dtype:
        return
    raise ArgumentError(
        f"{name} and {other_name} overlap in memory",
        cause="two views of one array",
        next_step=f"pass a copy of {other_name}",
    )


# The instruction set


def simd_paths() -> list[str]:
    """The instruction sets that this processor can run, best first: some of "avx512", "avx2", "portable"."""
    return list(_kernels.simd_paths())


def simd() -> str:
    """The instruction set in use."""
    return str(_kernels.simd())


def use_simd(path: str) -> str:
    """Takes the path called `path` ("auto": the best) in all threads of this process; returns the one that was in use.

    The setting TOPKUBE_SIMD does the same when this module is loaded. Results are the same on every path.
    Raises SettingsError where this processor cannot run it.
    """
    before = simd()
    if not _kernels.use_simd(simd_paths()[0] if path == "auto" else path):
        raise SettingsError(
            f"this processor has no SIMD path {path!r}; it runs {', '.join(simd_paths())}",
            next_step="unset TOPKUBE_SIMD, or set it to one of these",
        )
    return before


use_simd(_SETTINGS.simd)


# Dense


def sum_(out: Any, inputs: Sequence[Any], scale: float = 1.0) -> Any:
    """out = (inputs[0] + inputs[1] + ...) * scale, element by element, summed in the list's order; returns `out`.

    Arithmetic is float32; a 16-bit `out` is rounded once, to nearest even. `inputs`: one or more arrays of one dtype
    and of `out`'s length; one of them may be `out` itself. Raises ArgumentError on mismatched lengths or dtypes, or
    partial overlap.
    """
    to = flat_view(out, "out", writable=True)
    views = [flat_view(x, f"inputs[{i}]") for i, x in enumerate(inputs)]
    if not views:
        raise ArgumentError("inputs is empty", next_step="pass at least one array")
    for i, view in enumerate(views):
        _same_length(f"inputs[{i}]", view, "out", to)
        if view.dtype != views[0].dtype:
            raise ArgumentError(
                f"inputs[{i}] has dtype {view.dtype}, inputs[0] has {views[0].dtype}",
                next_step="pass inputs of one dtype",
            )
        _apart("out", to, f"inputs[{i}]", view, same_allowed=True)
    _kernels.sum(_bytes(to), _CODES[to.dtype], [_bytes(view) for view in views], _CODES[views[0].dtype], scale)
    return out


def add_(out: Any, x: Any) -> Any:
    """out += x in float32, rounded once to `out`'s dtype; returns `out`. Same lengths and dtypes, no part overlap."""
    return sum_(out, [out, x])


def scale_(x: Any, factor: float) -> Any:
    """x *= factor in float32, rounded once to x's dtype; returns `x`."""
    view = flat_view(x, "x", writable=True)
    _kernels.scale(_bytes(view), _CODES[view.dtype], factor)
    return x


def cast_(out: Any, x: Any) -> Any:
    """out = x, rounded to nearest even where `out` is narrower (dtype.hpp says how); returns `out`. No overlap."""
    to, view = flat_view(out, "out", writable=True), flat_view(x, "x")
    _same_length("x", view, "out", to)
    _apart("out", to, "x", view)
    if to.dtype == view.dtype:
        _kernels.copy(_bytes(to), _bytes(view))
    else:
        _kernels.sum(_bytes(to), _CODES[to.dtype], [_bytes(view)], _CODES[view.dtype], 1.0)
    return out


def is_finite(x: Any) -> bool:
    """Whether no element of `x` is NaN or infinite. An empty array is finite."""
    view = flat_view(x, "x")
    return bool(_kernels.is_finite(_bytes(view), _CODES[view.dtype]))


# Selection


class Effort(NamedTuple):
    """What the last selection in this thread took: passes over memory (never more than 4), and candidates that its
    filter left."""

    passes: int
    candidates: int


class Thresholds(NamedTuple):
    """Where MSTopK's last probes of either kind stood, and how many magnitudes reach them (Algorithm 1: thres1, k1,
    thres2, k2)."""

    upper: float
    above_upper: int
    lower: float
    above_lower: int


_last = threading.local()


def last_effort() -> Effort:
    """The effort of the last `topk`, `compress_` or `mstopk` that this thread called."""
    return Effort(*_last.effort)


def last_thresholds() -> Thresholds:
    """The thresholds of the last `mstopk` that this thread called."""
    return Thresholds(*_last.thresholds)


def entries_kept(length: int, density: float) -> int:
    """k = max(1, ceil(density * length)), at most `length`. Raises ArgumentError for a density outside (0, 1]."""
    if not 0 < density <= 1:
        raise ArgumentError(
            f"density = {density} is outside (0, 1]", next_step="give the share of entries to keep, for example 0.01"
        )
    return min(length, max(1, math.ceil(round(density * length, 6))))  # 0.07 * 100 is 7.000000000000001


def topk(x: Any, k: int, *, threads: int | None = None) -> tuple[Any, Any]:
    """The k entries of largest magnitude, exactly: (indices, values).

    x: d elements of float32, bfloat16 or float16, NumPy or torch CPU, any shape, contiguous; indices count in its
    flat view. indices: (k,) uint32, ascending. values: (k,), x's dtype, with their signs. Of equal magnitudes at the
    threshold the lowest index wins; NaN and infinity are the largest. threads: default TOPKUBE_THREADS; the result is
    the same with any number. Raises ArgumentError where k is outside 1..d or x cannot be used.
    """
    view = _selectable(x, "x")
    k, threads = _count(k, view.size), _threads(threads)
    indices, values = np.empty(k, np.uint32), np.empty(k, view.dtype)
    _last.effort = _kernels.topk(_bytes(view), _CODES[view.dtype], threads, indices, _bytes(values))
    return like(indices, x), like(values, x)


def compress_(gradient: Any, residual: Any, k: int, *, out: Any = None, threads: int | None = None) -> tuple[Any, Any]:
    """Error feedback and selection in one pass: acc = residual + gradient, its k largest entries as (indices, values).

    acc, with the selected entries cleared, is left in `gradient`'s memory (float32), or in `out` where given: it is
    the next residual. `residual` is unchanged, so the caller commits the step by swapping the two buffers, or drops
    it by not doing so. gradient: (d,) float32, bfloat16 or float16; residual: (d,) float32; out: (d,) float32,
    required with a 16-bit gradient. None of them overlap (`out` may be `gradient` itself). indices: (k,) uint32
    ascending; values: (k,) float32, selected as by `topk`: where acc holds a NaN or an infinity, `values` does.
    Raises ArgumentError, with nothing written, where an argument cannot be used.
    """
    source = _selectable(gradient, "gradient")
    old = flat_view(residual, "residual", dtypes=(_FLOAT32,))
    if out is None and source.dtype != _FLOAT32:
        raise ArgumentError(
            f"gradient has dtype {source.dtype}: the sum with the residual is float32 and does not fit its memory",
            next_step="pass out=numpy.empty(gradient.size, numpy.float32)",
        )
    acc = flat_view(
        gradient if out is None else out, "gradient" if out is None else "out", writable=True, dtypes=(_FLOAT32,)
    )
    _same_length("residual", old, "gradient", source)
    _same_length("out", acc, "gradient", source)
    _apart("gradient", source, "residual", old)
    _apart("out", acc, "residual", old)
    _apart("gradient", source, "out", acc, same_allowed=True)
    k, threads = _count(k, source.size), _threads(threads)
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    _last.effort = _kernels.compress(
        _bytes(source), _CODES[source.dtype], _bytes(old), _bytes(acc), threads, indices, _bytes(values)
    )
    return like(indices, gradient), like(values, gradient)


def mstopk(x: Any, k: int, iterations: int = 30, seed: int = 0, *, threads: int | None = None) -> tuple[Any, Any]:
    """Approximately the k largest magnitudes, by "Towards Scalable Distributed Training of Deep Learning on Public
    Cloud Clusters", Algorithm 1 (MSTopK): (indices, values), exactly k of them, indices ascending.

    `iterations` bisections between the mean magnitude (a float64 sum of fixed shape) and the largest one find two
    thresholds, float32 each. All entries above the upper one are taken, and as many as are missing from one run of
    neighbours among those between the two, at an offset drawn from `seed`. Arguments, result and errors otherwise as
    `topk`. Where x holds NaN or infinity the mean says nothing: the exact top k is returned, and they are in it.
    """
    view = _selectable(x, "x")
    k, threads = _count(k, view.size), _threads(threads)
    if not 1 <= iterations <= 1000:
        raise ArgumentError(
            f"iterations = {iterations} is outside 1..1000", next_step="leave it at 30, the paper's choice"
        )
    indices, values = np.empty(k, np.uint32), np.empty(k, view.dtype)
    passes, candidates, *thresholds = _kernels.mstopk(
        _bytes(view), _CODES[view.dtype], iterations, seed % 2**64, threads, indices, _bytes(values)
    )
    _last.effort, _last.thresholds = (passes, candidates), thresholds
    return like(indices, x), like(values, x)


def _selectable(x: object, name: str) -> Array:
    view = flat_view(x, name)
    if view.size >= 2**32:
        raise ArgumentError(
            f"{name} has {view.size} elements; indices are 32-bit",
            next_step="select from parts of fewer than 2^32 elements",
        )
    return view


def _whole(value: object, name: str) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{name} = {value!r} is not a whole number", next_step=f"pass int({name})") from None


def _count(k: int, d: int) -> int:
    k = _whole(k, "k")
    if d == 0:
        raise ArgumentError("the array is empty: there is nothing to select", next_step="skip empty arrays")
    if not 1 <= k <= d:
        raise ArgumentError(
            f"k = {k} is outside 1..{d} (the array's length)", next_step="choose k = max(1, ceil(density * length))"
        )
    return k


def _threads(threads: int | None) -> int:
    threads = _SETTINGS.threads if threads is None else _whole(threads, "threads")
    if not 1 <= threads <= 1024:
        raise ArgumentError(f"threads = {threads} is outside 1..1024", next_step="pass the number of free cores")
    return threads


# Scatter and wire

_WIRES = {"fp32": 0, "bf16": 1, "fp16": 2}
_INDEX_DTYPES = tuple(np.dtype(kind) for kind in (np.uint32, np.int64, np.int32, np.uint64))
_UINT8 = np.dtype(np.uint8)
_CHECKSUM = slice(16, 24)  # csrc/cpu/wire.hpp
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
)


def scatter_add_(dense: Any, indices: Any, values: Any) -> Any:
    """dense[indices] += values, entry by entry in order; returns `dense`.

    dense: (d,) float32, bfloat16 or float16 (each sum is rounded once). indices: (k,) uint32 as `topk` gives them, or
    another integer type; repeated ones add up. values: (k,) float32, bfloat16 or float16. Raises ArgumentError where
    an index is outside 0..d-1 or lengths differ; nothing is written then.
    """
    to = flat_view(dense, "dense", writable=True)
    at, added = _indices(indices), flat_view(values, "values")
    _same_length("values", added, "indices", at)
    _apart("dense", to, "values", added)
    _apart("dense", to, "indices", at)
    bad = _kernels.scatter_add(_bytes(to), _CODES[to.dtype], at, _bytes(added), _CODES[added.dtype])
    if bad < at.size:
        raise ArgumentError(
            f"indices[{bad}] = {at[bad]} is outside dense (0..{to.size - 1})",
            cause="indices of another array, or of another shard",
            next_step="pass the array that the indices were selected from, or one of its length",
        )
    return dense


def encoded_size(length: int, k: int, wire: str = "fp32") -> int:
    """Bytes that `encode` makes of k entries of an array of `length` elements: a receiver knows it before the
    message."""
    return int(_kernels.encoded_size(length, k, _wire(wire)))


def encode(indices: Any, values: Any, length: int, *, wire: str = "fp32", residual: Any = None) -> Array:
    """A sparse shard as bytes: (encoded_size(length, k, wire),) uint8. csrc/cpu/wire.hpp has the format.

    indices: (k,) ascending, below `length`; values: (k,) float32, bfloat16 or float16, rounded to `wire` ("fp32",
    "bf16" or "fp16") to nearest even; what is beyond fp16 becomes infinite. residual: (length,) float32 or None;
    where given, value minus rounded value is added at each index, so that the error is sent in a later step. Raises
    ArgumentError where indices are out of order or out of range; nothing is written then.
    """
    at, kept = _indices(indices), flat_view(values, "values")
    _same_length("values", kept, "indices", at)
    length, code = _whole(length, "length"), _wire(wire)
    if not 0 <= length < 2**32:
        raise ArgumentError(f"length = {length} is outside 0..2^32-1", next_step="encode parts of fewer elements")
    left = None if residual is None else flat_view(residual, "residual", writable=True, dtypes=(_FLOAT32,))
    if left is not None:
        if left.size != length:
            raise ArgumentError(
                f"residual has {left.size} elements, length is {length}", next_step="pass the whole shard's"
            )
        _apart("residual", left, "values", kept)
        _apart("residual", left, "indices", at)
    buffer = np.empty(_kernels.encoded_size(length, at.size, code), np.uint8)
    bad = _kernels.encode(
        at, _bytes(kept), _CODES[kept.dtype], length, code, None if left is None else _bytes(left), buffer
    )
    if bad < at.size:
        raise ArgumentError(
            f"indices[{bad}] = {at[bad]} is out of order or not below length = {length}",
            cause="indices that are not ascending and distinct, or a wrong length",
            next_step="pass the indices as topk or compress_ returned them",
        )
    buffer[_CHECKSUM] = _checksum(buffer)
    return buffer


def decode(buffer: Any, *, length: int | None = None) -> tuple[Array, Array]:
    """The (indices, values) of an encoded shard: (k,) uint32 ascending, (k,) float32. Values are exactly those on the
    wire.

    buffer: bytes, or a uint8 array. Raises WireError where it is truncated, damaged, foreign, or for another `length`.
    """
    raw, (_, entries) = _checked(buffer, length)
    indices, values = np.empty(entries, np.uint32), np.empty(entries, np.float32)
    _kernels.decode(raw, indices, _bytes(values))
    return indices, values


def decode_add_(dense: Any, buffer: Any, scale: float = 1.0) -> bool:
    """dense[indices] += values * scale of an encoded shard, without arrays in between; returns whether all values
    were finite.

    dense: (length,) float32, bfloat16 or float16. Raises WireError as `decode` does, also where the shard's length is
    not dense's; nothing is written then.
    """
    to = flat_view(dense, "dense", writable=True)
    raw, _ = _checked(buffer, to.size)
    _apart("dense", to, "buffer", raw)
    return bool(_kernels.decode_add(raw, _bytes(to), _CODES[to.dtype], scale))


def _wire(wire: str) -> int:
    if wire not in _WIRES:
        raise ArgumentError(f"wire = {wire!r} is unknown", next_step=f"choose one of {', '.join(_WIRES)}")
    return _WIRES[wire]


def _indices(indices: object) -> Array:
    view = flat_view(indices, "indices", dtypes=_INDEX_DTYPES)
    if view.dtype == np.uint32:
        return view
    if view.size and (view.min() < 0 or view.max() >= 2**32):
        raise ArgumentError("indices hold numbers outside 0..2^32-1", next_step="pass indices as topk returns them")
    return view.astype(np.uint32)


def _checksum(buffer: Array) -> Array:
    state = xxhash.xxh3_64(buffer[: _CHECKSUM.start].data)
    state.update(buffer[_CHECKSUM.stop :].data)
    return np.frombuffer(state.intdigest().to_bytes(8, "little"), np.uint8)


def _checked(buffer: Any, length: int | None) -> tuple[Array, tuple[int, int]]:
    """The buffer as a uint8 view, its length and its number of entries, once nothing is wrong with it."""
    raw = (
        np.frombuffer(buffer, np.uint8)
        if isinstance(buffer, (bytes, bytearray, memoryview))
        else flat_view(buffer, "buffer", dtypes=(_UINT8,))
    )
    fault, declared, entries, _ = _kernels.check_wire(raw)
    what = _FAULTS[fault]
    if not what and not np.array_equal(raw[_CHECKSUM], _checksum(raw)):
        what = "its checksum does not match: bytes changed on the way"
    if what:
        raise WireError(
            f"the buffer of {raw.size} bytes cannot be decoded: {what}",
            cause="a truncated or damaged message, or one of another program",
            next_step="check that sender and receiver run the same version and post the same sizes",
        )
    if length is not None and declared != length:
        raise WireError(
            f"the buffer holds a shard of {declared} elements, {length} were expected",
            cause="ranks that cut their arrays differently",
            next_step="pass arrays of equal length on all ranks",
        )
    return raw, (declared, entries)
