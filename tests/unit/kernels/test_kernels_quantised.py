"""The kernels of integers with 4 or 8 bits against NumPy, on every path: messages, remainders, and sums of many
nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_definition import BLOCK, LEVELS, draw_floats, pack_integers_by_definition

from topkube import kernels
from topkube.errors import ArgumentError

EVERY_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


@EVERY_PATH
@given(draw_floats(), st.sampled_from([4, 8]))
def test_packing_equals_numpy_bit_for_bit(x: Any, bits: int) -> None:
    expected, sent = pack_integers_by_definition(x, bits) if len(x) else (np.zeros(0, np.uint8), x)
    own, message = x.copy(), np.full(kernels.quantised_bytes(len(x), bits), 7, np.uint8)
    assert kernels.quantised_pack_(own, bits, message)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_array_equal(own, x - sent)


@EVERY_PATH
@given(draw_floats(), st.sampled_from([4, 8]))
def test_sent_values_and_remainders_add_up_to_the_input(x: Any, bits: int) -> None:
    left, message = x.copy(), np.zeros(kernels.quantised_bytes(len(x), bits), np.uint8)
    kernels.quantised_pack_(left, bits, message)
    largest = np.abs(x).max(initial=0)
    assert np.abs(left).max(initial=0) <= max(0.51 * largest / LEVELS[bits] * 1.01, 2.0**-119)
    whole = kernels.quantised_unpack_add_(left.copy(), bits, [message], [1.0])
    np.testing.assert_allclose(whole, x, rtol=0, atol=float(largest) * 2.0**-22)


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
        scales = np.repeat(message[: 2 * -(-length // BLOCK)].view(np.uint16).astype(np.uint32) << 16, BLOCK)[:length]
        scales = scales.view(np.float32)
        total += np.rint(sent / scales) * (scales * np.float32(weight))
    out = rng.standard_normal(length, dtype=np.float32)
    expected = out + total
    assert kernels.quantised_unpack_add_(out, bits, messages, weights) is out
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_that_is_not_finite_arrives_as_nan(bad: float, place: int, bits: int) -> None:
    x, message = np.ones(700, np.float32), np.zeros(kernels.quantised_bytes(700, bits), np.uint8)
    assert kernels.quantised_pack_(x.copy(), bits, message)
    x[place] = bad
    assert not kernels.quantised_pack_(x, bits, message)
    arrived = kernels.quantised_unpack_add_(np.zeros(700, np.float32), bits, [message], [1.0])
    assert [bool(np.isnan(arrived[i : i + BLOCK]).all()) for i in (0, 256, 512)] == [
        block == place // BLOCK for block in range(3)
    ]
    assert np.isnan(arrived).sum() in (256, 188)


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    x = np.ones(512, np.float32)
    message = np.zeros(kernels.quantised_bytes(512, 8), np.uint8)
    for call in (
        lambda: kernels.quantised_bytes(512, 5),
        lambda: kernels.quantised_bytes(-1, 8),
        lambda: kernels.quantised_pack_(x, 6, message),
        lambda: kernels.quantised_pack_(x, 8, message[:-1]),
        lambda: kernels.quantised_pack_(x, 4, message),
        lambda: kernels.quantised_pack_(x.astype(np.float64), 8, message),
        lambda: kernels.quantised_pack_(x, 8, x.view(np.uint8)[: len(message)]),
        lambda: kernels.quantised_unpack_add_(x, 8, [message], []),
        lambda: kernels.quantised_unpack_add_(x, 8, [message[:-8]], [1.0]),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert (x == 1).all()
    assert not message.any()
