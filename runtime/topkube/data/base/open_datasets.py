"""The sum of the counters of all datasets of this process, for the metrics of a run."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from topkube.data.base.shared_counters import CacheCounters

_LEVELS = ("disk_state", "memory_state", "memory_used_bytes")
"""Values that are not added: the sum has the largest value of all open datasets."""


class DatasetWithCounters(Protocol):
    """A dataset with a cache."""

    counters: CacheCounters

    def statistics(self) -> dict[str, float]: ...


_lock = threading.Lock()
_registered: list[tuple[weakref.ref[DatasetWithCounters], CacheCounters]] = []
_deleted_counts: dict[str, float] = {}
"""The sums of the counters of datasets that were deleted. Without them, the counters of a run would fall when a
dataset, such as that of an evaluation, is deleted."""


def register_dataset(dataset: DatasetWithCounters) -> None:
    """Include this dataset in `sum_statistics`, and its counters also after it was deleted."""
    with _lock:
        _add_up_deleted()
        _registered.append((weakref.ref(dataset), dataset.counters))


def sum_statistics() -> dict[str, float]:
    """Return the sums of the counters over all datasets, and the worst of the states of those that are open. Empty if
    no dataset was opened."""
    with _lock:
        _add_up_deleted()
        total = dict(_deleted_counts)
        datasets = [dataset for reference, _ in _registered if (dataset := reference()) is not None]
    for dataset in datasets:
        for name, value in dataset.statistics().items():
            total[name] = max(total.get(name, 0.0), value) if name in _LEVELS else total.get(name, 0.0) + value
    return total


def _add_up_deleted() -> None:
    """Add the counters of datasets that were deleted since the last call to `_deleted_counts`."""
    for entry in [entry for entry in _registered if entry[0]() is None]:
        _registered.remove(entry)
        for name, value in entry[1].sum_rows().items():
            _deleted_counts[name] = _deleted_counts.get(name, 0.0) + value
