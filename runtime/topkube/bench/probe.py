"""Measure the bounds that benchmarks compare with, on the same arrays in the same run."""

from __future__ import annotations

from collections.abc import Callable

from topkube import _kernels, kernels
from topkube.arrays import Array, view_flat
from topkube.bench.report import time_runs


def measure_reading(x: Array, repeats: int = 7) -> dict[str, float]:
    """Return the median seconds in which one thread reads all of `x` once, by reader: a plain sum of words, the search
    for a non-finite element, and for float32 torch's sum if torch is installed. Which reader is the fastest depends on
    the processor. The shortest time is the strictest bound."""
    view = view_flat(x, "x")
    readers: dict[str, Callable[[], object]] = {
        "sum of words": lambda: _kernels.read_all(view.view("uint8")),
        "is_finite": lambda: kernels.is_finite(view),
    }
    try:
        import torch
    except ImportError:
        return {name: time_runs(reader, repeats=repeats).median for name, reader in readers.items()}
    if view.dtype.kind == "f" and view.dtype.itemsize == 4:
        tensor = torch.from_numpy(view)
        readers["torch.sum"] = lambda: tensor.sum()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: time_runs(reader, repeats=repeats).median for name, reader in readers.items()}
    finally:
        torch.set_num_threads(threads_before)


def measure_addition(a: Array, b: Array, repeats: int = 7) -> float:
    """Return the seconds in which one thread computes a += b: two reads and one write, 12 bytes per float32 element."""
    return time_runs(lambda: kernels.add_(a, b), repeats=repeats).median
