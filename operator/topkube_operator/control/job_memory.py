"""The controller's memory of a job from one reconcile to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from topkube_operator.model.observed import LauncherReport, Trouble
from topkube_operator.planning.contests import Contests

_LONGEST_PAUSE_SECONDS = 60.0
_OBJECT_SECONDS, _MISSING_OBJECT_SECONDS = 60.0, 8.0
"""How long an object of the cluster is remembered, and how long an object that could not be read."""


def _choose_age_limit(content: dict[str, Any]) -> float:
    return _OBJECT_SECONDS if content else _MISSING_OBJECT_SECONDS


@dataclass
class JobMemory:
    """The memory of one job between reconciles. All of it may be lost at any time."""

    report: LauncherReport | None = None
    troubles: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    """The children that could not be written, by kind and name."""
    contests: Contests = field(default_factory=Contests)
    logs: dict[str, str] = field(default_factory=dict)
    """The log tails that the planner has requested, by pod."""
    objects: dict[tuple[str, str], tuple[float, dict[str, Any]]] = field(default_factory=dict)
    """Objects of the whole cluster, with the time at which they were read (monotonic)."""
    patched_at: float = float("-inf")
    """The time of the last write of the status (monotonic)."""
    failures: int = 0
    """The failures in a row, which determine the next pause."""
    create_from: float = 0.0
    """Nothing is created before this time, because the last try failed (monotonic)."""

    def list_known_objects(self, now: float) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the objects that were read recently. An object that could not be read is forgotten sooner, and then
        read again."""
        self.objects = {
            key: (read_at, content)
            for key, (read_at, content) in self.objects.items()
            if now < read_at + _choose_age_limit(content)
        }
        return {key: content for key, (_, content) in self.objects.items()}

    def back_off(self) -> float:
        """Count a failure. Return the seconds until the next try."""
        self.failures += 1
        return float(min(0.5 * 2.0 ** min(self.failures, 10), _LONGEST_PAUSE_SECONDS))
