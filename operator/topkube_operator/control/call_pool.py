"""Threads that make the API calls of all plans. Jobs take turns, so a job with thousands of pods delays no other
job."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Batch:
    """The calls of one plan."""

    call: Callable[[Any], Any]
    items: Sequence[Any]
    ends_batch: Callable[[Any], bool]
    results: list[Any] = field(default_factory=list)
    begun_calls: int = 0
    """The number of calls that have begun. They begin in the order of the items."""
    ended_calls: int = 0
    error: BaseException | None = None
    is_stopped: bool = False
    """True if no further call begins."""


class CallPool:
    """A pool of `threads`. Each job that has calls to make begins one call in turn. `observe_end` receives the job of
    each call that has ended."""

    def __init__(self, threads: int, observe_end: Callable[[Any], None] = lambda job: None) -> None:
        self._observe_end = observe_end
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, deque[_Batch]] = OrderedDict()
        """Batches with calls that have not begun, by job: the first job is next."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run_calls, name=f"call-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def call_each(
        self,
        job: Hashable,
        call: Callable[[Any], Any],
        items: Sequence[Any],
        ends_batch: Callable[[Any], bool] = lambda result: False,
    ) -> list[Any]:
        """Call `call` with each of `items`. Return the results in order, None for calls that were not made.

        An error, or a result for which `ends_batch` returns True, ends the batch: calls that have not begun are not
        made. Raises the first error after all calls that had begun have ended.
        """
        if len(items) == 1:
            return [call(items[0])]
        batch = _Batch(call, items, ends_batch, [None] * len(items))
        with self._changed:
            self._waiting.setdefault(job, deque()).append(batch)
            self._changed.notify_all()
            while (
                batch.begun_calls < len(items) and not (batch.is_stopped or self._closed)
            ) or batch.ended_calls < batch.begun_calls:
                self._changed.wait()
        if batch.error is not None:
            raise batch.error
        return batch.results

    def close(self) -> None:
        """Begin no further call of a batch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run_calls(self) -> None:
        while (next_call := self._take_call()) is not None:
            job, batch, index = next_call
            error: BaseException | None = None
            result = None
            try:
                result = batch.call(batch.items[index])
            except BaseException as raised:  # raised again in the thread that waits for the batch
                error = raised
            self._observe_end(job)
            with self._changed:
                batch.results[index] = result
                batch.ended_calls += 1
                batch.error = batch.error or error
                batch.is_stopped = batch.is_stopped or error is not None or batch.ends_batch(result)
                is_last = batch.is_stopped or self._closed or batch.begun_calls == len(batch.items)
                if batch.ended_calls == batch.begun_calls and is_last:
                    self._changed.notify_all()

    def _take_call(self) -> tuple[Hashable, _Batch, int] | None:
        """Return the next call of the next job; wait for it if there is none. Return None if the pool is closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                while self._waiting:
                    job, batches = next(iter(self._waiting.items()))
                    while batches and (batches[0].is_stopped or batches[0].begun_calls == len(batches[0].items)):
                        batches.popleft()
                    if not batches:
                        del self._waiting[job]
                        continue
                    batch, index = batches[0], batches[0].begun_calls
                    batch.begun_calls += 1
                    self._waiting.move_to_end(job)
                    return job, batch, index
                self._changed.wait()
