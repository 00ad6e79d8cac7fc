"""Opens datasets for tests, with a cache in the test's folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.data.dataset import CachedDataset
from topkube.data.remote.retry import Patience

HASTY = Patience(retries=3, pause_seconds=0.01, stall_seconds=1.0)
PATIENT = Patience(retries=1, pause_seconds=0.01, stall_seconds=60)


class Opener:
    """Opens datasets with a cache in the test's folder and short deadlines, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.memory = folder / "cache", folder / "memory"
        self.opened: list[CachedDataset] = []

    def __call__(self, uri: str | Path, **overrides: Any) -> CachedDataset:
        options: dict[str, Any] = {
            "cache_directory": self.cache,
            "memory_directory": self.memory,
            "patience": HASTY,
            "wait_seconds": 20.0,
            "free_bytes": 0,
            **overrides,
        }
        self.opened.append(CachedDataset(str(uri), **options))
        return self.opened[-1]

    def close(self) -> None:
        for dataset in self.opened:
            dataset.close()
        self.opened.clear()


def check_samples(dataset: CachedDataset, data: npt.NDArray[np.uint8]) -> None:
    """Assert that all samples of the dataset, read as one batch, are these."""
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(len(dataset))))), data)


def list_shard_files(cache: Path) -> list[Path]:
    """Return every shard file of a cache, without the indexes."""
    return [path for path in cache.glob("datasets/*/shards/*/*") if path.suffix != ".index"]


def release_when_waiting(dataset: CachedDataset, release: Callable[[], object]) -> None:
    """Call `release` in a thread when a reader waits for a shard of the dataset."""
    waiting, open_samples = threading.Event(), dataset.cache.open_samples

    def signal_and_open(*arguments: object) -> object:
        waiting.set()
        return open_samples(*arguments)  # type: ignore[arg-type]

    dataset.cache.open_samples = signal_and_open  # type: ignore[method-assign,assignment]
    threading.Thread(target=lambda: (waiting.wait(60), release())).start()


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true; fail after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
