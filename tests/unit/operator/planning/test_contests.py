"""Children that something else changes back: they are written less and less often, reported, and forgotten
afterwards."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from topkube_operator.planning.contests import Contests, describe_contest

DAY = 86400


def _build_policy(port: int = 1) -> dict[str, Any]:
    return {"kind": "NetworkPolicy", "metadata": {"name": "train-worker"}, "spec": {"ingress": [{"port": port}]}}


KEY = ("NetworkPolicy", "train-worker")


def _write_contested(contests: Contests, seconds: float, step: float = 1.0) -> list[float]:
    """Something else changes the child back at once each time. Write the child again as soon as it is not paused.
    Return the times of the writes."""
    times, now = list[float](), 0.0
    while now < seconds:
        if KEY not in contests.find_paused(now):
            message = "somebody" if contests.must_be_reported(_build_policy(), now) else ""
            contests.count_write(_build_policy(), now, message)
            times.append(now)
        now += step
    return times


def test_writes_of_the_same_content_wait_twice_as_long_each_time_up_to_five_minutes() -> None:
    times = _write_contested(Contests(), DAY / 4)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:9] == [1, 1, 2, 4, 8, 16, 32, 64, 128]
    assert set(pauses[10:]) == {300}


def test_the_third_write_reports_the_contest() -> None:
    contests = Contests()
    for number in range(3):
        assert not contests.list_troubles()
        assert contests.must_be_reported(_build_policy(), number) == (number == 2)
        contests.count_write(_build_policy(), number, "somebody" if number == 2 else "")
    assert contests.list_troubles()[KEY].message == "somebody"
    assert not contests.must_be_reported(_build_policy(), 3), "one report is enough"


def test_writes_of_different_content_are_not_a_contest() -> None:
    contests = Contests()
    for attempt in range(50):
        assert not contests.must_be_reported(_build_policy(attempt), attempt)
        contests.count_write(_build_policy(attempt), attempt)
        assert not contests.find_paused(attempt)


def test_a_contest_that_has_ended_is_forgotten() -> None:
    contests = Contests()
    for number in range(3):
        contests.count_write(_build_policy(), number, "somebody")
    now, wakeups = 2.0, 0
    while (seconds := contests.compute_seconds_to_next_change(now)) is not None:
        now, wakeups = now + seconds, wakeups + 1
        contests.find_paused(now)
    assert not contests.list_troubles()
    assert wakeups == 2, "the first when the child may be written, the second when the contest ends"
    assert 600 <= now <= 700


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_no_child_is_written_more_than_eight_times_a_minute(waits: list[float]) -> None:
    contests, now, times = Contests(), 0.0, list[float]()
    for wait in waits:
        now += wait
        if KEY not in contests.find_paused(now):
            contests.count_write(_build_policy(), now)
            times.append(now)
    assert all(len([time for time in times if begin <= time < begin + 60]) <= 8 for begin in times)


def test_the_message_names_the_manager_and_the_field() -> None:
    stored = {**_build_policy(2), "metadata": {"name": "train-worker", "managedFields": [{"manager": "kyverno"}]}}
    assert "changes ingress[0]" in describe_contest(stored, _build_policy())
    assert "kyverno (its managed fields)" in describe_contest(stored, _build_policy())
    assert "deletes it" in describe_contest(None, _build_policy())
