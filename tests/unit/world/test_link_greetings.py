"""Greetings over TCP connections of our own, and the sums of the values that they carry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linked_ranks import advance_until, connect, fill

from topkube import kernels
from topkube.arrays import BFLOAT16
from topkube.links import Links

ROOM = 100_000


def list_others(one: Links) -> list[int]:
    return [(one.rank + i) % one.size for i in range(1, one.size)]


def draw(rank: int, number: int, size: int, dtype: Any) -> Any:
    return np.random.default_rng([rank, number]).standard_normal(size).astype(dtype)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 4),
    lanes=st.sampled_from([1, 3]),
    dtype=st.sampled_from([np.dtype(np.float32), BFLOAT16, np.dtype(np.float16)]),
    sizes=st.lists(st.sampled_from([0, 1, 3, 100, 20_001]), min_size=1, max_size=4),
    is_in_one_round=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_sums_have_the_bits_of_a_sum_in_the_order_of_the_ranks(
    ranks: int, lanes: int, dtype: Any, sizes: list[int], is_in_one_round: bool, random: Any
) -> None:
    """Also of several calls that are under way at the same time, while some ranks are late, and between other
    greetings. The values of a call travel before the receiver has entered it."""
    links, arrays, begun = connect(ranks, lanes), {}, []
    steps = [(rank, number) for rank in range(ranks) for number in range(len(sizes))]
    random.shuffle(steps)
    order = {rank: iter(range(len(sizes))) for rank in range(ranks)}  # every rank enters its calls in their order
    for rank, _ in steps:
        number, one = next(order[rank]), links[rank]
        begun.append(one.greet(list_others(one), number, ROOM))
        arrays[rank, number] = draw(rank, number, sizes[number], dtype)
        x = arrays[rank, number]
        begun.append(
            one.greet_and_reduce(list_others(one), ~number % 2**64, ROOM, x, number, 1 / ranks, is_in_one_round)
        )
        if random.random() < 0.5:
            random.choice(links).advance()
    advance_until(links, lambda: all(greeting.are_complete for greeting in begun))
    assert not any(greeting.differs for greeting in begun)
    assert all(greeting.is_finite for greeting in begun)
    for number, size in enumerate(sizes):
        inputs = [draw(rank, number, size, dtype) for rank in range(ranks)]
        expected = kernels.sum_(np.empty(size, dtype), inputs, 1 / ranks)
        assert all(arrays[rank, number].tobytes() == expected.tobytes() for rank in range(ranks))


@pytest.mark.parametrize("is_in_one_round", [True, False])
@pytest.mark.parametrize("lengths", [(64, 64, 64), (64, 64, 65), (64, 10_000, 64), (64, 0, 64)])
def test_ranks_that_entered_different_calls_see_it_and_go_on(lengths: tuple[int, ...], is_in_one_round: bool) -> None:
    """No rank uses the values of another call, and nothing of them is left for the next."""
    links = connect(3)
    arrays = [np.full(length, rank + 1.0, np.float32) for rank, length in enumerate(lengths)]
    begun = [
        one.greet_and_reduce(list_others(one), signature, ROOM, x, 5, 1.0, is_in_one_round)
        for one, signature, x in zip(links, [7, 8, 7], arrays, strict=True)
    ]
    advance_until(links, lambda: all(greeting.are_complete for greeting in begun))
    assert all(greeting.differs for greeting in begun)
    assert all((x == rank + 1).all() for rank, x in enumerate(arrays))
    plain = [one.greet(list_others(one), 9, ROOM) for one in links]
    advance_until(links, lambda: all(greeting.are_complete for greeting in plain))
    assert not any(greeting.differs for greeting in plain)
    received = np.zeros(3, np.uint8)
    messages = [links[0].Isend(fill(3, 1), 1, 5), links[1].Irecv(received, 0, 5)]
    batches = [links[0].gather(messages[:1]), links[1].gather(messages[1:])]
    advance_until(links, lambda: all(batch.are_complete for batch in batches))
    assert (received == fill(3, 1)).all()


def test_a_hash_without_values_differs_from_one_with_values() -> None:
    links = connect(2)
    x = np.ones(8, np.float32)
    begun = [links[0].greet([1], 3, ROOM), links[1].greet_and_reduce([0], 4, ROOM, x, 0, 1.0, False)]
    advance_until(links, lambda: all(greeting.are_complete for greeting in begun))
    assert all(greeting.differs for greeting in begun)
    assert (x == 1).all()


@pytest.mark.parametrize("is_in_one_round", [True, False])
def test_the_owner_of_a_part_sees_that_it_is_not_finite(is_in_one_round: bool) -> None:
    links = connect(2)
    arrays = [np.ones(8, np.float32) for _ in links]
    arrays[0][7] = np.inf  # a part of rank 1
    begun = [
        one.greet_and_reduce(list_others(one), 1, ROOM, x, 0, 1.0, is_in_one_round)
        for one, x in zip(links, arrays, strict=True)
    ]
    advance_until(links, lambda: all(greeting.are_complete for greeting in begun))
    assert [greeting.is_finite for greeting in begun] == [not is_in_one_round, False]


def test_neighbours_on_a_ring_greet_each_other() -> None:
    """With many nodes, only neighbours do. A ring of two has the same neighbour on both sides."""
    for ranks in (2, 4):
        links = connect(ranks)
        begun = [one.greet([(one.rank + 1) % ranks, (one.rank - 1) % ranks], 6, 0) for one in links]
        advance_until(links, lambda links=links, begun=begun: all(greeting.are_complete for greeting in begun))
        assert not any(greeting.differs for greeting in begun)


def test_a_sum_without_the_values_of_all_ranks_is_refused() -> None:
    links = connect(3)
    with pytest.raises(ValueError, match="all ranks"):
        links[0].greet_and_reduce([1], 0, ROOM, np.ones(4, np.float32), 0, 1.0, False)
    with pytest.raises(ValueError, match="no such rank"):
        links[0].greet([3], 0, ROOM)
    with pytest.raises(ValueError, match="no such rank"):
        links[0].greet([0], 0, ROOM)
    with pytest.raises(ValueError, match="all ranks"):
        links[0].greet_and_reduce([1, 1], 0, ROOM, np.ones(4, np.float32), 0, 1.0, False)


def test_values_that_arrive_late_do_not_touch_an_array_that_was_abandoned() -> None:
    """A rank gave up its call, and its script uses the array again."""
    links = connect(2)
    arrays = [np.ones(9, np.float32) for _ in links]
    late = links[0].greet_and_reduce([1], 1, ROOM, arrays[0], 0, 1.0, True)
    links[0].abandon(late)
    begun = links[1].greet_and_reduce([0], 1, ROOM, arrays[1], 0, 1.0, True)
    advance_until(links, lambda: begun.are_complete and late.are_complete)
    assert (arrays[0] == 1).all()
    assert (arrays[1] == 2).all()


def test_hashes_are_compared_before_the_sums_arrive() -> None:
    links = connect(2)
    connected = [one.greet(list_others(one), 0, ROOM) for one in links]
    advance_until(links, lambda: all(greeting.are_complete for greeting in connected))
    arrays = [np.ones(8, np.float32) for _ in links]
    begun = [
        one.greet_and_reduce(list_others(one), 1, ROOM, x, 0, 1.0, False) for one, x in zip(links, arrays, strict=True)
    ]
    advance_until(links[1:], lambda: begun[1].all_greeted.are_complete)
    assert not begun[1].differs
    assert not begun[1].are_complete  # rank 0 has not read the values, so it sent no sum
    advance_until(links, lambda: all(greeting.are_complete for greeting in begun))


def test_values_that_exceed_the_room_are_reported() -> None:
    links = connect(2)
    x = np.ones(8, np.float32)
    begun = [links[0].greet([1], 3, 0), links[1].greet_and_reduce([0], 4, 0, x, 0, 1.0, True)]
    advance_until(links, lambda: bool(links[0].list_broken()))
    assert "40 bytes" in links[0].list_broken()[0][1]
    assert not begun[0].are_complete


def test_greetings_are_in_the_order_of_the_calls() -> None:
    """Calls that differ in one place differ there only."""
    links, signatures = connect(2), [[1, 2, 3, 4], [1, 2, 9, 4]]
    begun = [
        [one.greet(list_others(one), value, 0) for value in own] for one, own in zip(links, signatures, strict=True)
    ]
    advance_until(links, lambda: all(greeting.are_complete for greetings in begun for greeting in greetings))
    assert [[greeting.differs for greeting in greetings] for greetings in begun] == [[False, False, True, False]] * 2
