"""The work queue: which jobs to reconcile, and when. One thread works on a job at a time."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

Key = tuple[str, str]
"""Namespace and name of a TrainingJob."""
_LONGEST_WAIT_SECONDS = 86400.0
"""A thread looks again after this time. Python refuses to wait for more than 292 years at once, and the end of a pod's
grace period may be later than that."""


class WorkQueue:
    """Keys to work on. A key that is added while it waits is not added again. A key that is added while a thread works
    on it is handed out again afterwards. `observe_wait` receives the seconds that each key has waited."""

    def __init__(self, observe_wait: Callable[[float], None] = lambda seconds: None) -> None:
        self._observe_wait = observe_wait
        self._changed = threading.Condition()
        self._ready: dict[Key, float] = {}
        """Waiting keys in order, with the time at which each was added."""
        self._busy: dict[Key, float] = {}
        """Keys that threads work on, with the time at which each was taken."""
        self._advanced_at: dict[Key, float] = {}
        """When the work on each key made progress last."""
        self._moved_at = float("-inf")
        """When a thread took a key, or ended its work on one, for the last time."""
        self._again: set[Key] = set()
        """Keys that were added while a thread worked on them."""
        self._later: list[tuple[float, Key]] = []
        """A heap of times and the keys that are due then. It may hold replaced entries."""
        self._due: dict[Key, float] = {}
        """The earliest time at which each later key is due."""
        self._closed = False

    def add(self, key: Key) -> None:
        """Make `key` due now."""
        with self._changed:
            self._add(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Make `key` due in `seconds`, unless it is due earlier."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._due.get(key, float("inf")) <= due:
                return
            self._due[key] = due
            heapq.heappush(self._later, (due, key))
            self._drop_replaced()
            self._changed.notify()

    def get(self) -> Key | None:
        """Return the next key; wait for it if there is none. Call `done` afterwards. Return None if the queue is
        closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                wait = self._move_due_keys()
                if self._ready:
                    key = next(iter(self._ready))
                    self._busy[key] = self._advanced_at[key] = self._moved_at = time.monotonic()
                    self._observe_wait(self._busy[key] - self._ready.pop(key))
                    return key
                self._changed.wait(None if wait is None else min(wait, _LONGEST_WAIT_SECONDS))

    def done(self, key: Key) -> None:
        """End the work on a key that `get` returned."""
        with self._changed:
            self._busy.pop(key, None)
            self._advanced_at.pop(key, None)
            self._moved_at = time.monotonic()
            if key in self._again:
                self._again.discard(key)
                self._add(key)

    def close(self) -> None:
        """End all waits. `get` returns no key afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def measure_oldest_wait(self) -> float:
        """Return the seconds for which the oldest key has been waiting or in work; 0 if there is none."""
        with self._changed:
            times = [*self._busy.values(), *self._ready.values()]
            return time.monotonic() - min(times) if times else 0.0

    def note_progress(self, key: Key) -> None:
        """Note that a part of the work on `key` is done."""
        with self._changed:
            if key in self._advanced_at:
                self._advanced_at[key] = time.monotonic()

    def measure_standstill(self) -> float:
        """Return the seconds for which the work on some key has made no progress, or for which no thread has taken a
        waiting key; 0 if there is no key. Keys may wait for long while others are worked on."""
        with self._changed:
            waiting_since = min(self._ready.values(), default=None)
            times = [*self._advanced_at.values()]
            if waiting_since is not None:
                times.append(max([waiting_since, self._moved_at, *self._advanced_at.values()]))
            return time.monotonic() - min(times) if times else 0.0

    def count_waiting(self) -> int:
        """Return the number of keys that are due and wait for a thread."""
        with self._changed:
            return len(self._ready)

    def count_working(self) -> int:
        """Return the number of keys that threads work on."""
        with self._changed:
            return len(self._busy)

    def count_scheduled(self) -> int:
        """Return the number of entries for later. It is bounded by the number of keys."""
        with self._changed:
            return len(self._later)

    def _drop_replaced(self) -> None:
        """Drop entries that earlier entries replaced, if they exceed half the number of the keys."""
        if len(self._later) > len(self._due) + len(self._due) // 2:
            self._later = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._later)

    def _add(self, key: Key) -> None:
        if key in self._busy:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = time.monotonic()
            self._changed.notify()

    def _move_due_keys(self) -> float | None:
        """Move due keys to the waiting keys. Return the seconds until the next key is due; None if there is none."""
        now = time.monotonic()
        while self._later:
            due, key = self._later[0]
            if self._due.get(key) != due:  # an earlier entry replaced this entry
                heapq.heappop(self._later)
            elif due <= now:
                heapq.heappop(self._later)
                del self._due[key]
                self._add(key)
            else:
                return due - now
        return None
