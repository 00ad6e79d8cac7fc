"""The comparison of ranks by digests is exact at every world size. Sums of squares in floats would not be exact from 7
ranks on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from topkube.training.ranks.agreement import digest, find_differing_ranks


@given(size=st.integers(1, 4096), text=st.text())
def test_equal_ranks_are_equal_at_every_size(size: int, text: str) -> None:
    assert find_differing_ranks(np.full(size, digest(text))) == []


@given(data=st.data(), size=st.integers(3, 4096))
def test_the_ranks_that_differ_are_named(data: st.DataObject, size: int) -> None:
    differing_ranks = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    column = np.full(size, digest("one model"))
    column[list(differing_ranks)] = digest("another model")
    assert find_differing_ranks(column) == sorted(differing_ranks)


def test_if_two_halves_differ_the_half_of_rank_0_is_right() -> None:
    assert find_differing_ranks(np.array([5.0, 7.0, 7.0, 5.0])) == [1, 2]


@given(st.binary(max_size=50))
def test_a_digest_survives_float64(value: bytes) -> None:
    word = digest(value)
    assert word == int(word) < 2**53
