"""Dense kernels: fixed-order sums, conversions and scatter-add, on every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from topkube import kernels
from topkube.errors import ArgumentError

BF16 = ml_dtypes.bfloat16
DTYPES = (np.float32, BF16, np.float16)


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def assert_same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_every_16_bit_number_widens_and_rounds_as_in_ieee_754(dtype: Any) -> None:
    all_numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = kernels.cast_(np.empty(2**16, np.float32), all_numbers)
    numbers = ~np.isnan(all_numbers.astype(np.float32))
    assert_same_bits(wide[numbers], all_numbers.astype(np.float32)[numbers])
    assert np.isnan(wide[~numbers]).all()
    # Floats near every 16-bit number, floats of any bits, and floats half-way between two 16-bit numbers.
    near = (wide[numbers].view(np.uint32)[:, None] + np.arange(-2, 3, dtype=np.int64) * 0x0FFF).astype(np.uint32)
    any_numbers = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000
    ties16 = (np.arange(2**19, dtype=np.uint32) << 13) + 0x1000
    floats = np.concatenate([near.ravel(), any_numbers, ties, ties16]).view(np.float32)
    rounded = kernels.cast_(np.empty(floats.size, dtype), floats)
    numbers = ~np.isnan(floats)
    with np.errstate(all="ignore"):
        assert_same_bits(rounded[numbers], floats.astype(dtype)[numbers])
    assert np.isnan(rounded[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 2048, 5001])
def test_sums_keep_their_order_and_round_once(dtype: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    inputs = [rng.standard_normal(length).astype(dtype) for _ in range(4)]
    for count in (1, 2, 3, 4):
        expected = inputs[0].astype(np.float32)
        for x in inputs[1:count]:
            expected = expected + x.astype(np.float32)
        expected = expected * np.float32(1 / 3)
        for out_dtype in DTYPES:
            out = kernels.sum_(np.empty(length, out_dtype), inputs[:count], 1 / 3)
            assert_same_bits(out, expected.astype(out_dtype))
    into = inputs[1].copy()
    kernels.sum_(into, [inputs[0], into])
    assert_same_bits(into, (inputs[0].astype(np.float32) + inputs[1].astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_finite_finds_one_bad_element_anywhere(dtype: Any) -> None:
    for length in (1, 17, 4096, 10_000):
        for position in (0, length // 2, length - 1):
            for value in (np.nan, np.inf, -np.inf):
                x = np.full(length, -3e4, dtype)
                assert kernels.is_finite(x)
                x[position] = value
                assert not kernels.is_finite(x)
    assert kernels.is_finite(np.empty(0, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dtype", DTYPES)
def test_scatter_add_rounds_each_sum_once(dtype: Any, value_dtype: Any) -> None:
    rng = np.random.default_rng(0)
    dense = rng.standard_normal(70_000).astype(dtype)
    indices = np.sort(rng.choice(dense.size, 3000, replace=False)).astype(np.uint32)
    values = rng.standard_normal(indices.size).astype(value_dtype)
    expected = dense.copy()
    expected[indices] = (dense[indices].astype(np.float32) + values.astype(np.float32)).astype(dtype)
    assert kernels.scatter_add_(dense, indices, values) is dense
    assert_same_bits(dense, expected)


def test_scatter_add_takes_torch_and_repeated_indices() -> None:
    torch = pytest.importorskip("torch")
    dense = torch.zeros(4)
    kernels.scatter_add_(dense, torch.tensor([1, 3, 3]), torch.tensor([1.0, 2.0, 3.0]))
    assert dense.tolist() == [0.0, 1.0, 0.0, 5.0]


@pytest.mark.parametrize("indices", [[0, 9, 10], [-1, 2, 3], [2**32, 1, 2]])
def test_scatter_add_out_of_range_writes_nothing(indices: list[int]) -> None:
    dense = np.zeros(10, np.float32)
    with pytest.raises(ArgumentError, match="indices"):
        kernels.scatter_add_(dense, np.array(indices), np.ones(3, np.float32))
    assert not dense.any()


def test_mismatched_lengths_and_overlap_are_refused() -> None:
    x = np.zeros(10, np.float32)
    for call in (
        lambda: kernels.sum_(x, [x[1:]]),
        lambda: kernels.sum_(x, []),
        lambda: kernels.sum_(x, [x, x.astype(BF16)]),
        lambda: kernels.sum_(x[1:], [x[:-1]]),
        lambda: kernels.cast_(x[:5].view(np.float16)[:5], x[:5]),
        lambda: kernels.scatter_add_(x, np.arange(3, dtype=np.uint32), x[:3]),
        lambda: kernels.scatter_add_(x, np.arange(3, dtype=np.uint32), np.ones(2, np.float32)),
    ):
        with pytest.raises(ArgumentError):
            call()
