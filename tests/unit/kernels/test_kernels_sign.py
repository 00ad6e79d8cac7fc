"""The sign kernels against NumPy, on every path: bits, scales, what is left, and sums of many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError

BLOCK = kernels.SIGN_BLOCK
EVERY_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def compute_mean_magnitude(block: Any) -> Any:
    """Return the mean |x| of a block: element i goes into running sum i % 16, then halves are added to halves."""
    sums = np.zeros(16, np.float32)
    for start in range(0, len(block), 16):
        part = np.abs(block[start : start + 16])
        sums[: len(part)] += part
    for half in (8, 4, 2, 1):
        sums[:half] += sums[half : 2 * half]
    return sums[0] / np.float32(len(block))


def pack_by_definition(x: Any) -> tuple[Any, Any, Any]:
    """Return the reference: (scales, bits, remainder)."""
    blocks = [x[start : start + BLOCK] for start in range(0, len(x), BLOCK)]
    scales = np.array([compute_mean_magnitude(block) for block in blocks], np.float32).astype(ml_dtypes.bfloat16)
    bits = np.packbits(np.signbit(x), bitorder="little")
    return scales.view(np.uint16), bits, x - unpack_by_definition(scales.view(np.uint16), bits, len(x))


def unpack_by_definition(scales: Any, bits: Any, length: int, weight: float = 1.0) -> Any:
    weighted = scales.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(weight)
    negative = np.unpackbits(bits, bitorder="little")[:length].astype(bool)
    each = np.repeat(weighted, BLOCK)[:length]
    return np.where(negative, -each, each)


@st.composite
def draw_floats(draw: Any) -> Any:
    """Draw normal values of very different sizes, with denormals and zeros of both signs among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(0, 800))
    exponents = rng.integers(draw(st.sampled_from([-149, -20])), 100, length)
    x = np.ldexp(rng.standard_normal(length), exponents).astype(np.float32)
    x[rng.random(length) < 0.1] = -0.0
    return x


@EVERY_PATH
@given(draw_floats())
def test_packing_equals_numpy_bit_for_bit(x: Any) -> None:
    scales, bits, left = pack_by_definition(x)
    own = x.copy()
    got_scales, got_bits, finite = kernels.sign_pack_(own)
    assert finite
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_bits, bits)
    np.testing.assert_array_equal(own.view(np.uint32), left.view(np.uint32))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 63, 255, 256, 257, 511, 512, 1000, 100_003])
@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 8])
def test_unpacking_adds_all_nodes_in_their_order(length: int, nodes: int) -> None:
    rng = np.random.default_rng(length + nodes)
    weights = rng.random(nodes).astype(np.float32).tolist()
    parts = []
    total = np.zeros(length, np.float32)
    for weight in weights:
        scales, bits, finite = kernels.sign_pack_(rng.standard_normal(length, dtype=np.float32))
        assert finite
        parts.append((scales, bits))
        total += unpack_by_definition(scales, bits, length, weight)
    out = rng.standard_normal(length, dtype=np.float32)
    expected = out + total
    assert kernels.sign_unpack_add_(out, parts, weights) is out
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@EVERY_PATH
@given(draw_floats())
def test_sent_values_and_remainders_add_up_to_the_input(x: Any) -> None:
    left = x.copy()
    scales, bits, _ = kernels.sign_pack_(left)
    whole = kernels.sign_unpack_add_(left.copy(), [(scales, bits)], [1.0])
    largest = np.abs(x).max(initial=0)
    np.testing.assert_allclose(whole, x, rtol=0, atol=float(largest) * 2.0**-22)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
def test_a_block_that_is_not_finite_shows_in_its_scale(bad: float, place: int) -> None:
    x = np.ones(700, np.float32)
    assert kernels.sign_pack_(x.copy())[2]
    x[place] = bad
    scales, _, finite = kernels.sign_pack_(x)
    assert not finite
    shown = ~np.isfinite(scales.view(ml_dtypes.bfloat16).astype(np.float32))
    assert shown.tolist() == [block == place // BLOCK for block in range(3)]


def test_outputs_can_be_passed_and_tensors_too() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(1000)
    expected = pack_by_definition(x.numpy().copy())
    scales, bits = np.empty(4, np.uint16), np.empty(125, np.uint8)
    packed = kernels.sign_pack_(x, scales, bits)
    assert packed[0] is scales
    assert packed[1] is bits
    for own, wanted in zip((scales, bits, x.numpy()), expected, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_wrong_lengths_and_overlap_are_refused_before_anything_is_written() -> None:
    x = np.ones(512, np.float32)
    scales, bits = np.zeros(2, np.uint16), np.zeros(64, np.uint8)
    for call in (
        lambda: kernels.sign_pack_(x, scales[:1], bits),
        lambda: kernels.sign_pack_(x, scales, bits[:-1]),
        lambda: kernels.sign_pack_(x, x.view(np.uint16)[:2], bits),
        lambda: kernels.sign_pack_(x.astype(np.float64), scales, bits),
        lambda: kernels.sign_unpack_add_(x, [(scales, bits)], []),
        lambda: kernels.sign_unpack_add_(x, [(scales, bits[:-1])], [1.0]),
        lambda: kernels.sign_unpack_add_(x, [(scales, x.view(np.uint8)[:64])], [1.0]),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert (x == 1).all()
