"""Sums of integers over TCP connections of our own, against their definition (collectives/two_stage.py)."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linked_ranks import advance_until, connect

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.codecs import Integers
from topkube.collectives.two_stage import TwoStage, cut_into_segments
from topkube.kernels import QUANTISED_BITS

LEAST_PART_BYTES = 256 << 10
"""Shorter parts of a message are not cut (csrc/cpu/links/tcp_links.cpp)."""


def make_changes(ranks: int, length: int, seed: int) -> list[Array]:
    return [np.random.default_rng([seed, rank]).standard_normal(length).astype(np.float32) for rank in range(ranks)]


def build_stage(ranks: int, length: int, rank: int, bits: int) -> TwoStage:
    return TwoStage(lambda places, _: Integers(places, bits), [slice(0, length)], length, rank, [1.0] * ranks)


def sum_by_definition(changes: list[Array], bits: int) -> tuple[list[Array], list[Array], list[bool]]:
    """Return what is left of each rank's change, the sums, and if all that each rank sent was finite."""
    ranks, length = len(changes), changes[0].size
    left = [change.copy() for change in changes]
    stages = [build_stage(ranks, length, rank, bits) for rank in range(ranks)]
    rows = [stage.cut_rows(np.zeros(stage.total_bytes, np.uint8)) for stage in stages]
    for stage, change, own_rows in zip(stages, left, rows, strict=True):
        stage.pack(change, own_rows)
    means = stages[0].cut_rows(np.zeros(stages[0].total_bytes, np.uint8))
    for rank, stage in enumerate(stages):
        stage.reduce(left[rank][stage.segment], [rows[other][rank] for other in range(ranks)], means[rank])
    totals = [np.empty(length, np.float32) for _ in range(ranks)]
    for stage, total in zip(stages, totals, strict=True):
        stage.write(total, means)
    return left, totals, [bool(stage.is_finite) for stage in stages]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.one_of(st.sampled_from([0, 1, 255, 256, 257, 1024]), st.integers(0, 5000)),
    st.sampled_from(QUANTISED_BITS),
    st.randoms(use_true_random=False),
)
def test_sums_of_integers_have_the_bits_of_their_definition(ranks: int, length: int, bits: int, random: Any) -> None:
    """Several sums are under way at the same time, and ranks begin them at different moments. Some ranks may have no
    segment."""
    check_sums(ranks, length, bits, 1, random)


@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_lanes_share_a_sum(bits: int) -> None:
    """A lane takes 256 KiB at least: a segment has three parts."""
    length = 3 * count_elements(LEAST_PART_BYTES * 3 + 5000, bits) + 1
    assert 3 <= kernels.quantised_bytes(length // 3, bits) // LEAST_PART_BYTES < 4
    check_sums(3, length, bits, 4, None)


def count_elements(nbytes: int, bits: int) -> int:
    """Return about how many elements have a message of `nbytes`."""
    return 256_000 * nbytes // kernels.quantised_bytes(256_000, bits)


def check_sums(ranks: int, length: int, bits: int, lanes: int, random: Any) -> None:
    links, bounds = connect(ranks, lanes), cut_into_segments(length, ranks)
    numbers = range(2)
    changes = [make_changes(ranks, length, seed) for seed in numbers]
    left, totals, _ = zip(*(sum_by_definition(change, bits) for change in changes), strict=True)
    sent = [build_stage(ranks, length, rank, bits).sent_bytes for rank in range(ranks)]
    results = [[np.full(length, np.nan, np.float32) for _ in range(ranks)] for _ in numbers]
    work = list(itertools.product(links, numbers))
    if random is not None:
        random.shuffle(work)
    sums = []
    for one, number in work:
        result = results[number][one.rank]
        prepared = one.prepare_integers(changes[number][one.rank], result, bounds, bits, number)
        assert not prepared.are_complete
        if lanes == 1:  # several parts have paddings of their own
            assert prepared.sent_bytes == sent[one.rank]
        ((begun, duration, processor),) = prepared.take_computations()  # of the packing
        assert begun + duration <= time.perf_counter_ns() < begun + 60e9
        assert 0 <= processor < 60e9
        sums.append(one.begin_integers(prepared))
        if random is not None and random.random() < 0.5:
            for other in links:
                other.advance()
    advance_until(links, lambda: all(one.are_complete for one in sums))
    assert all(one.is_finite for one in sums)
    # The sum, and what each rank sends of it; lanes beyond the first have threads of their own.
    assert [len(one.take_computations()) for one in sums] == [ranks + 1] * len(sums)
    for number, rank in itertools.product(numbers, range(ranks)):
        assert results[number][rank].tobytes() == totals[number][rank].tobytes()
        assert changes[number][rank].tobytes() == left[number][rank].tobytes()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_send_a_nan_know_it(lanes: int, rank: int) -> None:
    length = 2 * count_elements(LEAST_PART_BYTES * 3 + 5000, 4)
    changes = make_changes(2, length, 0)
    changes[rank][-1] = np.nan  # in the last of three parts of the segment of rank 1
    _, totals, finite = sum_by_definition(changes, 4)
    assert finite == [rank == 1, False]
    links, bounds = connect(2, lanes), cut_into_segments(length, 2)
    results = [np.empty(length, np.float32) for _ in range(2)]
    sums = [
        one.begin_integers(one.prepare_integers(changes[one.rank], results[one.rank], bounds, 4, 0)) for one in links
    ]
    advance_until(links, lambda: all(one.are_complete for one in sums))
    assert [one.is_finite for one in sums] == finite
    assert [result.tobytes() for result in results] == [total.tobytes() for total in totals]


def test_ranks_with_different_integers_are_reported() -> None:
    links = connect(2)
    changes, results = make_changes(2, 1000, 0), make_changes(2, 1000, 1)
    sums = [
        one.begin_integers(
            one.prepare_integers(changes[one.rank], results[one.rank], cut_into_segments(1000, 2), bits, 0)
        )
        for one, bits in zip(links, (4, 8), strict=True)
    ]
    advance_until(links, lambda: all(one.list_broken() for one in links))
    assert not any(one.are_complete for one in sums)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("begins", [True, False])
def test_arrays_are_free_when_a_sum_is_complete_or_dropped(lanes: int, begins: bool) -> None:
    links, length = connect(2, lanes), 2_000_000
    changes, results = make_changes(2, length, 0), make_changes(2, length, 1)
    counts = [sys.getrefcount(array) for array in (*changes, *results)]
    sums = [
        one.prepare_integers(changes[one.rank], results[one.rank], cut_into_segments(length, 2), 8, 0) for one in links
    ]
    if begins:
        for one, integers in zip(links, sums, strict=True):
            one.begin_integers(integers)
        with pytest.raises(RuntimeError, match="has begun"):
            links[0].begin_integers(sums[0])
        advance_until(links, lambda: all(one.are_complete for one in sums))
    sums.clear()
    for one in links:
        one.advance()
    gc.collect()
    assert [sys.getrefcount(array) for array in (*changes, *results)] == counts


def test_the_end_of_links_does_not_wait_for_a_thread_that_needs_the_interpreter() -> None:
    """The threads of lanes drop what a sum needs at the moment at which the links go away."""
    length, bounds = 2_100_000, cut_into_segments(2_100_000, 2)
    for _ in range(40):
        links, arrays = connect(2, 3), [np.zeros(length, np.float32) for _ in range(4)]
        sums = [
            one.begin_integers(one.prepare_integers(arrays[one.rank], arrays[2 + one.rank], bounds, 8, 0))
            for one in links
        ]
        advance_until(links, lambda sums=sums: all(one.are_complete for one in sums))
        sums.clear()
        del links, arrays


def test_wrong_arguments_are_refused() -> None:
    (one, _), values = connect(2), np.zeros(1000, np.float32)
    for change, bounds, bits in (
        (values, (0, 512, 1000), 5),
        (values, (0, 1000), 8),
        (values, (0, 1000, 512), 8),
        (values, (0, 512, 1001), 8),
        (values, (0, 500, 1000), 8),
        (values[1:], (0, 512, 1000), 8),
    ):
        with pytest.raises(ValueError, match=r"bits must be|one segment for each rank|wrong length|cannot be cut"):
            one.prepare_integers(change, np.zeros(1000, np.float32), bounds, bits, 0)
