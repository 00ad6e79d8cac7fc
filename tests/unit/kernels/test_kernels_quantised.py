"""The kernels of integers with 4 or 8 bits against NumPy, on every path: messages, what is left, sums of many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError

BLOCK = kernels.QUANTISED_BLOCK
LEVELS = {4: 7, 8: 127}
EVERY_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def pack_by_definition(x: Any, bits: int) -> tuple[Any, Any]:
    """Return the reference: (message, sent values)."""
    scales, codes, sent = [], [], np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        step = np.abs(block).max() / np.float32(LEVELS[bits])
        rounded_up = (step.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        if rounded_up < np.uint32(0x00800000):
            rounded_up = np.uint32(0)
        scale = rounded_up.view(np.float32)
        integers = np.rint(block * (np.float32(1) / scale)) if scale else np.zeros_like(block)
        scales.append(int(rounded_up) >> 16)
        sent[start : start + BLOCK] = integers * scale
        own = integers.astype(np.int8).view(np.uint8)
        if bits == 4:
            pairs = np.pad(own, (0, -len(own) % 32)).reshape(-1, 2, 16)
            own = ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).ravel()
        codes.append(own)
    message = np.concatenate([np.array(scales, np.uint16).view(np.uint8), *codes])
    return np.pad(message, (0, -len(message) % 8)), sent


@st.composite
def draw_floats(draw: Any) -> Any:
    """Draw normal values of very different sizes, with denormals and zeros of both signs among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(0, 800))
    exponents = rng.integers(draw(st.sampled_from([-149, -20])), 100, length)
    x = np.ldexp(rng.standard_normal(length), exponents).astype(np.float32)
    x[rng.random(length) < 0.1] = -0.0
    if draw(st.booleans()):  # whole blocks of denormals, and of zeros
        x[:BLOCK] = np.ldexp(rng.standard_normal(len(x[:BLOCK])), draw(st.integers(-149, -120))).astype(np.float32)
        x[BLOCK : 2 * BLOCK] = 0
    return x


@EVERY_PATH
@given(draw_floats(), st.sampled_from([4, 8]))
def test_packing_equals_numpy_bit_for_bit(x: Any, bits: int) -> None:
    expected, sent = pack_by_definition(x, bits) if len(x) else (np.zeros(0, np.uint8), x)
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
        message, sent = pack_by_definition(x, bits)
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
