"""The sign kernels against NumPy, on every path: bits, scales, remainders, and sums of many nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from packing_definition import BLOCK, build_ties, draw_floats, pack_signs_by_definition, unpack_signs_by_definition

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
@given(draw_floats())
def test_packing_equals_numpy_bit_for_bit(x: Any) -> None:
    scales, bits, left = pack_signs_by_definition(x)
    own = x.copy()
    got_scales, got_bits, finite = kernels.sign_pack_(own)
    assert finite
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_bits, bits)
    np.testing.assert_array_equal(own.view(np.uint32), left.view(np.uint32))


def test_the_elements_of_a_block_are_summed_in_the_order_of_the_definition() -> None:
    x = build_ties(600)
    scales, _, left = pack_signs_by_definition(x)
    assert len(set(scales.tolist())) == 2
    got_scales, _, _ = kernels.sign_pack_(x)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(x, left)


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
        total += unpack_signs_by_definition(scales, bits, length, weight)
    out = rng.standard_normal(length, dtype=np.float32)
    expected = out + total
    assert kernels.sign_unpack_add_(out, parts, weights) is out
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@HYPOTHESIS_SETTINGS
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
    expected = pack_signs_by_definition(x.numpy().copy())
    scales, bits = np.empty(4, np.uint16), np.empty(125, np.uint8)
    packed = kernels.sign_pack_(x, scales, bits)
    assert packed[0] is scales
    assert packed[1] is bits
    for own, expected_part in zip((scales, bits, x.numpy()), expected, strict=True):
        np.testing.assert_array_equal(own, expected_part)


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


@pytest.mark.parametrize("lengths", [[1], [0, 700, 0], [256, 1, 5000, 255], [300] * 40])
@pytest.mark.parametrize("bad", [None, np.nan])
def test_many_tensors_are_packed_and_added_as_one_after_another(lengths: list[int], bad: float | None) -> None:
    rng = np.random.default_rng(sum(lengths))
    tensors = [rng.standard_normal(length, dtype=np.float32) for length in lengths]
    bases = [rng.standard_normal(length, dtype=np.float32) for length in lengths]
    if bad is not None:
        tensors[-2 if len(lengths) == 3 else -1][-1] = bad
    before = [tensor.copy() for tensor in tensors]
    starts = np.cumsum([0, *lengths]).tolist()
    layout = kernels.SignLayout([slice(a, b) for a, b in itertools.pairwise(starts)])
    expected = np.zeros(layout.message_bytes, np.uint8)
    differences = np.concatenate([a - b for a, b in zip(tensors, bases, strict=True)])
    is_finite = kernels.pack_parts_(differences, expected, layout)
    message = np.zeros_like(expected)
    assert kernels.sign_pack_differences(tensors, bases, message) == is_finite == (bad is None)
    assert message.tobytes() == expected.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(tensors, before, strict=True))
    sums = np.concatenate(tensors)
    kernels.unpack_add_parts_(sums, [message, message], [0.3, -1.0], layout)
    kernels.sign_unpack_add_tensors_(tensors, [message, message], [0.3, -1.0])
    assert np.concatenate(tensors).tobytes() == sums.tobytes()


def test_tensors_that_do_not_fit_their_message_are_refused_before_anything_is_written() -> None:
    x, message = np.ones(512, np.float32), np.zeros(68, np.uint8)  # 2 blocks need 4 + 64 bytes, rounded up to 72
    for error, call in [
        (ValueError, lambda: kernels.sign_pack_differences([x], [x], message)),
        (ValueError, lambda: kernels.sign_pack_differences([x], [x[:1]], np.zeros(72, np.uint8))),
        (ValueError, lambda: kernels.sign_unpack_add_tensors_([x[:100], x], [np.zeros(72, np.uint8)], [1.0])),
        (ValueError, lambda: kernels.sign_unpack_add_tensors_([x], [np.zeros(72, np.uint8)], [1.0, 1.0])),
        (TypeError, lambda: kernels.sign_unpack_add_tensors_([x.astype(np.float64)], [np.zeros(72, np.uint8)], [1.0])),
        (TypeError, lambda: kernels.sign_unpack_add_tensors_([x[::2]], [np.zeros(72, np.uint8)], [1.0])),
    ]:
        with pytest.raises(error):
            call()
    assert (x == 1).all()
    assert not message.any()
