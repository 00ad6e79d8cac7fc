"""The threads that make the calls of plans: jobs take turns, and no call follows an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from replica import wait_until

from topkube_operator.control.call_pool import CallPool

THREADS = 4


@pytest.fixture
def calls() -> Iterator[CallPool]:
    calls = CallPool(THREADS)
    yield calls
    calls.close()


def test_results_come_in_order(calls: CallPool) -> None:
    assert calls.call_each("job", lambda number: 2 * number, range(1000)) == [2 * number for number in range(1000)]
    assert calls.call_each("job", lambda number: 2 * number, [7]) == [14]
    assert calls.call_each("job", lambda number: 2 * number, []) == []


def test_the_end_of_each_call_is_reported_with_its_job() -> None:
    ended = list[Any]()
    calls = CallPool(THREADS, ended.append)
    calls.call_each("job", lambda number: number, range(10))
    calls.close()
    assert ended == ["job"] * 10


class RecordingPool(CallPool):
    """A pool that notes the jobs of its calls in the order in which the calls begin."""

    def __init__(self, threads: int) -> None:
        self.begun = list[str]()
        super().__init__(threads)

    def _take_call(self) -> tuple[Any, Any, int] | None:
        with self._changed:
            next_call = super()._take_call()
            if next_call is not None:
                _, batch, index = next_call
                self.begun.append(batch.items[index])
            return next_call


def test_jobs_with_few_calls_do_not_wait_for_all_calls_of_a_large_job() -> None:
    gate, calls = threading.Event(), RecordingPool(THREADS)

    def call(job: str) -> None:
        gate.wait(120)

    large = threading.Thread(target=calls.call_each, args=("large", call, ["large"] * 3000), daemon=True)
    large.start()
    small = threading.Thread(target=calls.call_each, args=("small", call, ["small"] * 3), daemon=True)
    small.start()
    wait_until(lambda: len(calls._waiting) == 2)
    gate.set()
    small.join(120)
    large.join(120)
    calls.close()
    assert calls.begun.count("large") == 3000
    assert calls.begun[: THREADS + 2 * 3].count("small") == 3, (
        "the small job waits only for calls that have begun, and for its turns"
    )


def test_after_an_error_no_further_call_is_begun(calls: CallPool) -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        if number == 5:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        calls.call_each("job", call, range(3000))
    assert len(begun) < 100


def test_a_result_may_end_a_batch_too(calls: CallPool) -> None:
    results = calls.call_each("job", lambda number: number, range(1, 3001), lambda result: result == 5)
    assert results[:5] == [1, 2, 3, 4, 5]
    assert results.count(None) > 2900
    assert calls.call_each("job", lambda number: number, range(1, 4)) == [1, 2, 3], (
        "the end of a batch does not affect the next batch"
    )


def test_nobody_waits_for_a_pool_that_was_closed(calls: CallPool) -> None:
    begun, calls_may_end = threading.Event(), threading.Event()

    def call(_: int) -> None:
        begun.set()
        calls_may_end.wait(120)

    waiting = threading.Thread(target=calls.call_each, args=("job", call, range(3000)))
    waiting.start()
    begun.wait(120)
    calls.close()
    calls_may_end.set()
    waiting.join(120)
    assert not waiting.is_alive()
