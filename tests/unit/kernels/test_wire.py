"""The wire format: a round trip returns the same entries, and damaged or foreign bytes are refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import choose

from topkube import kernels
from topkube.errors import ArgumentError, WireError

WIRES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def draw_shard(length: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(length, k, replace=False)).astype(np.uint32)
    return indices, rng.standard_normal(k).astype(np.float32)


@settings(max_examples=80)
@given(st.integers(1, 300_000), st.floats(0, 1), st.sampled_from(sorted(WIRES)), st.integers(0, 9))
def test_a_round_trip_returns_the_entries_and_the_rounding_error_goes_to_the_residual(
    length: int, share: float, wire: str, seed: int
) -> None:
    indices, values = draw_shard(length, int(share * length), seed)
    residual = np.zeros(length, np.float32)
    buffer = kernels.encode(indices, values, length, wire=wire, residual=residual)
    assert buffer.size == kernels.encoded_size(length, indices.size, wire)
    out_indices, out_values = kernels.decode(buffer.tobytes(), length=length)
    np.testing.assert_array_equal(out_indices, indices)
    np.testing.assert_array_equal(out_values, values.astype(WIRES[wire]).astype(np.float32))
    np.testing.assert_array_equal(residual[indices], values - out_values)
    assert np.count_nonzero(residual) == np.count_nonzero(values - out_values)

    dense = np.ones(length, np.float32)
    expected = dense.copy()
    expected[indices] += out_values * np.float32(0.5)
    assert kernels.decode_add_(dense, buffer, 0.5)
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize("wire", sorted(WIRES))
@pytest.mark.parametrize("dtype", list(WIRES.values()))
def test_values_of_every_dtype_are_encoded(wire: str, dtype: Any) -> None:
    indices, values = draw_shard(70_000, 900)
    values = values.astype(dtype)
    decoded = kernels.decode(kernels.encode(indices, values, 70_000, wire=wire))[1]
    np.testing.assert_array_equal(decoded, values.astype(np.float32).astype(WIRES[wire]).astype(np.float32))


def test_an_entry_with_a_16_bit_value_takes_four_bytes() -> None:
    length, k = 25_557_032, 255_571
    assert kernels.encoded_size(length, k, "bf16") / k < 4.02


def test_decode_add_returns_true_if_values_were_finite() -> None:
    for value, wire in ((np.nan, "fp32"), (np.inf, "bf16"), (1e6, "fp16")):
        buffer = kernels.encode(np.array([3], np.uint32), np.array([value], np.float32), 10, wire=wire)
        assert not kernels.decode_add_(np.zeros(10, np.float32), buffer)


@settings(max_examples=choose(120, thorough=300))
@given(st.data())
def test_a_changed_buffer_is_refused(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 140_000))
    indices, values = draw_shard(length, data.draw(st.integers(0, min(length, 40))))
    buffer = kernels.encode(indices, values, length, wire=data.draw(st.sampled_from(sorted(WIRES))))
    kind = data.draw(st.sampled_from(["bit", "cut", "longer", "swap"]))
    if kind == "bit":
        changed = buffer.copy()
        position = data.draw(st.integers(0, buffer.size * 8 - 1))
        changed[position // 8] ^= 1 << position % 8
    elif kind == "cut":
        changed = buffer[: data.draw(st.integers(0, buffer.size - 1))]
    elif kind == "longer":
        changed = np.concatenate([buffer, np.zeros(data.draw(st.integers(1, 70)), np.uint8)])
    else:
        changed = np.roll(buffer, data.draw(st.integers(1, buffer.size - 1)))
        if np.array_equal(changed, buffer):
            return
    dense = np.zeros(length, np.float32)
    with pytest.raises(WireError):
        kernels.decode(changed)
    with pytest.raises(WireError):
        kernels.decode_add_(dense, changed)
    assert not dense.any()


@settings(max_examples=choose(120, thorough=300))
@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_are_refused(noise: bytes, has_magic: bool) -> None:
    with pytest.raises(WireError):
        kernels.decode(b"TKW1\x01\x00\x00\x00" + noise if has_magic else noise)


@settings(max_examples=choose(120, thorough=300))
@given(st.data())
def test_a_buffer_with_wrong_fields_and_a_correct_checksum_cannot_write_out_of_bounds(data: st.DataObject) -> None:
    """Any field may be wrong. An accepted buffer decodes to ascending indices within the length."""
    indices, values = draw_shard(200_000, 30)
    buffer = kernels.encode(indices, values, 200_000, wire="bf16")
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, buffer.size - 1))
        buffer[position] = data.draw(st.integers(0, 255))
    buffer[16:24] = kernels.wire._compute_checksum(buffer)
    try:
        out_indices, _ = kernels.decode(buffer)
    except WireError:
        return
    length = int.from_bytes(buffer[8:12].tobytes(), "little")
    assert (np.diff(out_indices.astype(np.int64)) > 0).all()
    assert out_indices.size == 0 or out_indices[-1] < length
    dense = np.zeros(length, np.float32)
    kernels.decode_add_(dense, buffer)


MEMORY = np.zeros(100, np.float32)


def view_row(memory: Any) -> Any:
    """Return room for three of 100 entries at the start of `memory`."""
    return memory.view(np.uint8)[: kernels.encoded_size(100, 3)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i, v: kernels.encode(i[::-1].copy(), v, 100), "out of order"),
        (lambda i, v: kernels.encode(i, v, 9), "not below length"),
        (lambda i, v: kernels.encode(np.array([1, 1, 2], np.uint32), v, 9), "out of order"),
        (lambda i, v: kernels.encode(i, v[:2], 100), "values has 2"),
        (lambda i, v: kernels.encode(i, v, 100, wire="fp8"), "fp8"),
        (lambda i, v: kernels.encode(i, v, 2**32), "length"),
        (lambda i, v: kernels.encode(i, v, 100, residual=np.zeros(99, np.float32)), "residual has 99"),
        (lambda i, v: kernels.encode(i, v, 3, residual=v), "overlap"),
        (lambda i, v: kernels.encode(i, MEMORY[:3], 100, out=view_row(MEMORY)), "values and out overlap"),
        (
            lambda i, v: kernels.encode(MEMORY.view(np.uint32)[:3], v, 100, out=view_row(MEMORY)),
            "indices and out overlap",
        ),
        (lambda i, v: kernels.encode(i, v, 100, residual=MEMORY, out=view_row(MEMORY)), "residual and out overlap"),
    ],
)
def test_unusable_shards_are_not_encoded(call: Any, message: str) -> None:
    indices, values = np.array([1, 5, 90], np.uint32), np.ones(3, np.float32)
    with pytest.raises(ArgumentError, match=message):
        call(indices, values)


def test_a_shard_of_another_length_is_refused() -> None:
    buffer = kernels.encode(np.array([1], np.uint32), np.ones(1, np.float32), 100)
    with pytest.raises(WireError, match="100 elements, 50 were expected"):
        kernels.decode(buffer, length=50)
    with pytest.raises(WireError, match="100 elements"):
        kernels.decode_add_(np.zeros(50, np.float32), buffer)
