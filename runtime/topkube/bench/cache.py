"""`topkube bench cache`: compare batches from a warm cache with memory and the page cache, on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from topkube import _kernels
from topkube.bench.report import BenchReport, check_path
from topkube.data import ArrayOf, DistributedSampler
from topkube.data.dataset import CachedDataset

BATCH = 256
SAMPLES = (3 * 1024, 150 * 1000)
"""Bytes of a sample: a small array, a JPEG."""
COLUMNS = {
    "sample": "sample, bytes",
    "reader": "read by",
    "mb_per_s": "MB/s (median)",
    "min": "min",
    "max": "max",
    "of": "% of",
    "percent": "%",
}


@contextmanager
def make_folder() -> Iterator[Path]:
    """Yield a temporary folder, and remove it at the end."""
    path = Path(tempfile.mkdtemp(prefix="topkube-bench-cache-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(megabytes: int = 128, repeats: int = 5) -> BenchReport:
    """Return the rates of the memory tier and of the disk tier alone after the first epoch, and the rates of their
    bounds. Readers take turns, epoch by epoch."""
    report = BenchReport("Batches of 256 from a warm cache, one process", COLUMNS)
    for size in SAMPLES:
        with make_folder() as home:
            _measure_sample_size(report, home, size, max(BATCH * 4, megabytes * 1_000_000 // size), repeats)
    return report


def _measure_sample_size(report: BenchReport, home: Path, size: int, count: int, repeats: int) -> None:
    source = home / "source"
    source.mkdir()
    data = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    for number in range(count):
        (source / f"{number:07}").write_bytes(data[number].tobytes())
    options: dict[str, Any] = {"decode": ArrayOf("uint8", (size,)), "cache_directory": home / "cache", "free_bytes": 0}
    disk = CachedDataset(source, **options)
    memory = CachedDataset(source, **options, memory_limit=2 * data.nbytes)
    whole = home / "whole"
    data.tofile(whole)
    file = os.open(whole, os.O_RDONLY)
    order = DistributedSampler(disk, seed=1)
    batches = [order.indices()[first : first + BATCH] for first in range(0, count, BATCH)]
    lengths = np.full(BATCH, size, np.int64)
    buffer = np.empty(BATCH * size, np.uint8)

    def read_array() -> None:
        for batch in batches:
            data[batch]

    def read_page_cache() -> None:
        """Read the same ranges, with one pread each, into one buffer."""
        for batch in batches:
            n = batch.size
            _kernels.gather_files(np.full(n, file, np.int32), batch * size, lengths[:n], buffer[: n * size])

    def read_in_order() -> None:
        view, offset = buffer[: 1 << 20].data, 0
        while bytes_read := os.preadv(file, [view], offset):
            offset += bytes_read

    readers: dict[str, tuple[Callable[[], None], str]] = {
        "NumPy array in memory": (read_array, ""),
        "TopKube, memory tier": (lambda: _read_all_batches(memory, order), "NumPy array in memory"),
        "page cache, same ranges": (read_page_cache, ""),
        "page cache, in order, 1 MiB": (read_in_order, ""),
        "TopKube, disk tier": (lambda: _read_all_batches(disk, order), "page cache, same ranges"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(repeats + 1):
        for name, (read, _) in readers.items():
            start = perf_counter()
            read()
            if turn:  # the first epoch fills the tiers
                seconds[name].append(perf_counter() - start)
    rate = {name: data.nbytes / 1e6 / median(times) for name, times in seconds.items()}
    for name, (_, bound) in readers.items():
        report.add(
            sample=size,
            reader=name,
            mb_per_s=rate[name],
            min=data.nbytes / 1e6 / max(seconds[name]),
            max=data.nbytes / 1e6 / min(seconds[name]),
            of=bound or None,
            percent=100 * rate[name] / rate[bound] if bound else None,
        )
    os.close(file)
    disk.close()
    memory.close()


def _read_all_batches(dataset: CachedDataset, sampler: DistributedSampler) -> None:
    for _ in dataset.batches(BATCH, sampler):
        pass


def command(
    megabytes: Annotated[int, typer.Option(min=1, help="Size of each dataset.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Epochs per reader.")] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.")] = None,
) -> None:
    """Compare batches from a warm cache with NumPy and the page cache."""
    check_path(json)
    report = measure(megabytes, repeats)
    report.show()
    report.write(json)
