"""The communication thread: one per process, one order of exchanges.

Collectives match by order, so everything that training sends goes through this one queue, first in, first out.
Handing in never waits: a gradient stays in `.grad` until its turn comes, and the thread stages one bucket at a time,
so the depth of the queue costs no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Schedule:
    """Runs work in the order in which it was handed in. The thread is a daemon: a failing script ends without waiting
    for it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="topkube-communication", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Hands in `work`; the future carries its result, or the error that it raised."""
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del work, future  # holding them would keep the last bucket's gradients alive until the next one comes


_schedule: Schedule | None = None


def schedule() -> Schedule:
    """The process's schedule, started on first use."""
    global _schedule
    if _schedule is None:
        _schedule = Schedule()
    return _schedule
