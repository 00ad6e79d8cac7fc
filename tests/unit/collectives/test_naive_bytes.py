"""The bytes that `naive` counts on each rank add up to those of its declaration, below and above the limit of pairwise
exchanges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from topkube.algorithms import Workload, find_algorithm
from topkube.collectives.sparse import count_sent_bytes

ROW_BYTES = 600
"""The bytes of 100 entries of 6 bytes."""


def make_world(nodes: int, slots: int, rank: int) -> Any:
    node_ranks = [tuple(range(node * slots, (node + 1) * slots)) for node in range(nodes)]
    return SimpleNamespace(rank=rank, size=nodes * slots, node=rank // slots, node_ranks=node_ranks)


@pytest.mark.parametrize(("nodes", "slots"), [(1, 4), (1, 32), (2, 2), (2, 8), (4, 8), (16, 8), (64, 1)])
def test_counted_bytes_are_those_of_the_declaration(nodes: int, slots: int) -> None:
    counted = [count_sent_bytes(make_world(nodes, slots, rank), ROW_BYTES) for rank in range(nodes * slots)]
    for node in range(nodes):
        sent = sum(rank_bytes["inter"] for rank_bytes in counted[node * slots : (node + 1) * slots])
        assert sent == find_algorithm("naive").traffic(Workload(nodes, slots, 10_000, 0.01, "fp32")).sent
    assert all(sum(rank_bytes.values()) == (nodes * slots - 1) * ROW_BYTES for rank_bytes in counted)
