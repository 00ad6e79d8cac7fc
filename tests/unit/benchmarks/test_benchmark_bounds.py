"""The benchmark's arithmetic and its check of results: bounds are not too low, and the check refuses wrong results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allreduce import bounds
from allreduce.bounds import Machine
from allreduce.problem import SumProblem, WrongResult

GIGABIT = Machine(read=40e9, update=60e9, link_bytes=(1_000_000, 10_000_000), link_seconds=(0.008, 0.080))


def test_bytes_between_nodes_follow_the_formulas() -> None:
    d = 1_000_000
    assert bounds.count_ring_bytes(d, 2, 2) == 2 * 3 / 4 * 4 * d
    assert bounds.count_hierarchical_bytes(d, 2) == 4 * d
    assert bounds.count_hierarchical_bytes(d, 4) == 2 * 3 / 4 * 4 * d
    assert bounds.count_hitopk_bytes(d, 2, 2, 0.01, 6) == 10_000 * 6
    assert bounds.count_hitopk_bytes(d, 4, 1, 0.01, 6) == 3 * 10_000 * 6
    assert bounds.count_gathered_bytes(d, 2, 2, 0.01, 8) == 3 * 10_000 * 8
    assert bounds.count_naive_bytes(d, 2, 2, 0.01, 6) == 4 * 10_000 * 6


def test_a_wire_bound_scales_from_the_probe_of_its_message_size() -> None:
    assert GIGABIT.find_link_seconds(1_000_000) == pytest.approx(0.008)
    assert GIGABIT.find_link_seconds(500_000) == pytest.approx(0.004)
    assert GIGABIT.find_link_seconds(100_000_000) == pytest.approx(0.8)


def test_dense_is_bound_by_the_slower_of_link_and_memory_sparse_by_their_sum() -> None:
    d = 25_000_000
    dense = bounds.compute_dense_bound(d, 2, 2, bounds.count_hierarchical_bytes(d, 2), GIGABIT)
    assert dense.seconds == dense.link_seconds == pytest.approx(0.8)
    sparse = bounds.compute_sparse_bound(
        d, 2, 2, bounds.count_hitopk_bytes(d, 2, 2, 0.01, 6), GIGABIT, hierarchical=True
    )
    reduced = 2 * (8 + 8 + 4) * d / 60e9  # two nodes: published, read from two places, written
    selected = 2 * 4 * d / 40e9
    cleared = 4 * 4 * d / 60e9
    assert sparse.link_seconds == pytest.approx(0.012)
    assert sparse.seconds == pytest.approx(reduced + selected + max(cleared, 0.012))


@pytest.fixture
def problem(tmp_path: Path) -> SumProblem:
    return SumProblem.create(tmp_path / "problem", 1000, (2, 2), (0.01,))


def test_references_are_the_sums_of_the_inputs(problem: SumProblem) -> None:
    inputs = [problem.load_input(rank).astype(np.float64) for rank in range(4)]
    dense = np.load(problem.directory / "dense.npy")
    np.testing.assert_allclose(dense, sum(inputs), atol=1e-6)
    kept = np.load(problem.directory / "hitopk-0.01.npy")
    per_node = [inputs[0] + inputs[1], inputs[2] + inputs[3]]
    for shard in (slice(0, 500), slice(500, 1000)):
        expected = np.zeros(500)
        for node in per_node:
            chosen = np.argsort(-np.abs(node[shard]))[:5]
            expected[chosen] += node[shard][chosen]
        np.testing.assert_allclose(kept[shard], expected, atol=1e-6)


def test_a_wrong_sum_is_refused(problem: SumProblem) -> None:
    correct = np.load(problem.directory / "naive-0.01.npy")
    problem.check(correct, "naive-0.01", 1e-5)
    misplaced = correct.copy()
    misplaced[np.flatnonzero(correct == 0)[0]] = 1e-7  # within the tolerance, but nobody selected it
    with pytest.raises(WrongResult, match="element"):
        problem.check(misplaced, "naive-0.01", 1e-5)
    missing = correct.copy()
    missing[np.flatnonzero(correct)[0]] = 0
    with pytest.raises(WrongResult):
        problem.check(missing, "naive-0.01", 1e-5)
    with pytest.raises(WrongResult):
        problem.check(np.full(1000, np.nan, np.float32), "dense", 1e-5)
