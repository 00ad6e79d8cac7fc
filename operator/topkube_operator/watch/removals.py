"""Removed objects, which the watch cache remembers for some time.

Late events of a removed object are ignored. A plan sees when pods were removed, and their last state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from topkube_operator.model.observed import Pod
from topkube_operator.watch.owner import Owner

_REMEMBERED = timedelta(minutes=10)
_MOST_REMEMBERED = 10_000
"""If more removals than this are remembered, those that are older than _REMEMBERED are forgotten."""


class Removals:
    """The objects that were removed: all of the last 10 minutes, and at least the last 10,000. Not safe for threads:
    the watch cache holds its lock."""

    def __init__(self) -> None:
        self._times: dict[str, datetime] = {}
        """When objects were removed, by UID."""
        self._children: dict[Owner, dict[str, tuple[datetime, Pod | None]]] = {}
        """The same times, by owner and name, with the last state of pods."""
        self._oldest_first: deque[tuple[datetime, str, Owner | None, str]] = deque()
        """Time, UID, owner and name of each removal."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._times

    def __len__(self) -> int:
        """Return the number of remembered objects."""
        return len(self._times)

    def add(self, uid: str, owner: Owner | None, name: str, pod: Pod | None = None) -> None:
        """Store that an object was removed now; `pod` is its last state if it was a pod."""
        now = datetime.now(UTC)
        self._forget_old(now)
        if uid in self._times and not owner:  # nothing new
            return
        self._times.setdefault(uid, now)
        self._oldest_first.append((now, uid, owner, name))
        if owner is not None:
            self._children.setdefault(owner, {}).setdefault(name, (now, pod))

    def find_children(self, owner: Owner) -> dict[str, tuple[datetime, Pod | None]]:
        """Return the removed children of a job by name: the time of the removal, and the last state of a pod."""
        return dict(self._children.get(owner, {}))

    def list_last_pods(self) -> Iterator[Pod]:
        """Yield the last state of every removed pod."""
        return (pod for names in self._children.values() for _, pod in names.values() if pod is not None)

    def clear(self) -> None:
        """Forget all removals."""
        self._times.clear()
        self._children.clear()
        self._oldest_first.clear()

    def _forget_old(self, now: datetime) -> None:
        while len(self._oldest_first) > _MOST_REMEMBERED and self._oldest_first[0][0] <= now - _REMEMBERED:
            time, uid, owner, name = self._oldest_first.popleft()
            if self._times.get(uid) == time:
                del self._times[uid]
            names = self._children.get(owner) if owner is not None else None
            if owner is not None and names is not None and names.get(name, (now,))[0] == time:
                del names[name]
                if not names:
                    del self._children[owner]
