"""The codec of topk1bit: against its definition in float64, and nothing lost. tests/unit/kernels has the format."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.algorithms import Workload, find_algorithm
from topkube.collectives.top_signs import TopSigns


def send_by_definition(values: Any) -> Any:
    """The largest tenth, in float64: the sign times the mean magnitude of each 256 of them, rounded to bf16."""
    count = max(1, -(-len(values) // 10))
    indices = np.sort(np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:count])
    sent = np.zeros(len(values))
    for first in range(0, count, 256):
        block = indices[first : first + 256]
        scale = np.abs(values[block].astype(np.float64)).mean().astype(np.float32).astype(ml_dtypes.bfloat16)
        sent[block] = np.where(np.signbit(values[block]), -1.0, 1.0) * float(scale)
    return sent


def places_of(lengths: list[int]) -> list[slice]:
    ends = np.cumsum([-(-length // 256) * 256 for length in lengths]).tolist()
    return [slice(end - -(-length // 256) * 256, end - -(-length // 256) * 256 + length)
            for end, length in zip(ends, lengths, strict=True)]  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_row_has_the_values_of_the_definition_and_nothing_is_lost(lengths: list[int], seed: int) -> None:
    rng, places = np.random.default_rng(seed), places_of(lengths)
    x = np.zeros(places[-1].stop, np.float32)
    for place in places:
        x[place] = rng.standard_t(2, place.stop - place.start) * 10.0 ** rng.integers(-5, 5)
    before, codec = x.copy(), TopSigns(places)
    row = np.full(codec.row_bytes, 255, np.uint8)
    assert codec.pack(x, row)
    received = np.zeros_like(x)
    codec.unpack_add(received, [row], [1.0])
    for place in places:
        wanted = send_by_definition(before[place])
        assert ((received[place] != 0) == (wanted != 0)).all()
        np.testing.assert_allclose(received[place], wanted, rtol=2.0**-7)
        np.testing.assert_allclose(received[place] + x[place], before[place], rtol=0, atol=2e-7 * np.abs(wanted).max())
    assert not received[[i for p, q in itertools.pairwise(places) for i in range(p.stop, q.start)]].any()


def test_rows_are_added_in_their_order_with_their_weights() -> None:
    rng, codec = np.random.default_rng(0), TopSigns([slice(0, 3000)])
    rows, wanted = [], np.zeros(3000)
    for weight in (0.5, 0.25, 0.25):
        x = rng.standard_normal(3000).astype(np.float32)
        wanted += weight * send_by_definition(x)
        rows.append(np.zeros(codec.row_bytes, np.uint8))
        codec.pack(x, rows[-1])
    out = np.ones(3000, np.float32)
    codec.unpack_add(out, rows, [0.5, 0.25, 0.25])
    np.testing.assert_allclose(out - 1, wanted, rtol=0, atol=0.02)
    assert np.count_nonzero(out != 1) > 700


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_reported(value: float) -> None:
    codec = TopSigns([slice(0, 1000)])
    x = np.ones(1000, np.float32)
    x[777] = value
    assert not codec.pack(x, np.zeros(codec.row_bytes, np.uint8))


def test_the_declared_bytes_are_those_of_a_row() -> None:
    codec = TopSigns([slice(0, 1 << 20)])
    sent = find_algorithm("topk1bit").traffic(Workload(nodes=2, slots=1, elements=1 << 20)).sent
    assert abs(codec.row_bytes - sent) <= 0.001 * sent
    assert (4 << 20) / sent > 50
