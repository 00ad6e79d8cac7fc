"""Training data over volumes that fail, run in a mount namespace. Usage: volumes.py SCRIPT SOURCE MOUNT"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from topkube.data import ArrayOf
from topkube.data.cache.node_state import DROPPED, FROZEN, OPEN
from topkube.data.dataset import CachedDataset

RECORD = ArrayOf("uint8", (3072,))


def mount(mount_point: Path, size: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point)], check=True)


def open_dataset(source: Path, mount_point: Path, **overrides: Any) -> CachedDataset:
    options: dict[str, Any] = {
        "memory_directory": mount_point.parent / "memory",
        "free_bytes": 0,
        "group_bytes": 30_000,
    }
    return CachedDataset(source, cache_directory=mount_point, decode=RECORD, **{**options, **overrides})


def check_samples(opened: CachedDataset, source: Path) -> None:
    """Assert that two epochs return the right bytes."""
    paths = [opened.cache.shards.listing.paths[at] for at in range(len(opened))]
    for _ in range(2):
        samples = np.stack(list(opened.__getitems__(range(len(opened)))))
        for path, sample in zip(paths, samples, strict=True):
            assert (source / path).read_bytes() == sample.tobytes(), path


def fill_volume(source: Path, mount_point: Path) -> None:
    """Train while the volume has room for some shards, but not for all."""
    mount(mount_point, "320k")
    opened = open_dataset(source, mount_point)
    check_samples(opened, source)
    cached_shards = sum(opened.cache.has(number) for number in range(len(opened.cache.shards)))
    assert 0 < cached_shards < len(opened.cache.shards), cached_shards
    assert opened.node_state.disk_state == FROZEN
    assert not list(mount_point.rglob("*.part"))


def fill_memory(source: Path, mount_point: Path) -> None:
    """Train while the memory tier's volume fills up before its limit."""
    memory = mount_point.parent / "memory"
    memory.mkdir()
    mount(memory, "240k")
    opened = open_dataset(source, mount_point, memory_limit=1 << 22, prefetch=False)
    check_samples(opened, source)
    assert opened.node_state.memory_state == FROZEN
    assert 0 < opened.statistics()["memory_misses"] < opened.statistics()["memory_requests"]


def train_on_read_only(source: Path, mount_point: Path) -> None:
    """Train on a volume that has turned read-only: cached shards are used, and nothing is written."""
    mount(mount_point, "4m")
    first = open_dataset(source, mount_point, prefetch=False)
    first[0]
    first.close()
    subprocess.run(["mount", "-o", "remount,ro", str(mount_point)], check=True)
    opened = open_dataset(source, mount_point)
    check_samples(opened, source)
    assert opened.node_state.disk_state == FROZEN
    assert opened.statistics()["remote_bytes"] > 0


def train_on_empty_read_only(source: Path, mount_point: Path) -> None:
    mount(mount_point, "4m")
    subprocess.run(["mount", "-o", "remount,ro", str(mount_point)], check=True)
    opened = open_dataset(source, mount_point)
    check_samples(opened, source)
    assert opened.node_state.disk_state == DROPPED


def lose_volume(source: Path, mount_point: Path) -> None:
    """Unmount the volume while a dataset is open."""
    mount(mount_point, "4m")
    opened = open_dataset(source, mount_point, prefetch=False)
    opened[0]
    assert opened.node_state.disk_state == OPEN
    opened.cache.open_shards.close_idle()
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
    check_samples(opened, source)
    assert opened.node_state.disk_state == DROPPED


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
