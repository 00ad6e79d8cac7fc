"""Messages and reductions over TCP connections of our own."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linked_ranks import LARGE, advance_until, connect, fill

from topkube import kernels
from topkube.arrays import BFLOAT16
from topkube.links import ANY_LENGTH_TAG

SENDS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 1, 7, 5000, 3_000_000]))
"""Sender, receiver, tag, bytes."""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SENDS.filter(lambda send: send[0] != send[1]), max_size=12),
    st.sampled_from([1, 1, 3]),
    st.randoms(use_true_random=False),
)
def test_messages_of_a_tag_arrive_in_order_whatever_the_receivers_wait_for_first(
    sends: Any, lanes: int, random: Any
) -> None:
    """Receivers post their receives in any order of tags, before or after the messages have arrived."""
    ranks = connect(3, lanes)
    work = [("send", number, *send) for number, send in enumerate(sends)]
    receives = [("receive", number, *send) for number, send in enumerate(sends)]
    random.shuffle(receives)
    seen: dict[tuple[int, int, int], list[int]] = {}
    for number, (source, target, tag, _) in enumerate(sends):
        seen.setdefault((source, target, tag), []).append(number)
    messages, arrays, expected = [], {}, {}
    steps = work + receives
    if random.random() < 0.5:  # some receives come before sends
        order = sorted(range(len(steps)), key=lambda i: random.random() if steps[i][0] == "receive" else i / 100)
        steps = [steps[i] for i in order]
    for kind, number, source, target, tag, size in steps:
        if kind == "send":
            messages.append((ranks[source], ranks[source].Isend(fill(size, number), target, tag)))
        else:
            number = seen[source, target, tag].pop(0)  # the first that this rank has not received
            arrays[number] = np.zeros(sends[number][3], np.uint8)
            expected[number] = fill(sends[number][3], number)
            messages.append((ranks[target], ranks[target].Irecv(arrays[number], source, tag)))
        if random.random() < 0.5:
            for one in ranks:
                one.advance()
    batches = [one.gather([message]) for one, message in messages]
    advance_until(ranks, lambda: all(batch.are_complete for batch in batches))
    for number, array in arrays.items():
        assert (array[: expected[number].size] == expected[number]).all()


def test_bytes_that_nothing_waits_for_stay_in_the_socket() -> None:
    """A rank that is late needs no memory for what others send it."""
    ranks = connect(2)
    sent = ranks[0].gather([ranks[0].Isend(fill(LARGE, 0), 1, 5)])
    first = ranks[1].gather([ranks[1].Irecv(np.zeros(1, np.uint8), 0, 4)])
    for _ in range(50):
        ranks[0].advance()
    assert not sent.are_complete
    ranks[0].Isend(fill(1, 1), 1, 4)  # behind it, and rank 1 waits for this one: it has to read on
    advance_until(ranks, lambda: first.are_complete)
    assert sent.are_complete
    array = np.zeros(LARGE, np.uint8)
    late = ranks[1].gather([ranks[1].Irecv(array, 0, 5)])
    assert late.are_complete
    assert (array == fill(LARGE, 0)).all()

    sent = ranks[0].gather([ranks[0].Isend(fill(LARGE, 2), 1, 5)])
    for _ in range(50):
        ranks[0].advance()
        ranks[1].advance()
    assert not sent.are_complete  # rank 1 waits for nothing


def test_copies_of_links_have_tags_of_their_own() -> None:
    ranks = connect(2)
    copies = [one.duplicate() for one in ranks]
    ranks[0].Isend(fill(3, 0), 1, 1)
    copies[0].Isend(fill(3, 1), 1, 1)
    arrays = [np.zeros(3, np.uint8) for _ in range(2)]
    batch = ranks[1].gather([copies[1].Irecv(arrays[1], 0, 1), ranks[1].Irecv(arrays[0], 0, 1)])
    advance_until(ranks, lambda: batch.are_complete)
    assert all((array == fill(3, number)).all() for number, array in enumerate(arrays))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
@pytest.mark.parametrize("size", [1, 2, 5, 100_003, 2_000_001])
@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_reduction_has_the_bits_of_a_sum_in_the_order_of_the_ranks(
    dtype: Any, size: int, is_gathered: bool, lanes: int
) -> None:
    """Also of several reductions that are under way at the same time, begun in different orders."""
    ranks, count = connect(3, lanes), 3
    values = [
        [np.random.default_rng([rank, number]).standard_normal(size).astype(dtype) for rank in range(3)]
        for number in range(count)
    ]
    expected = [kernels.sum_(np.empty(size, dtype), inputs, 1 / 3) for inputs in values]
    arrays = [[array.copy() for array in inputs] for inputs in values]
    begun = []
    for rank, one in enumerate(ranks):
        for number in [(rank + i) % count for i in range(count)]:
            buffer = np.empty(2 * -(-size // 3), dtype)
            begun.append(one.begin_reduction(arrays[number][rank], buffer, 1 / 3, number, is_gathered))
            one.advance()
    advance_until(ranks, lambda: all(reduction.are_complete for reduction in begun))
    assert all(reduction.is_finite for reduction in begun)
    for number in range(count):
        for rank in range(3):
            own = slice(size * rank // 3, size * (rank + 1) // 3) if not is_gathered else slice(None)
            assert arrays[number][rank][own].tobytes() == expected[number][own].tobytes()


@pytest.mark.parametrize(("size", "lanes"), [(8, 1), (8, 3), (1 << 20, 3)])
def test_a_reduction_tells_the_owner_of_a_segment_that_it_is_not_finite(size: int, lanes: int) -> None:
    ranks = connect(2, lanes)
    for place in (size // 2, size - 1):  # in the first and in the last part of the second segment
        arrays = [np.ones(size, np.float32) for _ in range(2)]
        arrays[0][place] = np.nan
        begun = [one.begin_reduction(arrays[one.rank], np.empty(size // 2, np.float32), 1.0, 0, True) for one in ranks]
        advance_until(ranks, lambda begun=begun: all(reduction.are_complete for reduction in begun))
        assert [reduction.is_finite for reduction in begun] == [True, False]
        assert all(np.isnan(array[place]) for array in arrays)


def test_a_thread_that_waits_wakes_up_when_other_lanes_complete_a_message() -> None:
    ranks = connect(2, lanes=4)
    for number in range(20):
        array = np.zeros(3 << 20, np.uint8)
        batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
        sent = ranks[0].gather([ranks[0].Isend(fill(array.size, number), 1, 1)])
        sender = threading.Thread(target=advance_until, args=(ranks[:1], lambda sent=sent: sent.are_complete))
        sender.start()
        start = time.monotonic()
        while not batch.are_complete:
            ranks[1].wait(20)
        assert time.monotonic() - start < 10
        sender.join()
        assert (array == fill(array.size, number)).all()


def test_lanes_miss_no_order() -> None:
    """Orders come while the threads of the lanes wake up, work and go to sleep. Messages of one byte make these moments
    a large part of their work."""
    ranks = connect(2, lanes=3)
    start, slowest = time.monotonic(), 0.0
    while (begun := time.monotonic()) < start + 2:
        batches = [one.try_lanes(1 - one.rank) for one in ranks]
        advance_until(ranks, lambda batches=batches: all(batch.are_complete for batch in batches))
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 5  # the threads sleep for 10 s if nothing wakes them


def test_messages_of_any_length_are_not_cut() -> None:
    ranks = connect(2, lanes=4)
    array = np.zeros(LARGE, np.uint8)
    batch = ranks[1].gather([ranks[1].Irecv(array, 0, ANY_LENGTH_TAG)])
    ranks[0].Isend(fill(8, 0), 1, ANY_LENGTH_TAG)
    advance_until(ranks, lambda: batch.are_complete)
    assert (array[:8] == fill(8, 0)).all()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_message_that_is_too_short_is_reported(lanes: int) -> None:
    """Otherwise, old bytes would stay in the rest of the array."""
    ranks = connect(2, lanes=lanes)
    batch = ranks[1].gather([ranks[1].Irecv(np.zeros(1 << 20, np.uint8), 0, 1)])
    ranks[0].Isend(fill((1 << 20) - 8, 0), 1, 1)
    advance_until(ranks, lambda: bool(ranks[1].list_broken()))
    assert not batch.are_complete


@pytest.mark.parametrize(("sent", "room"), [(9, 8), (LARGE, 8)])
def test_a_message_that_is_too_long_is_reported(sent: int, room: int) -> None:
    ranks = connect(2)
    array = np.zeros(room, np.uint8)
    batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
    ranks[0].Isend(fill(sent, 0), 1, 1)
    advance_until(ranks, lambda: bool(ranks[1].list_broken()))
    assert ranks[1].list_broken() == [(0, f"sent a message of {sent} bytes, but this rank expects {room}")]
    assert not batch.are_complete
    assert not array.any()


def test_reductions_of_different_lengths_are_reported() -> None:
    ranks = connect(2)
    sizes = [8, 6]
    begun = [
        one.begin_reduction(np.ones(sizes[one.rank], np.float32), np.empty(4, np.float32), 1.0, 0, True)
        for one in ranks
    ]
    advance_until(ranks, lambda: all(one.list_broken() for one in ranks))
    assert not any(reduction.are_complete for reduction in begun)


def test_a_wait_ends_when_messages_are_complete_and_when_another_thread_wakes_it() -> None:
    ranks = connect(2)
    batch = ranks[1].gather([ranks[1].Irecv(np.zeros(4, np.uint8), 0, 1)])

    def send() -> None:
        ranks[0].Isend(fill(4, 0), 1, 1)
        advance_until(ranks[:1], lambda: batch.are_complete)

    def wait() -> float:
        start = time.monotonic()
        ranks[1].wait(20)
        return time.monotonic() - start

    with_thread = threading.Thread(target=send)
    with_thread.start()
    processor = time.thread_time()
    while not batch.are_complete:
        assert wait() < 10
    with_thread.join()
    ranks[1].wait(0)
    waker = threading.Timer(0.2, ranks[1].wake)
    waker.start()
    assert 0.1 < wait() < 10
    assert time.thread_time() - processor < 0.1  # it slept
    ranks[1].wake()  # while nothing waits: the next wait ends at once
    assert wait() < 10
    waker.join()


@pytest.mark.parametrize("lanes", [1, 2])
def test_two_threads_may_wait_at_the_same_time(lanes: int) -> None:
    """A script may reduce its loss while the communication thread gathers. The bytes of both arrive together, and one
    thread takes them."""
    ranks, rounds = connect(2, lanes), 30
    first = ranks[1].gather([ranks[1].Irecv(np.zeros(4, np.uint8), 0, 0)])
    ranks[0].Isend(fill(4, 0), 1, 0)
    advance_until(ranks, lambda: first.are_complete)
    together, slowest = threading.Barrier(3), list[float]()

    def receive(tag: int) -> None:
        array = np.zeros(4, np.uint8)
        for _ in range(rounds):
            batch = ranks[1].gather([ranks[1].Irecv(array, 0, tag)])
            together.wait(60)
            start = time.monotonic()
            while not batch.are_complete:
                ranks[1].wait(20)
            slowest.append(time.monotonic() - start)

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        together.wait(60)
        time.sleep(0.002)  # most of the time, both threads sleep now
        ranks[0].Isend(fill(4, 1), 1, 1)
        ranks[0].Isend(fill(4, 2), 1, 2)
        ranks[0].advance()
    for thread in threads:
        thread.join(60)
    assert len(slowest) == 2 * rounds
    assert max(slowest) < 10


@pytest.mark.parametrize("spinning", [0.0, 0.01])
def test_a_thread_that_sleeps_learns_that_another_begins_to_wait(spinning: float) -> None:
    """The other thread may take the message of the one that sleeps, which has to notice it: not after the 20 s that it
    sleeps when it is alone."""
    ranks, rounds = connect(2), 40
    arrays = [np.zeros(4, np.uint8) for _ in range(2)]
    connected = ranks[1].gather([ranks[1].Irecv(arrays[0], 0, 2)])
    ranks[0].Isend(fill(4, 2), 1, 2)
    advance_until(ranks, lambda: connected.are_complete)
    together, has_first, slowest = threading.Barrier(3), threading.Semaphore(0), list[float]()

    def receive(number: int) -> None:
        for _ in range(rounds):
            batch = ranks[1].gather([ranks[1].Irecv(arrays[number], 0, number)])
            together.wait(60)
            time.sleep(0.003 * number)  # the first thread sleeps by now, in most rounds
            start = time.monotonic()
            while not batch.are_complete:
                ranks[1].wait(20, spinning * number)
            slowest.append(time.monotonic() - start)
            if number == 0:
                has_first.release()

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        together.wait(60)
        time.sleep(0.004)
        ranks[0].Isend(fill(4, 0), 1, 0)
        ranks[0].advance()
        assert has_first.acquire(timeout=60)
        ranks[0].Isend(fill(4, 1), 1, 1)
        ranks[0].advance()
    for thread in threads:
        thread.join(60)
    assert len(slowest) == 2 * rounds
    assert max(slowest) < 5


def test_a_wake_reaches_every_thread_that_waits() -> None:
    ranks, ended = connect(2), list[float]()
    ranks[1].gather([ranks[1].Irecv(np.zeros(4, np.uint8), 0, 0)])

    def wait() -> None:
        ranks[1].wait(0)
        start = time.monotonic()
        ranks[1].wait(20)
        ended.append(time.monotonic() - start)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    ranks[1].wake()
    for thread in threads:
        thread.join(60)
    assert max(ended) < 10


def test_a_thread_that_never_waits_sees_the_end_of_a_long_message() -> None:
    """`wait` has the kernel report a long message in large parts; the last part is a small one."""
    ranks = connect(2)
    array = np.zeros((1 << 20) + 5000, np.uint8)
    batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
    ranks[0].Isend(fill(array.size - 5000, 0), 1, 2)  # no end of the message that rank 1 waits for
    ranks[0].advance()
    ranks[1].wait(0.05)
    ranks[0].Isend(fill(array.size, 1), 1, 1)
    ranks[1].wait(0.001)
    advance_until(ranks, lambda: batch.are_complete)
    assert (array == fill(array.size, 1)).all()


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_rank_knows_what_is_not_sent_and_what_nobody_awaits(lanes: int) -> None:
    """A long message stays in the sockets until the other rank waits for it, which sees its tag."""
    first, second = connect(2, lanes)
    other = second.duplicate()
    assert first.has_sent_all()
    sent = first.gather([first.Isend(fill(LARGE, 1), 1, 7)])
    assert not first.has_sent_all()
    answer, received = np.zeros(1, np.uint8), np.zeros(LARGE, np.uint8)
    asked = second.gather([second.Irecv(answer, 0, 3)])
    advance_until([first, second], lambda: 7 in second.list_unawaited_tags())
    assert other.list_unawaited_tags() == []  # it has tags of its own
    arrived = second.gather([second.Irecv(received, 0, 7)])
    advance_until([first, second], lambda: arrived.are_complete and sent.are_complete and first.has_sent_all())
    assert second.list_unawaited_tags() == []
    said = first.gather([first.Isend(answer, 1, 3)])
    advance_until([first, second], lambda: asked.are_complete and said.are_complete)
    assert (received == fill(LARGE, 1)).all()
