"""All-reduces and all-gathers among many ranks, with all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from message_network import SimulatedNetwork
from topkube.algorithms import cost
from topkube.algorithms.cost import PAIRWISE_LIMIT, all_reduce_messages, count_wider_bytes, list_partners, list_rounds
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.rounds import (
    all_gather,
    all_reduce,
    count_buffer_elements,
    find_own_segment,
    gather_rows,
    reduce_scatter,
)

RANKS = st.one_of(st.integers(17, 40), st.sampled_from([64, 97, 128, 256, 257]))


def reduce(exchange: Any, arrays: list[Array], scale: float) -> tuple[list[Array], SimulatedNetwork, list[bool]]:
    """Return the result of each rank, the network, and what each rank reported."""
    network, results = SimulatedNetwork(len(arrays), is_exact=True), [array.copy() for array in arrays]
    room, finite = count_buffer_elements(len(arrays[0]), len(arrays)), list[bool]()
    network.run(
        [
            exchange(comm, result, np.empty(room, result.dtype), 0, finite.append, scale)
            for comm, result in zip(network.comms, results, strict=True)
        ]
    )
    return results, network, finite


def make_integers(ranks: int, length: int, dtype: Any) -> list[Array]:
    """Return arrays whose sums are exact in float32."""
    return [
        np.random.default_rng(rank).integers(-8, 9, length).astype(np.float32).astype(dtype) for rank in range(ranks)
    ]


@settings(max_examples=40, deadline=None)
@given(RANKS, st.integers(0, 700), st.sampled_from([np.float32, np.float16, BFLOAT16]))
def test_the_sum_of_many_ranks_arrives_everywhere(ranks: int, length: int, dtype: Any) -> None:
    """Also if some ranks have an empty segment."""
    arrays = make_integers(ranks, length, dtype)
    results, network, finite = reduce(all_reduce, arrays, 0.5)
    expected = (0.5 * sum(array.astype(np.float32) for array in arrays)).astype(np.float32).astype(dtype)
    for result in results:
        assert result.tobytes() == expected.tobytes()
    assert finite == [True] * ranks
    whole = 2 * (ranks - 1) * length * np.dtype(dtype).itemsize
    assert np.dtype(dtype).itemsize == 2 or sum(network.sent_bytes) == whole  # as around a ring


@settings(max_examples=20, deadline=None)
@given(RANKS, st.integers(1, 300))
def test_halves_are_the_whole(ranks: int, length: int) -> None:
    arrays = [np.random.default_rng(rank).standard_normal(length).astype(np.float32) for rank in range(ranks)]
    whole, _, _ = reduce(all_reduce, arrays, 1 / ranks)
    halves, network, _ = reduce(reduce_scatter, arrays, 1 / ranks)
    for comm, half, expected in zip(network.comms, halves, whole, strict=True):
        own = slice(*find_own_segment(comm, length))
        assert half[own].tobytes() == expected[own].tobytes()
    network.run([all_gather(comm, half, 1) for comm, half in zip(network.comms, halves, strict=True)])
    for half, expected in zip(halves, whole, strict=True):
        assert half.tobytes() == expected.tobytes() == whole[0].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 16, 17, 20, 130])
def test_rows_of_all_ranks_are_gathered(ranks: int) -> None:
    network = SimulatedNetwork(ranks, is_exact=True)
    everyone = np.random.default_rng(0).integers(0, 256, (ranks, 24), np.uint8)
    own = [np.where(np.arange(ranks)[:, None] == rank, everyone, 0).astype(np.uint8) for rank in range(ranks)]
    network.run([gather_rows(comm, rows, 0) for comm, rows in zip(network.comms, own, strict=True)])
    assert all((rows == everyone).all() for rows in own)


def test_rows_may_be_a_tensor() -> None:
    """As on a GPU, if MPI takes its memory."""
    for ranks in (3, 20):
        network = SimulatedNetwork(ranks, is_exact=True)
        everyone = [torch.zeros(ranks, 8, dtype=torch.uint8) for _ in range(ranks)]
        for rank, rows in enumerate(everyone):
            rows[rank] = rank + 1
        network.run([gather_rows(comm, rows, 0) for comm, rows in zip(network.comms, everyone, strict=True)])
        assert all((rows == torch.arange(1, ranks + 1)[:, None]).all() for rows in everyone)


@pytest.mark.parametrize("ranks", [2, 5, 17, 20, 40, 257])
def test_ranks_greet_all_ranks_that_they_exchange_values_with(ranks: int) -> None:
    """Among few ranks, these are all others. Neighbours, for rings, are always among them."""
    _, network, _ = reduce(all_reduce, [np.ones(ranks, np.float32)] * ranks, 1.0)
    pairs = {(source, target) for source, target, _ in network.messages}
    partners = {(rank, partner) for rank in range(ranks) for partner in list_partners(rank, ranks)}
    assert pairs <= partners == {(b, a) for a, b in partners}
    assert all((rank, (rank + 1) % ranks) in partners for rank in range(ranks))
    assert ranks > 16 or len(partners) == ranks * (ranks - 1)
    assert len(partners) / ranks <= 75


@pytest.mark.parametrize("place", [0, 3, 399])
def test_the_owner_of_a_segment_knows_that_it_is_not_finite(place: int) -> None:
    arrays = [np.ones(400, np.float32) for _ in range(20)]
    arrays[7][place] = np.nan
    finite: dict[int, bool] = {}
    network = SimulatedNetwork(20, is_exact=True)
    network.run(
        [
            all_reduce(comm, x, np.empty(400, np.float32), 0, lambda flag, rank=comm.rank: finite.update({rank: flag}))
            for comm, x in zip(network.comms, arrays, strict=True)
        ]
    )
    assert [rank for rank, is_finite in finite.items() if not is_finite] == [place // 20]


@pytest.mark.parametrize(("dtype", "large"), [(BFLOAT16, 256.0), (np.float16, 2048.0)])
@pytest.mark.parametrize("ranks", [17, 20, 256])
def test_partial_sums_keep_small_values(dtype: Any, large: float, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type cannot add 1 to `large`. Partial sums are float32, so that no 1 is lost."""
    arrays = [np.full(3 * ranks + 5, large if rank == 0 else 1.0, np.float32).astype(dtype) for rank in range(ranks)]
    results, network, _ = reduce(all_reduce, arrays, 0.5)
    elements = len(arrays[0])
    expected_bytes = 2 * 2 * elements * (ranks - 1) / ranks + count_wider_bytes(2, elements, ranks)
    monkeypatch.setattr(cost, "PAIRWISE_LIMIT", ranks)  # one round, in the order of the ranks
    expected, _, _ = reduce(all_reduce, arrays, 0.5)
    for result in results:
        assert result.tobytes() == expected[0].tobytes()
    assert sum(network.sent_bytes) / ranks == pytest.approx(expected_bytes, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 16, 17, 64, 100, 256, 257, 1000, 4096, 5000])
def test_no_round_has_more_partners_than_one_receiver_bears(ranks: int) -> None:
    rounds = list_rounds(ranks)
    assert all(len(partners) < PAIRWISE_LIMIT for _, partners in rounds)
    held = 1
    for reach, partners in rounds:
        assert reach == held
        held += sum(count for _, count in partners)
    assert held == ranks
    assert all_reduce_messages(ranks) == 2 * len(rounds) <= 8
    assert len(rounds) == (1 if ranks <= 16 else 2 if ranks <= 256 else 3 if ranks <= 4096 else 4)


def test_thousands_of_ranks_add_up() -> None:
    arrays = [np.full(1500, rank % 7, np.float32) for rank in range(1500)]
    results, network, _ = reduce(all_reduce, arrays, 1.0)
    expected = float(sum(rank % 7 for rank in range(1500)))
    assert all((result == expected).all() for result in results)
    assert max(network.sent_bytes) <= 2 * 4 * 1500
