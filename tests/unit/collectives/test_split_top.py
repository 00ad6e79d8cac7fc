"""The exchange of oktopk with all nodes in one process, against its definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_network import SimulatedNetwork, exchange_top
from topkube.algorithms import Workload, find_algorithm
from topkube.collectives.split_top import SplitTop

Array = Any


def exchange(totals: list[Array], k: int, wire: str = "fp32") -> tuple[list[SplitTop], list[Array], SimulatedNetwork]:
    """Return the parts of all nodes after the exchange, and their residuals."""
    residuals = [total.copy() for total in totals]
    parts, network = exchange_top(SplitTop, residuals, k, wire)
    return parts, residuals, network


def deliver(part: SplitTop, length: int) -> Array:
    result = np.zeros(length)
    result[part.indices] = part.values
    return result


def compute_by_definition(totals: list[Array], k: int) -> tuple[Array, list[Array]]:
    """Return what oktopk delivers and the residuals of all nodes, in float64. Sums are
    compared by the upper 14 bits of their magnitudes."""
    rows, selected = [total.astype(np.float64) for total in totals], []
    for row in rows:
        chosen = np.zeros(len(row), bool)
        chosen[np.argsort(-np.abs(row), kind="stable")[:k]] = True
        selected.append(chosen)
    sums = np.sum([np.where(chosen, row, 0) for row, chosen in zip(rows, selected, strict=True)], axis=0)
    keys = (sums.astype(np.float32).view(np.uint32) & 0x7FFFFFFF).astype(np.int64) >> 17
    keys[~np.any(selected, axis=0)] = -1
    delivered = np.zeros(len(sums), bool)
    delivered[np.argsort(-keys, kind="stable")[:k]] = True
    residuals = [np.where(chosen & delivered, 0, row) for row, chosen in zip(rows, selected, strict=True)]
    return np.where(delivered, sums, 0), residuals


@st.composite
def draw_problem(draw: Any) -> tuple[list[Array], int]:
    """Draw whole numbers (their sums are exact) on 1 to 9 nodes, with many or few ties, and k."""
    nodes, length = draw(st.integers(1, 9)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.5, 3, 1000, 2**18]))
    totals = [np.round(rng.standard_normal(length) * scale).astype(np.float32) for _ in range(nodes)]
    if draw(st.booleans()):  # nodes whose largest entries lie in different places
        for node, total in enumerate(totals):
            total[: length * node // nodes] = 0
    return totals, draw(st.integers(1, length))


@settings(max_examples=30, deadline=None)
@given(draw_problem())
def test_the_exchange_follows_its_definition(problem: tuple[list[Array], int]) -> None:
    totals, k = problem
    expected_sum, expected_residuals = compute_by_definition(totals, k)
    parts, residuals, _ = exchange(totals, k)
    for part in parts:
        assert len(part.indices) == k
        assert (np.diff(part.indices.astype(np.int64)) > 0).all()
        assert (deliver(part, len(expected_sum)) == expected_sum).all()
    for residual, expected_residual in zip(residuals, expected_residuals, strict=True):
        assert (residual == expected_residual).all()


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
        parts, residuals, _ = exchange([a + b for a, b in zip(inputs, residuals, strict=True)], k, wire)
        assert len({(part.indices.tobytes(), part.values.tobytes()) for part in parts}) == 1, "nodes differ"
        received += deliver(parts[0], length)
    lost = np.abs(received + np.sum(residuals, axis=0, dtype=np.float64) - summed).max()
    assert lost <= 1e-4 * max(np.abs(summed).max(), 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_a_value_that_is_not_finite_reaches_all_nodes(nodes: int, value: float) -> None:
    for culprit in range(nodes):
        totals = [np.random.default_rng(node).standard_normal(50).astype(np.float32) for node in range(nodes)]
        totals[culprit][7] = value
        parts, _, _ = exchange(totals, 3, "bf16")
        assert not any(np.isfinite(part.values).all() for part in parts)


ENTRY_BYTES, MEASURING_BYTES = 4, 3000
"""The size of an entry of bf16, and the most bytes that a node sends to measure bounds and the threshold."""


def compute_most_sent(k: int, nodes: int) -> float:
    """Return the bytes of the paper's bound, 6k(P-1)/P numbers (an entry is two numbers), plus the headers of all
    messages."""
    return 3 * k * (nodes - 1) / nodes * ENTRY_BYTES + 2 * (nodes - 1) * 40 + MEASURING_BYTES


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 17])
def test_no_node_sends_more_than_the_bound_of_the_paper(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    common = rng.standard_normal(40_000) ** 3  # gradients of nodes have large entries in the same places
    common[:4_000] *= 20
    totals = [(common + rng.standard_normal(40_000)).astype(np.float32) for _ in range(nodes)]
    _, _, network = exchange(totals, 4_000, "bf16")
    assert max(network.sent_bytes) <= compute_most_sent(4_000, nodes)
    declared = find_algorithm("oktopk").traffic(Workload(nodes, 1, 40_000, 0.1)).sent
    assert np.mean(network.sent_bytes) <= 1.1 * declared
    assert np.mean(network.sent_bytes) >= 0.5 * declared


@pytest.mark.parametrize("nodes", [3, 8, 18])
def test_uneven_regions_cannot_break_the_bound(nodes: int) -> None:
    """Every node selects entries of one region only, and all delivered entries belong to one owner."""
    totals = [np.zeros(40_000, np.float32) for _ in range(nodes)]
    for node, total in enumerate(totals):
        start = 38_000 * node // nodes
        total[start : start + 1_000] = 1000 if node == nodes // 2 else 1
    parts, _, network = exchange(totals, 1_000, "bf16")
    assert max(network.sent_bytes) <= compute_most_sent(1_000, nodes)
    assert (parts[0].values == 1000).all()


def test_the_bytes_do_not_grow_with_the_nodes() -> None:
    sent = [find_algorithm("oktopk").traffic(Workload(nodes, 8, 25_600_000)).sent for nodes in (16, 64, 4096)]
    assert sent[1] < 1.15 * sent[0]
    assert sent[2] < sent[0] + 4096 * 8 * 100  # headers
    assert find_algorithm("oktopk").traffic(Workload(1, 8, 25_600_000)).sent == 0
