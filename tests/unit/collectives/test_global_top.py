"""The tree of gtopk with all nodes in one process, against its definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_network import SimulatedNetwork, exchange_top
from topkube.algorithms import Workload, find_algorithm
from topkube.collectives.global_top import TopTree

Array = Any


def exchange(totals: list[Array], k: int, wire: str = "fp32") -> tuple[list[TopTree], list[Array], SimulatedNetwork]:
    """Return the trees of all nodes after the exchange, and their residuals."""
    residuals = [total.copy() for total in totals]
    trees, network = exchange_top(TopTree, residuals, k, wire)
    return trees, residuals, network


def deliver(tree: TopTree, length: int) -> Array:
    result = np.zeros(length)
    result[tree.indices] = tree.values
    return result


def keep_largest(values: Array, k: int) -> Array:
    """Return `values` (float64) with the k largest magnitudes, and zeros elsewhere. Of equal magnitudes, the first
    stay."""
    kept = np.argsort(-np.abs(values), kind="stable")[:k]
    result = np.zeros_like(values)
    result[kept] = values[kept]
    return result


def compute_by_definition(totals: list[Array], k: int) -> tuple[Array, list[Array]]:
    """Return what gtopk delivers and the residuals of all nodes, in float64. Values must have distinct magnitudes."""
    nodes = len(totals)
    subtrees = {node: keep_largest(total.astype(np.float64), k) for node, total in enumerate(totals)}
    left_out: list[list[Array]] = [[] for _ in totals]

    def add(keeper: int, other: int) -> None:
        total = subtrees[keeper] + subtrees.pop(other)
        subtrees[keeper] = keep_largest(total, k)
        left_out[keeper].append(total - subtrees[keeper])

    selected = [values != 0 for values in subtrees.values()]
    paired = 2 ** int(np.log2(nodes))
    for surplus in range(paired, nodes):
        add(surplus - paired, surplus)
    step = 1
    while step < paired:
        for keeper in range(0, paired, 2 * step):
            add(keeper, keeper + step)
        step *= 2
    is_delivered = subtrees[0] != 0
    residuals = []
    for total, is_selected, left_out_sums in zip(totals, selected, left_out, strict=True):
        residual = np.where(is_selected & is_delivered, 0, total.astype(np.float64))
        residuals.append(residual + sum(part * is_delivered for part in left_out_sums))
    return subtrees[0], residuals


@st.composite
def draw_problem(draw: Any) -> tuple[list[Array], int]:
    """Draw totals of 1 to 9 nodes whose sums all differ in magnitude, and k."""
    nodes, length = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([3, 1000, 2**20]))  # few or many entries in common
    totals = [np.round(rng.standard_normal(length) * scale) + rng.permutation(length) / 1024 + node / 16 + 2**-14
              for node in range(nodes)]  # fmt: skip
    return [total.astype(np.float32) for total in totals], draw(st.integers(1, length))


@settings(max_examples=30, deadline=None)
@given(draw_problem())
def test_the_exchange_follows_its_definition(problem: tuple[list[Array], int]) -> None:
    totals, k = problem
    expected_sum, expected_residuals = compute_by_definition(totals, k)
    trees, residuals, _ = exchange(totals, k)
    scale = max(float(np.abs(totals).max()), 1e-30) * len(totals)
    for tree in trees:
        np.testing.assert_allclose(deliver(tree, len(expected_sum)), expected_sum, rtol=0, atol=1e-6 * scale)
    for residual, expected_residual in zip(residuals, expected_residuals, strict=True):
        np.testing.assert_allclose(residual, expected_residual, rtol=0, atol=1e-6 * scale)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 17),
    st.integers(1, 300),
    st.floats(0.001, 1),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(0, 2**32),
)
def test_nothing_is_lost_in_many_steps(nodes: int, length: int, density: float, wire: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = max(1, round(density * length))
    residuals = [np.zeros(length, np.float32) for _ in range(nodes)]
    received, summed = np.zeros(length), np.zeros(length)
    for _ in range(3):
        inputs = [rng.standard_normal(length).astype(np.float32) for _ in range(nodes)]
        summed += np.sum(inputs, axis=0, dtype=np.float64)
        trees, residuals, _ = exchange([a + b for a, b in zip(inputs, residuals, strict=True)], k, wire)
        bits = {(tree.indices.tobytes(), tree.values.tobytes()) for tree in trees}
        assert len(bits) == 1, "nodes differ"
        assert len(trees[0].indices) == k
        received += deliver(trees[0], length)
    lost = np.abs(received + np.sum(residuals, axis=0, dtype=np.float64) - summed).max()
    assert lost <= 1e-4 * max(np.abs(summed).max(), 1)


def test_entries_that_are_left_out_on_the_way_stay_in_the_residuals() -> None:
    """Nodes 2 and 3 decide that entry 0 is delivered. The sum of nodes 0 and 1 leaves their part of entry 0 out."""
    totals = [np.array(values, np.float32) for values in ([3, 4, 0], [0, 4, 0], [9, 0, 0], [9, 0, 0])]
    trees, residuals, _ = exchange(totals, 1)
    assert deliver(trees[3], 3).tolist() == [18, 0, 0]
    assert [residual.tolist() for residual in residuals] == [[3, 4, 0], [0, 4, 0], [0, 0, 0], [0, 0, 0]]
    totals[0][0] = 5  # now node 0 selects entry 0, and the sum of nodes 0 and 1 leaves it out or keeps it
    totals[1][1] = 6
    trees, residuals, _ = exchange(totals, 1)
    assert deliver(trees[0], 3).tolist() == [18, 0, 0]
    assert [residual.tolist() for residual in residuals] == [[5, 4, 0], [0, 6, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("nodes", [1, 2, 3, 6, 8])
def test_a_value_that_is_not_finite_reaches_all_nodes(nodes: int, value: float) -> None:
    for culprit in range(nodes):
        totals = [np.random.default_rng(node).standard_normal(50).astype(np.float32) for node in range(nodes)]
        totals[culprit][7] = value
        trees, _, _ = exchange(totals, 3, "bf16")
        assert not any(np.isfinite(tree.values).all() for tree in trees)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_no_node_sends_more_than_is_declared(nodes: int) -> None:
    totals = [np.random.default_rng(node).standard_normal(60_000).astype(np.float32) for node in range(nodes)]
    trees, _, network = exchange(totals, 600, "bf16")
    assert network.sent_bytes == [tree.sent_bytes for tree in trees]
    declared = find_algorithm("gtopk").traffic(Workload(nodes, 1, 60_000)).sent
    assert max(network.sent_bytes) <= declared * 1.02


def test_the_declared_cost_grows_with_the_logarithm_of_the_nodes() -> None:
    costs = [find_algorithm("gtopk").traffic(Workload(nodes, 8, 25_600_000)) for nodes in (2, 4096, 4097)]
    assert [cost.sent / costs[0].sent for cost in costs] == [1, 12, 13]
    assert [cost.messages for cost in costs] == [1, 12, 14]
    assert find_algorithm("gtopk").traffic(Workload(1, 8, 25_600_000)).sent == 0
