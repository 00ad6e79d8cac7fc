"""`topkube bench select`: compare the selection kernels with their peers and with the memory's bound, on this
machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from topkube import kernels
from topkube.arrays import BFLOAT16, Array
from topkube.bench.probe import measure_addition, measure_reading
from topkube.bench.report import BenchReport, check_path, time_runs
from topkube.errors import ArgumentError

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
COLUMNS = {
    "kernel": "kernel",
    "density": "density",
    "ms": "ms (median)",
    "min_ms": "min",
    "max_ms": "max",
    "bound_percent": "% of bound",
    "passes": "passes",
    "vs_argpartition": "× numpy.argpartition",
    "vs_torch": "× torch.topk",
}


class KernelRun(NamedTuple):
    """A call of a kernel that is timed. `prepare` is called before each run, unmeasured. `bound` is the shortest time
    that the memory allows, in seconds."""

    kernel: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None
    bound: float


def measure(
    elements: int,
    densities: list[float],
    *,
    repeats: int = 9,
    threads: int = 1,
    dtype: str = "float32",
    peers: bool = True,
) -> BenchReport:
    """Time `topk`, `compress_` and `mstopk` on `elements` normal values at each density, one row each.

    The bound of `topk` and `mstopk` is one read of the array, that of `compress_` an in-place addition, both by one
    thread. Peers find the k largest of the ready-made |x| by one thread. Raises ArgumentError for unusable sizes.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype = {dtype!r} is unknown", next_step=f"choose one of {', '.join(DTYPES)}")
    if elements < 1:
        raise ArgumentError(f"elements = {elements} is below 1", next_step="give the length of the array")
    kept = [kernels.entries_kept(elements, density) for density in densities]
    rng = np.random.default_rng(0)
    x32 = rng.standard_normal(elements, dtype=np.float32)
    x = x32.astype(DTYPES[dtype])
    sums, residual = np.zeros(elements, np.float32), rng.standard_normal(elements, dtype=np.float32)
    seconds_of_readers, addition_seconds = measure_reading(x), measure_addition(sums, residual)
    read_seconds = min(seconds_of_readers.values())

    report = BenchReport("Selection by magnitude", COLUMNS)
    report.facts |= {
        "elements": elements,
        "dtype": dtype,
        "threads": threads,
        "simd": kernels.simd(),
        "repeats": repeats,
        "one read ms": round(read_seconds * 1e3, 3),
        "one in-place addition (float32) ms": round(addition_seconds * 1e3, 3),
    }
    report.facts |= {
        f"one read by {reader} ms": round(seconds * 1e3, 3) for reader, seconds in seconds_of_readers.items()
    }
    for density, k in zip(densities, kept, strict=True):
        peer_seconds = _time_peers(x32, k, repeats) if peers else {}
        runs = [
            KernelRun("topk", partial(kernels.topk, x, k, threads=threads), None, read_seconds),
            _build_compress_run(x, sums, residual, k, threads, addition_seconds),
            KernelRun("mstopk", partial(kernels.mstopk, x, k, threads=threads), None, read_seconds),
        ]
        for kernel_run in runs:
            timing = time_runs(kernel_run.run, repeats=repeats, prepare=kernel_run.prepare)
            report.add(
                kernel=kernel_run.kernel,
                density=density,
                ms=timing.median * 1e3,
                min_ms=timing.minimum * 1e3,
                max_ms=timing.maximum * 1e3,
                bound_percent=100 * kernel_run.bound / timing.median,
                passes=kernels.last_effort().passes,
                **{f"vs_{peer}": seconds / timing.median for peer, seconds in peer_seconds.items()},
            )
        for peer, seconds in peer_seconds.items():
            report.add(kernel=f"peer: {peer}", density=density, ms=seconds * 1e3)
    return report


def _build_compress_run(x: Array, sums: Array, residual: Array, k: int, threads: int, bound: float) -> KernelRun:
    """Return a call of compress_ as in training: the sum goes into the gradient's memory (float32), or into `sums`
    (16-bit)."""
    if x.dtype == np.float32:
        gradient = np.empty_like(x)
        return KernelRun(
            "compress_",
            lambda: kernels.compress_(gradient, residual, k, threads=threads),
            lambda: np.copyto(gradient, x),  # compress_ has overwritten the gradient
            bound,
        )
    return KernelRun("compress_", lambda: kernels.compress_(x, residual, k, out=sums, threads=threads), None, bound)


def _time_peers(x: Array, k: int, repeats: int) -> dict[str, float]:
    """Return the median seconds in which NumPy and torch find the k largest of |x|, float32, with one thread."""
    magnitudes = np.abs(x)
    peer_repeats = min(repeats, 3)  # they are slow, and their times vary little
    seconds = {
        "argpartition": time_runs(
            lambda: np.argpartition(magnitudes, x.size - k)[x.size - k :], repeats=peer_repeats
        ).median
    }
    try:
        import torch
    except ImportError:
        return seconds
    tensor, threads_before = torch.from_numpy(magnitudes), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds["torch"] = time_runs(lambda: torch.topk(tensor, k), repeats=peer_repeats).median
    finally:
        torch.set_num_threads(threads_before)
    return seconds


def command(
    elements: Annotated[int, typer.Option(help="Length of the array.")] = 25_557_032,
    density: Annotated[
        list[float] | None, typer.Option(help="Share to keep; may be repeated. [0.001 and 0.01]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measured runs of each kernel.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of TopKube's kernels; peers use one.")] = 1,
    dtype: Annotated[str, typer.Option(help="Type of the array: float32, bfloat16 or float16.")] = "float32",
    peers: Annotated[bool, typer.Option(help="Also time numpy.argpartition and torch.topk.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
) -> None:
    """Compare the selection kernels with their peers and with the memory's bound."""
    check_path(json)
    report = measure(elements, density or [0.001, 0.01], repeats=repeats, threads=threads, dtype=dtype, peers=peers)
    report.show()
    report.write(json)
