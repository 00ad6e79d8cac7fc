"""The kernels for 3, 4 and 8 bits per element give the same results as NumPy, with every set of vector
instructions. The tests compare messages, remainders, and sums over many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_definition import (
    BLOCK,
    draw_floats,
    pack_integers_by_definition,
    weigh_integers,
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
@given(draw_floats(), st.sampled_from(kernels.QUANTISED_BITS))
def test_packing_equals_numpy_bit_for_bit(x: Any, bits: int) -> None:
    expected, sent = pack_integers_by_definition(x, bits)
    remainder = x.copy()
    message = np.full(kernels.quantised_bytes(len(x), bits), 7, np.uint8)  # the kernel must write every byte
    assert kernels.quantised_pack_(remainder, bits, message)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_array_equal(remainder, x - sent)


@HYPOTHESIS_SETTINGS
@given(draw_floats(), st.sampled_from(kernels.QUANTISED_BITS))
def test_sent_values_and_remainders_add_up_to_the_input(x: Any, bits: int) -> None:
    remainder, message = x.copy(), np.zeros(kernels.quantised_bytes(len(x), bits), np.uint8)
    kernels.quantised_pack_(remainder, bits, message)
    largest = float(np.abs(x).max(initial=0))
    # The scale is the largest value divided by the largest level, and rounded up to bf16 by less than 1%. A remainder
    # is at most half of the distance between two levels: 1, or 13 between 36 and 49. With 3 bits, it is 6 between 8 and
    # 14, and a unit is up to sqrt(2) times as large as it need be. 1.02 leaves room for float32.
    share = {3: 3 / 16 * 2**0.5, 4: 6.5 / 49, 8: 0.5 / 127}[bits]
    # A scale below 2**-126 (with 3 bits, 2**-118) becomes 0, and nothing is sent. All values are then below 2**-114.
    assert np.abs(remainder).max(initial=0) <= max(1.02 * 1.01 * largest * share, 2.0**-114)
    whole = kernels.quantised_unpack_add_(remainder.copy(), bits, [message], [1.0])
    np.testing.assert_allclose(whole, x, rtol=0, atol=largest * 2.0**-22)  # a few roundings of float32


@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33, 255, 256, 257, 511, 1000, 100_003])
@pytest.mark.parametrize("nodes", [0, 1, 2, 5])
@pytest.mark.parametrize("bits", kernels.QUANTISED_BITS)
def test_unpacking_adds_all_nodes_in_their_order(length: int, nodes: int, bits: int) -> None:
    rng = np.random.default_rng(length + nodes)
    weights = rng.random(nodes).astype(np.float32).tolist()
    messages, total = [], np.zeros(length, np.float32)
    for weight in weights:
        x = rng.standard_normal(length, dtype=np.float32)
        message, sent = pack_integers_by_definition(x, bits)
        messages.append(message)
        total += weigh_integers(message, sent, bits, weight)
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


def test_zeros_stay_zeros_and_small_groups_have_units_of_their_own_with_3_bits() -> None:
    """The rows of an embedding that a batch does not use have zeros: they must not move. A group whose elements are
    100 times smaller than those of its block is sent as precisely as the others."""
    x = np.random.default_rng(1).standard_normal(BLOCK, dtype=np.float32)
    x[32:64] *= 0.01
    x[::3] = 0
    remainder, message = x.copy(), np.zeros(kernels.quantised_bytes(BLOCK, 3), np.uint8)
    kernels.quantised_pack_(remainder, 3, message)
    sent = kernels.quantised_unpack_add_(np.zeros(BLOCK, np.float32), 3, [message], [1.0])
    assert not sent[::3].any()
    for group in (slice(0, 32), slice(32, 64)):
        assert np.linalg.norm(remainder[group]) < 0.3 * np.linalg.norm(x[group])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
@pytest.mark.parametrize("bits", kernels.QUANTISED_BITS)
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
        lambda: kernels.quantised_bytes(512, 5),  # not 3, 4 or 8 bits
        lambda: kernels.quantised_bytes(-1, 8),  # a negative length
        lambda: kernels.quantised_pack_(x, 6, message),  # not 3, 4 or 8 bits
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
