"""The sum of the counters of all open datasets of this process, for the metrics of a run."""

from __future__ import annotations

import weakref
from typing import Protocol

_LEVELS = ("disk_state", "memory_state", "memory_used_bytes")
"""Values that are not added: the sum has the largest value of all datasets."""


class DatasetWithCounters(Protocol):
    """A dataset with a cache."""

    def statistics(self) -> dict[str, float]: ...


_open: weakref.WeakSet[DatasetWithCounters] = weakref.WeakSet()


def register_dataset(dataset: DatasetWithCounters) -> None:
    """Include this dataset in `sum_statistics` until the dataset is deleted."""
    _open.add(dataset)


def sum_statistics() -> dict[str, float]:
    """Return the sums of the counters over all open datasets, and the worst of their states. Empty if no dataset is
    open."""
    total: dict[str, float] = {}
    for dataset in list(_open):
        for name, value in dataset.statistics().items():
            total[name] = max(total.get(name, 0.0), value) if name in _LEVELS else total.get(name, 0.0) + value
    return total
