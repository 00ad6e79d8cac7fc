"""The bounds that benchmarks compare with, measured on the same arrays in the same run."""

from __future__ import annotations

from collections.abc import Callable

from topkube import _kernels, kernels
from topkube.arrays import Array, flat_view
from topkube.bench.report import timed


def seconds_to_read(x: Array, repeats: int = 7) -> float:
    """Seconds in which one thread reads all of `x` once: the fastest of several plain sums.

    The fastest of three readers (a sum of words, the search for a non-finite element, torch's sum where torch is
    there), each by its median: no one of them is the fastest on every processor."""
    view = flat_view(x, "x")
    readers: list[Callable[[], object]] = [
        lambda: _kernels.read_all(view.view("uint8")),
        lambda: kernels.is_finite(view),
    ]
    try:
        import torch
    except ImportError:
        pass
    else:
        if view.dtype.kind == "f" and view.dtype.itemsize == 4:
            tensor = torch.from_numpy(view)
            readers.append(lambda: tensor.sum())
    return min(timed(reader, repeats=repeats).median for reader in readers)


def seconds_to_add(a: Array, b: Array, repeats: int = 7) -> float:
    """Seconds in which one thread computes a += b: it reads two arrays and writes one, 12 bytes per float32 element."""
    return timed(lambda: kernels.add_(a, b), repeats=repeats).median
