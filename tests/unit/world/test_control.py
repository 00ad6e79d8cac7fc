"""Messages that reach every rank, in simulated worlds of thousands of ranks: who receives them, after how many hops,
with how many messages."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.control import ANSWER, Answers, Roll, build_timeout, list_neighbours, name_ranks


def build_answer(rank: int, collectives: int = 5, what: bytes = b"all-reduce") -> Answers:
    row = np.zeros(1, ANSWER)
    row["rank"], row["what"] = rank, what
    row["counts"][0, 0] = collectives
    return row


def count_hops(size: int, silent: set[int], first: int) -> tuple[set[int], int]:
    """Return the ranks that hear news of rank `first`, and the number of hops until the last rank hears it."""
    informed, latest, count = {first}, {first}, 0
    while latest := {other for rank in latest for other in list_neighbours(rank, size)} - informed - silent:
        informed |= latest
        count += 1
    return informed, count


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 65, 100, 128, 1000, 4096])
def test_news_reaches_all_ranks_in_few_hops_and_messages(size: int) -> None:
    informed, count = count_hops(size, set(), first=size // 3)
    assert informed == set(range(size))
    assert count <= 6
    assert len(list_neighbours(0, size)) <= 63  # 23 at 4,096
    everyone = [set(list_neighbours(rank, size)) for rank in range(size)]
    assert all(rank in everyone[other] for rank in range(size) for other in everyone[rank])


@given(data=st.data(), size=st.integers(2, 4096))
def test_news_goes_around_nodes_that_are_silent(data: st.DataObject, size: int) -> None:
    """Up to half of the nodes, of 1 to 64 ranks each."""
    node = data.draw(st.integers(1, 64))
    nodes = -(-size // node)
    dead = data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes // 2))
    silent = {rank for rank in range(size) if rank // node in dead}
    present = set(range(size)) - silent
    assert count_hops(size, silent, min(present))[0] == present


@given(seed=st.integers(0, 2**32), size=st.integers(65, 4096))
def test_news_goes_around_scattered_ranks_that_are_silent(seed: int, size: int) -> None:
    chance = random.Random(seed)
    silent = set(chance.sample(range(size), size // 5))
    present = set(range(size)) - silent
    assert count_hops(size, silent, min(present))[0] == present


@given(data=st.data(), size=st.integers(2, 70))
def test_a_roll_call_finds_the_silent_ranks_and_those_behind(data: st.DataObject, size: int) -> None:
    """All ranks pass on their answers in rounds, until no rank has a new answer."""
    silent = data.draw(st.sets(st.integers(0, size - 1), max_size=size // 3))
    behind = data.draw(st.sets(st.integers(0, size - 1), max_size=3)) - silent
    rolls = {rank: Roll(build_answer(rank, 4 if rank in behind else 5)) for rank in range(size) if rank not in silent}
    while answers := {rank: answers for rank, roll in rolls.items() if (answers := roll.take_new()).size}:
        for rank, rows in answers.items():
            for other in list_neighbours(rank, size):
                if other in rolls:
                    rolls[other].add(rows)
    for roll in rolls.values():
        assert roll.list_missing(size, 0, 5) == sorted(silent | behind)


def test_a_roll_of_4096_ranks_names_the_missing_one_and_those_that_wait_elsewhere() -> None:
    roll = Roll(build_answer(0))
    for rank in range(1, 4096):
        if rank != 2049:
            assert roll.add(build_answer(rank, what=b"barrier()" if rank in (7, 9) else b"all-reduce"))
    assert not roll.add(build_answer(7))
    assert len(roll.take_new()) == 4095
    assert not len(roll.take_new())
    assert roll.list_missing(4096, 0, 5) == [2049]
    assert roll.group_other_waits("all-reduce") == {"barrier()": [7, 9]}


def test_many_ranks_are_named_in_one_line() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ("an agreement (collective 5)", "took different branches"),
        ("all-reduce 'flat' (collective 6)", "the network"),  # ahead: it has what it needs of collective 5
        ("barrier() (call 2)", "the network"),  # another thread of that rank
    ],
)
def test_ranks_in_different_places_of_the_same_wait_took_different_branches(other: str, cause: str) -> None:
    error = build_timeout("all-reduce 'hitopk' (collective 5)", 0, (), {other: (1,)}, 3.0)
    assert cause in str(error)
    assert f"rank 1 waited for {other}" in str(error)
