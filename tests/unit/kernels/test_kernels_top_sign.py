"""The kernels that send the largest elements with one bit each, compared with their format in NumPy: on every path, for
any indices, and for damaged messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError, WireError

# Hypothesis refuses a fixture that is not set up again for every example. All examples of a test may share a
# `simd_path`.
HYPOTHESIS_SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def pad(octets: Any) -> Any:
    """Return `octets` with zeros up to a multiple of 8."""
    return np.pad(octets, (0, -len(octets) % 8))


def encode_indices(indices: Any, length: int) -> Any:
    """Return the code of ascending indices below `length`: planes of their low bits, then the high bits in unary."""
    count, indices = len(indices), np.asarray(indices)
    low = (length // count).bit_length() - 1
    planes = [np.packbits((indices >> plane & 1).astype(bool)) for plane in range(low)]
    unary = np.zeros((length - 1 >> low) + count, bool)
    unary[(indices >> low) + np.arange(count)] = True
    return pad(np.concatenate([*planes, np.packbits(unary)]))


def build_message(x: Any, count: int) -> tuple[Any, Any]:
    """Return the reference: (message, remainder of x)."""
    indices, values = kernels.topk(x, count)
    scales, bits, _ = kernels.sign_pack_(values)  # leaves the remainders in `values`
    left = x.copy()
    left[indices] = values
    return np.concatenate([pad(np.concatenate([scales.view(np.uint8), bits])), encode_indices(indices, len(x))]), left


@HYPOTHESIS_SETTINGS
@given(st.integers(1, 4000), st.floats(0, 1), st.integers(0, 2**32))
def test_a_message_equals_its_format_bit_for_bit(length: int, share: float, seed: int) -> None:
    count = max(1, round(share * length))
    x = np.random.default_rng(seed).standard_t(2, length).astype(np.float32)
    expected, left = build_message(x, count)
    message = np.full(kernels.top_sign_bytes(length, count), 255, np.uint8)
    assert kernels.top_sign_pack_(x, count, message)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_array_equal(x.view(np.uint32), left.view(np.uint32))


SHAPES = {
    "normal": lambda rng, length: rng.standard_normal(length),
    "heavy tails": lambda rng, length: rng.standard_cauchy(length) ** 3,
    "sorted": lambda rng, length: np.sort(rng.standard_normal(length)),
    "few distinct values": lambda rng, length: rng.integers(-3, 4, length),
    "one value": lambda rng, length: np.where(rng.random(length) < 0.5, -2.5, 2.5),
    "mostly zeros": lambda rng, length: np.where(rng.random(length) < 0.05, rng.standard_normal(length), 0.0),
    "many ties at the threshold": lambda rng, length: np.round(rng.standard_normal(length), 1),
    "large only at the end": lambda rng, length: np.linspace(0, 1, length) ** 9,
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("length", "share"), [(16_385, 0.1), (150_001, 0.1), (150_001, 0.0003), (150_001, 0.6)])
def test_a_message_of_a_large_array_has_the_largest_elements(shape: str, length: int, share: float) -> None:
    # Above 16,384 elements the threshold comes from a sample. `kernels.topk` finds the same elements in another way.
    with np.errstate(over="ignore"):
        x = np.asarray(SHAPES[shape](np.random.default_rng(length), length), np.float32)
    count = round(share * length)
    expected, left = build_message(x, count)
    message = np.full(kernels.top_sign_bytes(length, count), 255, np.uint8)
    is_finite = kernels.top_sign_pack_(x, count, message)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_array_equal(x.view(np.uint32), left.view(np.uint32))
    assert is_finite == bool(np.isfinite(left).all())


@HYPOTHESIS_SETTINGS
@given(st.integers(1, 4000), st.floats(0, 1), st.integers(0, 2**32))
def test_any_indices_survive_and_their_signs_are_added(length: int, share: float, seed: int) -> None:
    count, rng = max(1, round(share * length)), np.random.default_rng(seed)
    any_indices = np.sort(rng.choice(length, count, replace=False))
    for indices in (any_indices, np.arange(count), np.arange(length - count, length)):  # also the extremes
        x = np.zeros(length, np.float32)
        x[indices] = rng.choice([-1.0, 1.0], count)
        message = np.zeros(kernels.top_sign_bytes(length, count), np.uint8)
        kernels.top_sign_pack_(x.copy(), count, message)
        out = rng.standard_normal(length, dtype=np.float32)
        expected = out.copy()
        expected[indices] += x[indices] * np.float32(0.3)  # the others are not touched: -0.0 stays -0.0
        assert kernels.top_sign_unpack_add_(out, count, message, 0.3) is out
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@HYPOTHESIS_SETTINGS
@given(st.binary(min_size=1), st.integers(0, 2**32))
def test_a_damaged_message_is_refused_or_has_valid_indices(noise: bytes, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(1000, dtype=np.float32)
    message = np.zeros(kernels.top_sign_bytes(1000, 100), np.uint8)
    kernels.top_sign_pack_(x, 100, message)
    first = 2 + 13 + 1 + seed % (message.size - 16)  # behind the scale and the signs
    part = message[first : first + len(noise)]
    part ^= np.frombuffer(noise, np.uint8)[: part.size]
    message[:2] = np.array([0x3F80], np.uint16).view(np.uint8)  # the scale is 1
    out = np.zeros(1000, np.float32)
    try:
        kernels.top_sign_unpack_add_(out, 100, message, 1.0)
    except WireError:
        assert not out.any()
        return
    assert (np.abs(out[out != 0]) == 1).all()
    assert np.count_nonzero(out) == 100


@pytest.mark.parametrize(
    ("indices", "length", "problem"),
    [
        ([3, 3], 8, "twice the same index"),
        ([3, 2], 8, "indices that descend"),
        ([1, 9], 8, "an index beyond the end"),
    ],
)
def test_wrong_indices_are_refused_before_anything_is_written(indices: list[int], length: int, problem: str) -> None:
    out = np.zeros(length, np.float32)
    message = np.zeros(kernels.top_sign_bytes(length, 2), np.uint8)
    code = encode_indices(indices, 10)
    message[8 : 8 + code.size] = code
    message[:2] = 255
    with pytest.raises(WireError, match="2 indices below 8"):
        kernels.top_sign_unpack_add_(out, 2, message, 1.0)
    assert not out.any(), problem


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_reported(value: float) -> None:
    x = np.ones(1000, np.float32)
    message = np.zeros(kernels.top_sign_bytes(1000, 10), np.uint8)
    assert kernels.top_sign_pack_(x, 10, message)
    x[777] = value
    assert not kernels.top_sign_pack_(x, 10, message)


def test_wrong_lengths_and_overlap_are_refused_before_anything_is_written() -> None:
    x = np.ones(512, np.float32)
    message = np.zeros(kernels.top_sign_bytes(512, 10), np.uint8)
    for call in (
        lambda: kernels.top_sign_pack_(x, 0, message),
        lambda: kernels.top_sign_pack_(x, 513, message),
        lambda: kernels.top_sign_pack_(x, 300, message),
        lambda: kernels.top_sign_pack_(x.astype(np.float64), 10, message),
        lambda: kernels.top_sign_pack_(x, 10, x.view(np.uint8)[: message.size]),
        lambda: kernels.top_sign_unpack_add_(x, 10, message[:-8], 1.0),
        lambda: kernels.top_sign_unpack_add_(x, 10, x.view(np.uint8)[: message.size], 1.0),
        lambda: kernels.top_sign_bytes(10, 11),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert (x == 1).all()
