"""The kernels for 4 and 8 bits per element give the same results as NumPy, with every set of vector instructions. The
tests compare messages, remainders, and sums over many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_definition import (
    BLOCK,
    LEVELS,
    draw_floats,
    pack_integers_by_definition,
    read_integer_scales,
)

from topkube import kernels
from topkube.errors import ArgumentError

# Hypothesis refuses a fixture that is not set up again for every example. All examples of a test may share a
# `simd_path`.
HYPOTHESIS_SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


@HYPOTHESIS_SETTINGS
@given(draw_floats(), st.sampled_from([4, 8]))
def test_packing_equals_numpy_bit_for_bit(x: Any, bits: int) -> None:
    expected, sent = pack_integers_by_definition(x, bits)
    remainder = x.copy()
    message = np.full(kernels.quantised_bytes(len(x), bits), 7, np.uint8)  # the kernel must write every byte
    assert kernels.quantised_pack_(remainder, bits, message)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_array_equal(remainder, x - sent)


@HYPOTHESIS_SETTINGS
@given(draw_floats(), st.sampled_from([4, 8]))
def test_sent_values_and_remainders_add_up_to_the_input(x: Any, bits: int) -> None:
    remainder, message = x.copy(), np.zeros(kernels.quantised_bytes(len(x), bits), np.uint8)
    kernels.quantised_pack_(remainder, bits, message)
    largest = float(np.abs(x).max(initial=0))
    # The scale is the largest value divided by the largest level, and rounded up to bf16 by less than 1%. A remainder
    # is at most half of the distance between two levels: 1, or 13 between 36 and 49. 1.02 leaves room for float32.
    largest_remainder = 1.02 * 1.01 * largest / LEVELS[bits] * (0.5 if bits == 8 else 6.5)
    # A scale below 2**-126 becomes 0, and nothing is sent. All values are then below 127 * 2**-126 < 2**-119.
    assert np.abs(remainder).max(initial=0) <= max(largest_remainder, 2.0**-119)
    whole = kernels.quantised_unpack_add_(remainder.copy(), bits, [message], [1.0])
    np.testing.assert_allclose(whole, x, rtol=0, atol=largest * 2.0**-22)  # a few roundings of float32


@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33, 255, 256, 257, 511, 1000, 100_003])
@pytest.mark.parametrize("nodes", [0, 1, 2, 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_adds_all_nodes_in_their_order(length: int, nodes: int, bits: int) -> None:
    rng = np.random.default_rng(length + nodes)
    weights = rng.random(nodes).astype(np.float32).tolist()
    messages, total = [], np.zeros(length, np.float32)
    for weight in weights:
        x = rng.standard_normal(length, dtype=np.float32)
        message, sent = pack_integers_by_definition(x, bits)
        messages.append(message)
        scales = read_integer_scales(message, length)
        total += np.rint(sent / scales) * (scales * np.float32(weight))  # the kernel multiplies scale and weight first
    out = rng.standard_normal(length, dtype=np.float32)
    expected = out + total
    assert kernels.quantised_unpack_add_(out, bits, messages, weights) is out
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    replaced = np.full(length, np.nan, np.float32)
    assert kernels.quantised_unpack_add_(replaced, bits, messages, weights, replaces=True) is replaced
    np.testing.assert_array_equal(replaced.view(np.uint32), (np.zeros_like(total) + total).view(np.uint32))


def test_small_elements_of_a_block_lose_little_with_4_bits() -> None:
    # Evenly spaced values, 1/7 of the largest apart, would send nothing of these. Adam divides by such gradients.
    x = np.full(BLOCK, 0.05, np.float32)
    x[0] = 1.0
    kernels.quantised_pack_(x, 4, np.zeros(kernels.quantised_bytes(BLOCK, 4), np.uint8))
    assert np.abs(x[1:]).max() < 0.04


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_that_is_not_finite_arrives_as_nan(bad: float, place: int, bits: int) -> None:
    length = 700  # blocks of 256, 256 and 188 elements
    x, message = np.ones(length, np.float32), np.zeros(kernels.quantised_bytes(length, bits), np.uint8)
    assert kernels.quantised_pack_(x.copy(), bits, message)
    x[place] = bad
    assert not kernels.quantised_pack_(x, bits, message)
    arrived = kernels.quantised_unpack_add_(np.zeros(length, np.float32), bits, [message], [1.0])
    start = place // BLOCK * BLOCK
    assert np.isnan(arrived[start : start + BLOCK]).all()
    assert np.isnan(arrived).sum() == min(BLOCK, length - start)  # no element of another block


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    x = np.ones(512, np.float32)
    message = np.zeros(kernels.quantised_bytes(512, 8), np.uint8)
    for call in (
        lambda: kernels.quantised_bytes(512, 5),  # neither 4 nor 8 bits
        lambda: kernels.quantised_bytes(-1, 8),  # a negative length
        lambda: kernels.quantised_pack_(x, 6, message),  # neither 4 nor 8 bits
        lambda: kernels.quantised_pack_(x, 8, message[:-1]),  # too short
        lambda: kernels.quantised_pack_(x, 4, message),  # too long
        lambda: kernels.quantised_pack_(x.astype(np.float64), 8, message),  # not float32
        lambda: kernels.quantised_pack_(x, 8, x.view(np.uint8)[: len(message)]),  # overlaps x
        lambda: kernels.quantised_unpack_add_(x, 8, [message], []),  # no weight for the message
        lambda: kernels.quantised_unpack_add_(x, 8, [message[:-8]], [1.0]),  # too short
    ):
        with pytest.raises(ArgumentError):
            call()
    assert (x == 1).all()
    assert not message.any()
