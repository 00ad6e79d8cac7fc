"""Run with few open files: training data over a cache. Usage: few_files.py SCRIPT SOURCE CACHE MEMORY_LIMIT"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from topkube.data import ArrayOf
from topkube.data.cache.node_state import OPEN
from topkube.data.dataset import CachedDataset
from topkube.errors import StoreError


def open_small_dataset(source: Path, cache: Path, **overrides: Any) -> CachedDataset:
    options: dict[str, Any] = {
        "memory_directory": cache.parent / "memory",
        "free_bytes": 0,
        "group_bytes": 1,
        **overrides,
    }
    return CachedDataset(source, cache_directory=cache, decode=ArrayOf("uint8", (3072,)), **options)


def check_samples(dataset: CachedDataset, source: Path, at_once: int) -> None:
    paths = [dataset.cache.shards.listing.paths[at] for at in range(len(dataset))]
    for start in range(0, len(paths), at_once):
        samples = list(dataset.__getitems__(range(start, min(start + at_once, len(paths)))))
        for path, sample in zip(paths[start:], samples, strict=False):
            assert (source / path).read_bytes() == np.asarray(sample).tobytes(), path


def read_many_shards(source: Path, cache: Path, memory_limit: int) -> None:
    """Read 400 shards in one batch."""
    dataset = open_small_dataset(source, cache, memory_limit=memory_limit)
    assert len(dataset.cache.shards) == 400
    for _ in range(2):
        check_samples(dataset, source, 400)
    dataset.warm()
    assert dataset.node_state.disk_state == OPEN
    assert all(dataset.cache.has(number) for number in range(400))


def take_all_files() -> list[int]:
    """Open files until no other file can be opened."""
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    return files


def read_beside_other_files(source: Path, cache: Path, memory_limit: int) -> None:
    """Read samples after other code has opened as many files as possible."""
    dataset = open_small_dataset(source, cache, memory_limit=memory_limit, prefetch=False)
    check_samples(dataset, source, 400)
    other_files = take_all_files()
    for at in range(400):  # open shards are closed to make room for others
        assert dataset[at].shape == (3072,)
    dataset.cache.open_shards.close_idle()
    other_files += take_all_files()
    try:
        dataset[5]
    except StoreError as error:
        print(error)
    for file in other_files:
        os.close(file)
    check_samples(dataset, source, 400)
    assert dataset.node_state.disk_state == OPEN


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
