"""The work queue: keys that wait, keys that threads work on, and appointments."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube_operator.watch import work_queue
from topkube_operator.watch.work_queue import WorkQueue

KEY = ("team", "train")


def test_one_thread_works_on_a_key_and_a_change_queues_it_again() -> None:
    queue = WorkQueue()
    queue.add(KEY)
    queue.add(KEY)
    assert queue.get() == KEY
    queue.add(KEY)
    queue.add(("team", "other"))
    assert queue.get() == ("team", "other")
    queue.done(("team", "other"))
    queue.done(KEY)
    assert queue.get() == KEY
    queue.done(KEY)
    assert queue.measure_oldest_wait() == 0
    threading.Timer(0.05, queue.close).start()
    assert queue.get() is None


def test_keys_that_wait_for_others_do_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of large jobs at the same time: the last one waits for a quarter of an hour. The operator was restarted
    every three minutes meanwhile."""
    now = 1000.0
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: now)
    queue = WorkQueue()
    keys = [("team", str(number)) for number in range(20)]
    for key in keys:
        queue.add(key)
    for key in keys[:-1]:
        assert queue.get() == key
        for _ in range(10):  # pods that take 50 s each: the job takes 500 s
            now += 50.0
            assert queue.measure_standstill() == 50.0
            queue.note_progress(key)
        queue.done(key)
    assert queue.measure_oldest_wait() == 19 * 500.0
    now += 130.0
    assert queue.measure_standstill() == 130.0, "no thread takes the last key"
    assert queue.get() == keys[-1]
    queue.add(keys[0])
    assert queue.get() == keys[0]
    now += 130.0
    queue.note_progress(keys[0])
    assert queue.measure_standstill() == 130.0, "one thread hangs, and another works"
    queue.done(keys[0])
    queue.done(keys[-1])
    queue.note_progress(keys[0])  # a late call
    now += 1000.0
    assert queue.measure_standstill() == 0


def test_the_earliest_of_several_appointments_counts() -> None:
    queue = WorkQueue()
    begun = time.monotonic()
    queue.add_after(KEY, 100)
    queue.add_after(KEY, 0.05)
    queue.add_after(KEY, 50)
    assert queue.get() == KEY
    assert 0.04 < time.monotonic() - begun < 45
    queue.done(KEY)
    queue.add_after(("team", "late"), 100)
    queue.add(("team", "soon"))
    assert queue.get() == ("team", "soon")


def test_an_appointment_that_an_earlier_one_replaces_is_not_kept() -> None:
    """A job has a deadline in 6 hours, and reports progress every 15 seconds for an hour."""
    queue = WorkQueue()
    for round_ in range(240):
        queue.add_after(KEY, 6 * 3600 - 15 * round_)
        assert queue.count_scheduled() == 1
    for round_ in range(240):
        for number in range(50):
            queue.add_after(("team", str(number)), 6 * 3600 - 15 * round_)
    keys = 51
    assert queue.count_scheduled() <= keys + keys // 2


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 1e6)), max_size=200))
def test_the_queue_keeps_the_earliest_appointment_of_each_key(appointments: list[tuple[int, float]]) -> None:
    queue, earliest = WorkQueue(), dict[int, float]()
    now = time.monotonic()
    for number, seconds in appointments:
        queue.add_after(("team", str(number)), 1000 + seconds)
        earliest[number] = min(seconds, earliest.get(number, seconds))
    assert queue.count_scheduled() <= len(earliest) + len(earliest) // 2
    kept = {key: due for due, key in sorted(queue._later, reverse=True)}
    assert {int(name): round(due - now - 1000) for (_, name), due in kept.items()} == pytest.approx(earliest, abs=3)


def test_a_time_centuries_ahead_ends_no_thread() -> None:
    """A pod with a grace period of 9,223,372,036 seconds, the longest that Kubernetes adds up, is deleted. The threads
    that waited for the end of that period died with an OverflowError, and no job was worked on any more."""
    queue = WorkQueue()
    queue.add_after(KEY, 9_223_372_036.0 + 5.0)
    threading.Timer(0.05, queue.close).start()
    assert queue.get() is None
