"""Children of a job that something else changes back after every write: a policy engine, or another controller.

If the operator repaired such a child at once each time, the writes would continue forever, many per second. Therefore
only the first repair is immediate. Each further write of the same content waits twice as long, and from the third write
on the operator reports the contest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topkube_operator.model import names
from topkube_operator.model.observed import Trouble, find_difference, hash_data, select_compared_content

ChildKey = tuple[str, str]
"""Kind and name."""
_FREE_WRITES = 2
"""Writes without a pause: the first creates or changes the child. The second repairs it at once, because people
sometimes delete a child by mistake."""
_REPORTED_FROM = 3
"""The number of writes from which a contest is reported."""
_LONGEST_PAUSE_SECONDS = 300.0
_FORGOTTEN_SECONDS = 600.0
"""Minimum seconds without a write after which a contest ends."""


@dataclass
class _Contest:
    """The operator's writes of one child that another controller changes back."""

    digest: str
    count: int
    written_at: float
    """When the child was written last (monotonic)."""
    message: str = ""

    @property
    def pause(self) -> float:
        """Seconds from the last write to the next write."""
        doublings = self.count - _FREE_WRITES
        return 0.0 if doublings < 0 else float(min(2.0**doublings, _LONGEST_PAUSE_SECONDS))

    @property
    def ends_at(self) -> float:
        """When the contest is forgotten (monotonic)."""
        return self.written_at + max(_FORGOTTEN_SECONDS, 2 * self.pause)


class Contests:
    """The contests about one job's children. Times are monotonic."""

    def __init__(self) -> None:
        self._contests: dict[ChildKey, _Contest] = {}

    def must_be_reported(self, manifest: Mapping[str, Any], now: float) -> bool:
        """Return True if the next write of a child makes it a contest that has no message yet."""
        if _make_key(manifest) not in self._contests:
            return False
        contest = self._find_contest(manifest, now)
        return contest is not None and contest.count + 1 >= _REPORTED_FROM and not contest.message

    def count_write(self, manifest: Mapping[str, Any], now: float, message: str = "") -> None:
        """Count a write of a child. Pods are not counted: each pod has its own name and is written once."""
        if manifest["kind"] == "Pod":
            return
        contest = self._find_contest(manifest, now)
        if contest is None:
            self._contests[_make_key(manifest)] = _Contest(_hash_content(manifest), 1, now)
        else:
            contest.count, contest.written_at = contest.count + 1, now
            contest.message = message or contest.message

    def find_paused(self, now: float) -> frozenset[ChildKey]:
        """Return the children that must not be written now."""
        self._contests = {key: contest for key, contest in self._contests.items() if now < contest.ends_at}
        return frozenset(key for key, contest in self._contests.items() if now < contest.written_at + contest.pause)

    def list_troubles(self) -> dict[ChildKey, Trouble]:
        """Return the contests that have a message."""
        return {
            key: Trouble("Contested", contest.message) for key, contest in self._contests.items() if contest.message
        }

    def compute_seconds_to_next_change(self, now: float) -> float | None:
        """Return the seconds until a child may be written again, or a contest ends; None if there is no contest."""
        contests = self._contests.values()
        times = [contest.written_at + contest.pause for contest in contests if contest.pause]
        times += [contest.ends_at for contest in contests if contest.message]
        return min((time - now for time in times if time > now), default=None)

    def _find_contest(self, manifest: Mapping[str, Any], now: float) -> _Contest | None:
        """Return the contest about the same content of a child; None if there is none."""
        contest = self._contests.get(_make_key(manifest))
        is_same = contest is not None and contest.digest == _hash_content(manifest) and now < contest.ends_at
        return contest if is_same else None


def _make_key(manifest: Mapping[str, Any]) -> ChildKey:
    return manifest["kind"], manifest["metadata"]["name"]


def _hash_content(manifest: Mapping[str, Any]) -> str:
    return hash_data({name: part for name, part in manifest.items() if name not in ("kind", "apiVersion", "metadata")})


def describe_contest(actual: Mapping[str, Any] | None, manifest: Mapping[str, Any]) -> str:
    """Return a message that names who changes a child. `actual` is the stored child, None if it is gone; `manifest` is
    the child as the operator sets it."""
    kind, name = str(manifest["kind"]), manifest["metadata"]["name"]
    if actual is None:
        action, cause = "deletes it", "a policy engine or a script"
    else:
        path = find_difference(select_compared_content(kind, actual), select_compared_content(kind, manifest)) or ""
        action = f"changes {path.lstrip('.') or 'it'}"
        managers = {str(entry.get("manager")) for entry in actual["metadata"].get("managedFields") or ()}
        others = ", ".join(sorted(managers - {names.FIELD_MANAGER}))
        cause = f"{others} (its managed fields)" if others else "a policy engine, a mutating webhook or a script"
    return (
        f"something {action} each time the operator has set it. Likely cause: {cause}. The operator tries again less "
        f"and less often. Next: exempt objects with the label {names.JOB_NAME} there; "
        f"kubectl get {kind.lower()} {name} -o yaml --show-managed-fields"
    )
