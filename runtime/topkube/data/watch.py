"""What the open datasets of this process have counted, all together: what a run's metrics ask for."""

from __future__ import annotations

import weakref
from typing import Protocol

_LEVELS = ("disk_state", "memory_state", "memory_used_bytes")


class Counted(Protocol):
    """A dataset with a cache."""

    def statistics(self) -> dict[str, float]: ...


_open: weakref.WeakSet[Counted] = weakref.WeakSet()


def watch(dataset: Counted) -> None:
    """From here on `statistics` counts this dataset in, for as long as it lives."""
    _open.add(dataset)


def statistics() -> dict[str, float]:
    """Sums over all datasets; of states the worst. Empty where there is none."""
    total: dict[str, float] = {}
    for dataset in list(_open):
        for name, value in dataset.statistics().items():
            total[name] = max(total.get(name, 0.0), value) if name in _LEVELS else total.get(name, 0.0) + value
    return total
