"""The codecs of topk1bit and sparseloco. Their rows follow the definitions in float64 and lose nothing, indices survive
encoding, and damaged messages are refused. tests/unit/kernels tests the format of topk1bit."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.algorithms import Workload, find_algorithm
from topkube.collectives.top_levels import TopLevels, _IndexCode
from topkube.collectives.top_signs import TopSigns
from topkube.errors import WireError


def compute_sent_signs(values: Any) -> Any:
    """Return the values that topk1bit sends for the largest tenth of `values`, in float64: in each block of 256 of
    them, the sign of the value times the mean magnitude of the block, rounded to bf16."""
    count = max(1, -(-len(values) // 10))
    indices = np.sort(np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:count])
    sent = np.zeros(len(values))
    for first in range(0, count, 256):
        block = indices[first : first + 256]
        scale = np.abs(values[block].astype(np.float64)).mean().astype(np.float32).astype(ml_dtypes.bfloat16)
        sent[block] = np.where(np.signbit(values[block]), -1.0, 1.0) * float(scale)
    return sent


def compute_sent_levels(values: Any) -> Any:
    """Return the values that sparseloco sends for the largest 1/32 of `values`, in float64: in each block of 256 of
    them, the sign of the value times one of two magnitudes. These are the means of the magnitudes below and above the
    mean magnitude of the block, rounded to bf16."""
    count = max(1, -(-len(values) // 32))
    indices = np.sort(np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:count])
    sent = np.zeros(len(values))
    for first in range(0, count, 256):
        block = indices[first : first + 256]
        magnitudes = np.abs(values[block].astype(np.float64))
        is_low = magnitudes < magnitudes.mean()
        for part in (block[is_low], block[~is_low]):
            if len(part):
                scale = np.abs(values[part].astype(np.float64)).mean().astype(np.float32).astype(ml_dtypes.bfloat16)
                sent[part] = np.where(np.signbit(values[part]), -1.0, 1.0) * float(scale)
    return sent


CODECS = pytest.mark.parametrize(
    ("kind", "compute_sent"), [(TopSigns, compute_sent_signs), (TopLevels, compute_sent_levels)]
)


def build_places(lengths: list[int]) -> list[slice]:
    ends = np.cumsum([-(-length // 256) * 256 for length in lengths]).tolist()
    return [slice(end - -(-length // 256) * 256, end - -(-length // 256) * 256 + length)
            for end, length in zip(ends, lengths, strict=True)]  # fmt: skip


@CODECS
@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_row_has_the_values_of_the_definition_and_nothing_is_lost(
    kind: Any, compute_sent: Any, lengths: list[int], seed: int
) -> None:
    rng, places = np.random.default_rng(seed), build_places(lengths)
    x = np.zeros(places[-1].stop, np.float32)
    for place in places:
        x[place] = rng.standard_t(2, place.stop - place.start) * 10.0 ** rng.integers(-5, 5)
    before, codec = x.copy(), kind(places)
    row = np.full(codec.row_bytes, 255, np.uint8)
    assert codec.pack(x, row)
    received = np.zeros_like(x)
    codec.unpack_add(received, [row], [1.0])
    for place in places:
        expected = compute_sent(before[place])
        assert ((received[place] != 0) == (expected != 0)).all()
        np.testing.assert_allclose(received[place], expected, rtol=2.0**-7)
        np.testing.assert_allclose(
            received[place] + x[place], before[place], rtol=0, atol=2e-7 * np.abs(expected).max()
        )
    assert not received[[i for p, q in itertools.pairwise(places) for i in range(p.stop, q.start)]].any()


@CODECS
def test_rows_are_added_in_their_order_with_their_weights(kind: Any, compute_sent: Any) -> None:
    rng, codec = np.random.default_rng(0), kind([slice(0, 3000)])
    rows, expected = [], np.zeros(3000)
    for weight in (0.5, 0.25, 0.25):
        x = rng.standard_normal(3000).astype(np.float32)
        expected += weight * compute_sent(x)
        rows.append(np.zeros(codec.row_bytes, np.uint8))
        codec.pack(x, rows[-1])
    out = np.ones(3000, np.float32)
    codec.unpack_add(out, rows, [0.5, 0.25, 0.25])
    np.testing.assert_allclose(out - 1, expected, rtol=0, atol=0.02)
    assert np.count_nonzero(out != 1) > 2.3 * np.count_nonzero(compute_sent(x))


@CODECS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_reported(kind: Any, compute_sent: Any, value: float) -> None:
    codec = kind([slice(0, 1000)])
    x = np.ones(1000, np.float32)
    x[777] = value
    assert not codec.pack(x, np.zeros(codec.row_bytes, np.uint8))


@pytest.mark.parametrize(("kind", "name", "least"), [(TopSigns, "topk1bit", 50), (TopLevels, "sparseloco", 112)])
def test_the_declared_bytes_are_those_of_a_row(kind: Any, name: str, least: int) -> None:
    codec = kind([slice(0, 1 << 20)])
    sent = find_algorithm(name).traffic(Workload(nodes=2, slots=1, elements=1 << 20)).sent
    assert abs(codec.row_bytes - sent) <= 0.001 * sent
    assert (4 << 20) / sent > least


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2**32))
def test_any_indices_survive_encoding(length: int, share: float, seed: int) -> None:
    count = max(1, round(share * length))
    indices = np.sort(np.random.default_rng(seed).choice(length, count, replace=False)).astype(np.uint32)
    code = _IndexCode.build(length, count)
    data = np.zeros(code.nbytes, np.uint8)
    for chosen in (indices, np.arange(count), np.arange(length - count, length)):  # also the extremes
        code.write(chosen.astype(np.uint32), data)
        assert (code.read(data) == chosen).all()


@settings(deadline=None)
@given(st.binary(min_size=1), st.integers(0, 2**32))
def test_damaged_indices_are_refused_or_still_valid(noise: bytes, seed: int) -> None:
    code = _IndexCode.build(1000, 100)
    indices = np.sort(np.random.default_rng(seed).choice(1000, 100, replace=False)).astype(np.uint32)
    data = np.zeros(code.nbytes, np.uint8)
    code.write(indices, data)
    start = seed % code.nbytes
    part = data[start : start + len(noise)]
    part ^= np.frombuffer(noise, np.uint8)[: part.size]
    try:
        read = code.read(data)
    except WireError:
        return
    assert read.size == 100
    assert read[0] >= 0
    assert read[-1] < 1000
    assert (np.diff(read) > 0).all()


def test_two_magnitudes_lose_less_than_one() -> None:
    """The error of the values that were sent, if their magnitudes differ, compared with one magnitude per block."""
    x = np.random.default_rng(0).standard_t(3, 100_000).astype(np.float32)
    chosen = np.sort(np.argsort(-np.abs(x))[:3125])
    rest = x.copy()
    codec = TopLevels([slice(0, len(x))])
    codec.pack(rest, np.zeros(codec.row_bytes, np.uint8))
    blocks = np.abs(x[chosen]).reshape(-1, 125)
    error_of_one_magnitude = np.square(blocks - blocks.mean(axis=1, keepdims=True)).sum()
    assert np.square(rest[chosen]).sum() < 0.7 * error_of_one_magnitude
