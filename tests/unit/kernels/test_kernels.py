"""Selection against a stable sort of the magnitudes' bits, on every path, dtype and adversarial input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError, SettingsError

BF16 = ml_dtypes.bfloat16
DTYPES = (np.float32, BF16, np.float16)
SIZES = (1, 2, 63, 64, 65, 1000, 16_384, 16_385, 50_003)


def view_bits(x: Any) -> Any:
    return x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


def view_magnitude_bits(x: Any) -> Any:
    return view_bits(x) & (0x7FFFFFFF if x.dtype.itemsize == 4 else 0x7FFF)


def find_largest(x: Any, k: int) -> Any:
    """Return the indices of the k largest magnitudes, ascending; the lowest index wins ties."""
    return np.sort(np.argsort(~view_magnitude_bits(x), kind="stable")[:k])


def build_adversarial_inputs(d: int) -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(d)
    normal = rng.standard_normal(d).astype(np.float32)
    yield "normal", normal
    yield "sorted", np.arange(d, dtype=np.float32)
    yield "reversed", np.arange(d, dtype=np.float32)[::-1].copy()
    yield "constant", np.full(d, -1.5, np.float32)
    yield "zeros", np.zeros(d, np.float32)
    yield "few values", rng.integers(-2, 3, d).astype(np.float32)
    spike = np.zeros(d, np.float32)
    spike[d // 2] = -1e30
    yield "spike", spike
    yield "denormals", rng.integers(0, 4096, d, dtype=np.uint32).view(np.float32)
    yield "heavy tails", (rng.standard_cauchy(d) ** 3).astype(np.float32)
    columns = (normal.reshape(1, -1) * np.where(np.arange(d) % 64 == 5, 1e3, 1.0)).astype(np.float32).ravel()
    yield "loud columns", columns
    nan = normal.copy()
    nan[rng.integers(0, d, 1 + d // 50)] = np.nan
    nan[-1] = -np.inf
    yield "nan", nan
    yield "any bits", rng.integers(0, 2**32, d, dtype=np.uint32).view(np.float32)


CASES = [pytest.param(x, id=f"{name}-{d}") for d in SIZES for name, x in build_adversarial_inputs(d)]


@pytest.fixture(params=kernels.simd_paths())
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def list_counts(d: int) -> list[int]:
    return sorted({1, max(1, d // 1000), max(1, d // 100), max(1, d // 5), max(1, d // 2), d})


@pytest.mark.parametrize("x32", CASES)
def test_topk_is_exact_with_the_lowest_index_first(simd_path: str, x32: Any) -> None:
    for dtype in DTYPES:
        with np.errstate(all="ignore"):
            x = x32.astype(dtype)
        for k in list_counts(x.size):
            expected = find_largest(x, k)
            for threads in (1, 3):
                indices, values = kernels.topk(x, k, threads=threads)
                assert indices.dtype == np.uint32
                assert values.dtype == x.dtype
                np.testing.assert_array_equal(indices, expected)
                np.testing.assert_array_equal(view_bits(values), view_bits(x[expected]))
                assert kernels.last_effort().passes <= 4


@pytest.mark.parametrize("x32", CASES)
def test_compress_keeps_the_unsent_rest(simd_path: str, x32: Any) -> None:
    d = x32.size
    gradient32 = np.random.default_rng(1).standard_normal(d).astype(np.float32)
    for dtype in DTYPES:
        gradient = gradient32.astype(dtype)
        with np.errstate(all="ignore"):
            expected = x32 + gradient.astype(np.float32)
        expected[np.isnan(expected)] = np.nan  # a computed NaN has the same bits everywhere
        for k in list_counts(d):
            residual, left = x32.copy(), np.full(d, 7, np.float32)
            indices, values = kernels.compress_(gradient, residual, k, out=left)
            chosen = find_largest(expected, k)
            np.testing.assert_array_equal(indices, chosen)
            np.testing.assert_array_equal(view_bits(values), view_bits(expected[chosen]))
            np.testing.assert_array_equal(view_bits(residual), view_bits(x32))
            kept = expected.copy()
            kept[chosen] = 0
            np.testing.assert_array_equal(view_bits(left), view_bits(kept))
            assert kernels.last_effort().passes <= 4
            if dtype is np.float32:
                in_place = gradient32.copy()
                again, _ = kernels.compress_(in_place, residual, k, threads=2)
                np.testing.assert_array_equal(again, chosen)
                np.testing.assert_array_equal(view_bits(in_place), view_bits(kept))


def find_mstopk_thresholds(x: Any, k: int, iterations: int = 30) -> tuple[float, int, float, int]:
    """Follow algorithm 1 of the paper of MSTopK word by word: one count per probe, float32 thresholds. Return (upper
    threshold, count of elements above it, lower threshold, count of elements above it)."""
    a = np.abs(x).astype(np.float32)
    mean, top = float(a.astype(np.float64).mean()), float(a.max())
    left, right, k1, k2, upper, lower = 0.0, 1.0, 0, a.size, np.inf, 0.0
    for _ in range(iterations):
        ratio = left + (right - left) / 2
        threshold = np.float32(mean + ratio * (top - mean))
        count = int((a >= threshold).sum())
        if count <= k:
            right = ratio
            if count > k1:
                k1, upper = count, float(threshold)
        else:
            left = ratio
            if count < k2:
                k2, lower = count, float(threshold)
    return upper, k1, lower, k2


@pytest.mark.parametrize("x32", [case for case in CASES if not case.id.startswith(("nan", "any"))])
def test_mstopk_follows_the_paper(simd_path: str, x32: Any) -> None:
    for dtype in DTYPES:
        with np.errstate(all="ignore"):
            x = x32.astype(dtype)
        if not np.isfinite(x.astype(np.float32)).all():
            continue
        a = np.abs(x).astype(np.float32)
        for k in list_counts(x.size):
            upper, k1, lower, k2 = find_mstopk_thresholds(x, k)
            indices, values = kernels.mstopk(x, k, seed=3, threads=2)
            thresholds = kernels.last_thresholds()
            assert (thresholds.above_upper, thresholds.above_lower) == (k1, k2)
            assert indices.size == k
            assert (np.diff(indices.astype(np.int64)) > 0).all()
            np.testing.assert_array_equal(view_bits(values), view_bits(x[indices]))
            chosen = np.zeros(x.size, bool)
            chosen[indices] = True
            assert chosen[a >= upper].all()
            between = np.flatnonzero((a >= lower) & (a < upper))
            run = np.flatnonzero(chosen[between])
            assert run.size == k - k1
            if run.size:
                assert run[-1] - run[0] == run.size - 1, "the fill is one run of neighbours"
            assert kernels.last_effort().passes <= 4


def test_mstopk_draws_the_offset_from_the_seed() -> None:
    x = np.ones(100_000, np.float32)
    runs = {int(kernels.mstopk(x, 100, seed=seed)[0][0]) for seed in range(20)}
    assert len(runs) > 10
    first = kernels.mstopk(x, 100, seed=5)[0]
    np.testing.assert_array_equal(first, kernels.mstopk(x, 100, seed=5)[0])
    assert max(runs) + 100 <= x.size


def test_mstopk_selects_nan_and_infinity() -> None:
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    x[[7, 40_000]] = np.nan, np.inf
    indices, values = kernels.mstopk(x, 100)
    assert {7, 40_000} <= set(indices.tolist())
    assert not np.isfinite(values).all()


@settings(max_examples=60)
@given(st.integers(1, 70_000), st.integers(0, 2**32), st.floats(1e-4, 1), st.integers(0, 15), st.integers(1, 4))
def test_topk_selects_the_largest_of_any_bits_at_any_offset(
    d: int, seed: int, density: float, offset: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 2**32, d + offset, dtype=np.uint32).view(np.float32)
    x = whole[offset:]  # not aligned to a vector
    k = kernels.entries_kept(d, density)
    expected = find_largest(x, k)
    for name in kernels.simd_paths():
        before = kernels.use_simd(name)
        try:
            indices, values = kernels.topk(x, k, threads=threads)
        finally:
            kernels.use_simd(before)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(view_bits(values), view_bits(x[expected]))


def test_a_matrix_with_quiet_and_loud_columns_takes_one_pass() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, 2048), dtype=np.float32)
    x[:, ::128] *= 100
    x[:, 1::128] *= 0.01
    k = x.size // 100
    indices, _ = kernels.topk(x, k)
    assert kernels.last_effort().passes == 1
    assert kernels.last_effort().candidates < 3 * k
    np.testing.assert_array_equal(indices, find_largest(x.ravel(), k))


def test_the_flush_mode_of_the_caller_changes_nothing_and_is_kept() -> None:
    torch = pytest.importorskip("torch")
    residual = np.random.default_rng(2).integers(0, 2**20, 50_000, dtype=np.uint32).view(np.float32)
    expected = kernels.compress_(np.zeros(50_000, np.float32), residual, 50)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = kernels.compress_(np.zeros(50_000, np.float32), residual, 50)
        assert float(torch.tensor([1e-39]) * 1.0) == 0.0, "the caller's mode was not restored"
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(expected, flushed, strict=True):
        np.testing.assert_array_equal(view_bits(a), view_bits(b))


def test_torch_tensors_come_back_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-3, 2, 1000).to(dtype)
        indices, values = kernels.topk(x, 5)
        assert indices.dtype == torch.uint32
        assert values.dtype == dtype
        assert torch.equal(values, x[:5])
    gradient = torch.ones(10)
    kernels.compress_(gradient, torch.zeros(10), 4)
    assert gradient.tolist() == [0.0] * 4 + [1.0] * 6


X = np.arange(10, dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.topk(X, 0), "k = 0"),
        (lambda: kernels.topk(X, 11), "k = 11"),
        (lambda: kernels.topk(X, 0.5), "k = 0.5"),
        (lambda: kernels.topk(X[:0], 1), "empty"),
        (lambda: kernels.topk(X, 1, threads=0), "threads = 0"),
        (lambda: kernels.topk(X.astype(np.int32), 1), "x has dtype int32"),
        (lambda: kernels.topk(X.astype(np.float64), 1), "x has dtype float64"),
        (lambda: kernels.topk(np.ones((4, 4), np.float32).T[:2], 1), "x is not contiguous"),
        (lambda: kernels.topk([1.0, 2.0], 1), "x is a list"),
        (lambda: kernels.mstopk(X, 3, iterations=0), "iterations = 0"),
        (lambda: kernels.entries_kept(10, 0), "density = 0"),
        (lambda: kernels.entries_kept(10, 1.5), "density = 1.5"),
        (lambda: kernels.compress_(X.copy(), X[:9], 1), "residual has 9 elements"),
        (lambda: kernels.compress_(X, X, 1), "gradient and residual overlap"),
        (lambda: kernels.compress_(X[:9], X[1:], 1), "gradient and residual overlap"),
        (lambda: kernels.compress_(X.copy(), X, 1, out=X), "out and residual overlap"),
        (lambda: kernels.compress_(X.astype(BF16), X, 1), "pass out="),
        (lambda: kernels.compress_(X.copy(), X.astype(np.float16), 1), "residual has dtype float16"),
        (lambda: kernels.compress_(X.astype(BF16), X, 1, out=X.astype(BF16)), "out has dtype bfloat16"),
    ],
)
def test_unusable_arguments_are_named(call: Any, message: str) -> None:
    before = X.copy()
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        call()
    np.testing.assert_array_equal(X, before)


def test_a_read_only_gradient_is_refused() -> None:
    gradient = X.copy()
    gradient.flags.writeable = False
    with pytest.raises(ArgumentError, match="gradient is read-only"):
        kernels.compress_(gradient, X, 1)


def test_an_unknown_simd_path_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="portable"):
        kernels.use_simd("sse9")
    assert kernels.simd() in kernels.simd_paths()
