"""The work queue: which jobs to look at, and when. A job is in the hands of one worker at a time."""

from __future__ import annotations

import heapq
import threading
import time

Key = tuple[str, str]
"""Namespace and name of a TrainingJob."""


class WorkQueue:
    """Keys to work on. A key added while it waits is there once; one added while it is worked on comes once more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[Key, float] = {}
        """Waiting keys in order, with the time since when."""
        self._busy: dict[Key, float] = {}
        self._again: set[Key] = set()
        self._later: list[tuple[float, Key]] = []
        self._due: dict[Key, float] = {}
        self._closed = False

    def add(self, key: Key) -> None:
        """Makes `key` due now."""
        with self._changed:
            self._add(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Makes `key` due in `seconds`, or earlier where it already is."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._due.get(key, float("inf")) <= due:
                return
            self._due[key] = due
            heapq.heappush(self._later, (due, key))
            self._changed.notify()

    def get(self) -> Key | None:
        """The next key, to be given back by `done`; waits for one. None when the queue is closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                wait = self._ripen()
                if self._ready:
                    key = next(iter(self._ready))
                    del self._ready[key]
                    self._busy[key] = time.monotonic()
                    return key
                self._changed.wait(wait)

    def done(self, key: Key) -> None:
        with self._changed:
            self._busy.pop(key, None)
            if key in self._again:
                self._again.discard(key)
                self._add(key)

    def close(self) -> None:
        """Ends all waits; nothing more is given out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def oldest(self) -> float:
        """Seconds for which the oldest key has been waiting or worked on; 0 where there is none."""
        with self._changed:
            times = [*self._busy.values(), *self._ready.values()]
            return time.monotonic() - min(times) if times else 0.0

    def _add(self, key: Key) -> None:
        if key in self._busy:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = time.monotonic()
            self._changed.notify()

    def _ripen(self) -> float | None:
        """Moves what is due to the waiting keys; gives the seconds until the next is."""
        now = time.monotonic()
        while self._later:
            due, key = self._later[0]
            if self._due.get(key) != due:  # replaced by an earlier one
                heapq.heappop(self._later)
            elif due <= now:
                heapq.heappop(self._later)
                del self._due[key]
                self._add(key)
            else:
                return due - now
        return None
