"""The product of two thin factors, on every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from topkube import kernels
from topkube.errors import ArgumentError

BF16 = ml_dtypes.bfloat16


@pytest.fixture(params=kernels.simd_paths(), autouse=True)
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def multiply_by_definition(left: Any, right: Any, dtype: Any) -> Any:
    """Return the product: the parts of an element are added in float32 in the order of the rank, and rounded once."""
    product = np.zeros((len(left), len(right)), np.float32)
    for rank in range(left.shape[1]):
        product += left[:, rank : rank + 1] * right[:, rank]
    return product.reshape(-1).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("columns", [1, 7, 256, 512, 513, 1300])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_product_and_what_it_leaves_have_the_bits_of_their_definition(dtype: Any, columns: int, rank: int) -> None:
    rng = np.random.default_rng(columns + rank)
    rows = 9
    left, right = (rng.standard_normal((length, rank)).astype(np.float32) for length in (rows, columns))
    before = rng.standard_normal(rows * columns).astype(np.float32)
    out, residual = np.full(rows * columns, 7, dtype), before.copy()
    assert kernels.low_rank_product_(out, residual, left, right, 0.25) is out
    expected = multiply_by_definition(left, right, dtype)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))
    rest = before - np.float32(0.25) * expected.astype(np.float32)
    np.testing.assert_array_equal(residual.view(np.uint32), rest.view(np.uint32))


@pytest.mark.parametrize("rows", [0, 3])
def test_a_product_without_rows_or_columns_is_empty(rows: int) -> None:
    left, right = np.ones((rows, 2), np.float32), np.ones((3 - rows, 2), np.float32)
    out = kernels.low_rank_product_(np.empty(0, np.float32), np.empty(0, np.float32), left, right, 1.0)
    assert not out.size


def test_parts_that_are_not_finite_show_in_the_product_and_in_the_rest() -> None:
    left, right = np.array([[1.0], [np.inf], [np.nan]], np.float32), np.array([[0.0], [2.0]], np.float32)
    out, residual = np.empty(6, np.float32), np.ones(6, np.float32)
    kernels.low_rank_product_(out, residual, left, right, 1.0)
    assert out[:2].tolist() == [0, 2]
    assert np.isnan(out[[2, 4, 5]]).all()
    assert out[3] == np.inf
    assert residual[:2].tolist() == [1, -1]
    assert np.isnan(residual[[2, 4, 5]]).all()
    assert residual[3] == -np.inf


def test_arguments_that_do_not_match_are_refused_before_anything_is_written() -> None:
    def arguments() -> dict[str, Any]:
        return {
            "out": np.zeros(6, np.float32),
            "residual": np.zeros(6, np.float32),
            "left": np.ones((2, 1), np.float32),
            "right": np.ones((3, 1), np.float32),
        }

    shared, read_only = np.zeros(6, np.float32), np.zeros(6, np.float32)
    read_only.flags.writeable = False
    for name, wrong, message in (
        ("right", np.ones((3, 2), np.float32), "left has 1 columns, right has 2"),
        ("right", np.ones(3, np.float32), "right is not a matrix"),
        ("left", np.ones((2, 0), np.float32), "left is not a matrix with at least one column"),
        ("left", np.ones((2, 1)), "left has dtype float64"),
        ("left", np.ones((3, 1), np.float32), "out has 6 elements"),
        ("residual", np.zeros(5, np.float32), "residual has 5 elements"),
        ("residual", np.zeros(6, np.float16), "residual has dtype float16"),
        ("residual", read_only, "residual is read-only"),
    ):
        passed = {**arguments(), name: wrong}
        with pytest.raises(ArgumentError, match=message):
            kernels.low_rank_product_(**passed, weight=1.0)
        assert not passed["out"].any()
        assert not passed["residual"].any()
    for name, part in (("residual", shared), ("left", shared[:2].reshape(2, 1)), ("right", shared[3:].reshape(3, 1))):
        with pytest.raises(ArgumentError, match=f"out and {name} overlap"):
            kernels.low_rank_product_(**{**arguments(), "out": shared, name: part}, weight=1.0)
