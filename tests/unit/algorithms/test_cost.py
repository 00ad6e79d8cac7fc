"""The cost model: its bytes are those of the benchmarks' bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce import bounds
from topkube.algorithms import OWN, Machines, Workload, estimate_cost, find_algorithm, resolve

nodes, slots, lengths = st.integers(2, 200), st.integers(1, 8), st.integers(100_000, 10**9)


@given(nodes, slots, lengths, st.floats(0.0001, 1))
def test_bytes_are_those_of_the_benchmarks_bounds(m: int, n: int, d: int, density: float) -> None:
    machines = Machines(m, n, link=1e9, memory=1e10)
    sent = {algorithm.name: estimate_cost(algorithm, machines, d, density, "bf16").sent for algorithm in OWN}
    assert sent["flat"] == pytest.approx(bounds.count_ring_bytes(d, m, n))
    assert sent["hierarchical"] == sent["torus2d"] == pytest.approx(bounds.count_hierarchical_bytes(d, m))
    assert sent["hitopk"] == pytest.approx(bounds.count_hitopk_bytes(d, m, n, density, 4))
    assert sent["naive"] == pytest.approx(bounds.count_naive_bytes(d, m, n, density, 4))


def test_the_work_of_hitopk_inside_a_node_grows_with_its_entries() -> None:
    """With few entries, every rank writes a whole array and the ranks exchange entries. With more than a quarter of
    the bytes, each rank adds those of its shard, and dense shards are gathered."""
    elements, slots = 10**6, 8

    def count_arrays(nodes: int, name: str = "hitopk") -> float:
        workload = Workload(nodes, slots, elements)
        return find_algorithm(name).traffic(workload).memory / workload.array_bytes

    reduction_and_selection = (3 * slots - 1) + 3
    entries = 2 * 0.01  # of two nodes, as a share of the array: 4 bytes each, and 16 when they are decoded
    expected = reduction_and_selection + 2 * (slots - 1) * entries + slots * (1 + 5 * entries)
    assert count_arrays(2) == pytest.approx(expected)
    dense_gather = 2 * (slots - 1)
    assert count_arrays(26) == pytest.approx(reduction_and_selection + 1 + 5 * 26 * 0.01 + dense_gather)
    assert count_arrays(16) > count_arrays(16, "hierarchical")


def test_work_inside_a_node_grows_with_the_messages_of_all_ranks() -> None:
    """Every rank of `naive` decodes and adds the entries of all ranks, and every shard of `signsgd` the signs of all
    nodes."""
    slots = 8

    def count_more_arrays(name: str, few: int, many: int) -> float:
        loads = [Workload(nodes, slots, 10**6) for nodes in (many, few)]
        large, small = (find_algorithm(name).traffic(load).memory / load.array_bytes for load in loads)
        return large - small

    ranks, entries = (4096 - 64) * slots, 0.01  # of one rank, as a share of the array: 4 bytes each, 16 decoded
    passed_on = 2 * (slots - 1) * ranks * entries
    assert count_more_arrays("naive", 64, 4096) == pytest.approx(slots * ranks * 5 * entries + passed_on)
    assert count_more_arrays("signsgd", 64, 4096) == pytest.approx((4096 - 64) * (1 / 8 + 2 / 256) / 4, rel=1e-3)


@given(slots, lengths)
def test_one_node_sends_nothing(n: int, d: int) -> None:
    for algorithm in OWN:
        assert estimate_cost(algorithm, Machines(1, n, link=1e9, memory=1e10), d).sent == 0


@given(st.integers(1, 200), lengths, st.floats(0.0001, 1))
def test_auto_and_dense_are_dense_on_every_cluster(m: int, d: int, density: float) -> None:
    """Without measurements both are the dense algorithm of the fewest bytes, whatever the density."""
    assert resolve("dense", m, d, density).name == resolve("auto", m, d, density).name == "hierarchical"


def test_16_bits_between_nodes_halve_the_bytes_and_add_work_in_memory() -> None:
    machines, dense = Machines(4, 2, link=1e9, memory=1e10), find_algorithm("hierarchical")
    exact, narrow = (estimate_cost(dense, machines, 10**7, dense_wire=wire) for wire in ("fp32", "bf16"))
    assert narrow.sent == exact.sent / 2
    assert narrow.inside > exact.inside
    many = Machines(17, 2, link=1e9, memory=1e10)  # two rounds: 4 of 16 segments of the first half are partial sums
    exact, narrow = (estimate_cost(dense, many, 10**7, dense_wire=wire) for wire in ("fp32", "bf16"))
    assert narrow.sent == pytest.approx(exact.sent * (1 / 2 + 4 / 16 / 4))


def test_a_period_divides_what_nodes_send_but_not_the_gradients_within_a_node() -> None:
    machines, onebit = Machines(4, 2, link=1e9, memory=1e10), find_algorithm("onebit")
    every, fourth = (estimate_cost(onebit, machines, 10**7, period=period) for period in (1, 4))
    assert fourth.sent == every.sent / 4
    assert fourth.between == pytest.approx(every.between / 4)
    assert every.inside / 4 < fourth.inside < every.inside
    assert estimate_cost(find_algorithm("hitopk"), machines, 10**7, period=4) == estimate_cost(
        find_algorithm("hitopk"), machines, 10**7
    )
