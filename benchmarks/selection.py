"""Compare selection with its peers, on ordinary and on adversarial inputs: python benchmarks/selection.py

Writes benchmarks/results/select.json. One thread selects from 25,557,032 float32 elements (those of ResNet-50), or from
--elements elements. The peers are numpy.argpartition and torch.topk on the precomputed |x|, and MSTopK built from torch
operations with one count per probe and the same thresholds. The bounds are measured in the same run: one read of the
array, and an in-place addition.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from topkube import kernels
from topkube.bench.report import BenchReport, time_runs
from topkube.bench.select import measure
from topkube.collectives.top_signs import TOP_SHARE

RESULTS = Path(__file__).parent / "results" / "select.json"


def build_adversarial(d: int) -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(d, dtype=np.float32)
    yield "normal", normal
    yield "sorted", np.sort(normal)
    yield "constant", np.ones(d, np.float32)
    yield "few distinct values", rng.integers(-2, 3, d).astype(np.float32)
    spike = np.zeros(d, np.float32)
    spike[d // 2] = 1e30
    yield "one spike", spike
    yield "denormals", rng.integers(0, 2**12, d, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        yield "heavy tails", (rng.standard_cauchy(d) ** 3).astype(np.float32)
    matrix = rng.standard_normal((4096, 4096), dtype=np.float32)
    matrix[:, ::256] *= 100
    yield "4096 x 4096, 16 loud columns", matrix.ravel()
    matrix = rng.standard_normal((4096, 4096), dtype=np.float32)
    matrix[:, ::256] *= 0.01
    yield "4096 x 4096, 16 quiet columns", matrix.ravel()
    nan = normal.copy()
    nan[:: d // 1000] = np.nan
    yield "NaN", nan


def is_exact(x: Any, k: int, indices: Any) -> bool:
    """Return True if these are the k largest; among equal magnitudes the lowest index is selected."""
    magnitude = x.view(np.uint32) & 0x7FFFFFFF
    threshold = np.partition(magnitude, x.size - k)[x.size - k]
    above = np.flatnonzero(magnitude > threshold)
    ties = np.flatnonzero(magnitude == threshold)[: k - above.size]
    return bool(np.array_equal(np.sort(np.concatenate([above, ties])), indices))


def run_torch_mstopk(x: torch.Tensor, k: int, iterations: int = 30) -> tuple[int, int]:
    """Run Algorithm 1 with torch operations; return how many magnitudes reach each threshold."""
    a = x.abs()
    mean, top = a.double().mean().item(), a.max().item()
    left, right, k1, k2, upper, lower = 0.0, 1.0, 0, a.numel(), float("inf"), 0.0
    for _ in range(iterations):
        ratio = left + (right - left) / 2
        threshold = float(np.float32(mean + ratio * (top - mean)))
        count = int((a >= threshold).sum())
        if count <= k:
            right = ratio
            if count > k1:
                k1, upper = count, threshold
        else:
            left = ratio
            if count < k2:
                k2, lower = count, threshold
    above = torch.nonzero(a >= upper).squeeze(1)
    between = torch.nonzero((a < upper) & (a >= lower)).squeeze(1)[: k - k1]
    chosen = torch.cat([above, between])
    assert x[chosen].numel() == k
    return k1, k2


def report_adversarial(d: int, repeats: int) -> BenchReport:
    columns = {
        "input": "input",
        "kernel": "kernel",
        "density": "density",
        "ms": "ms",
        "passes": "passes",
        "exact": "exact",
    }
    report = BenchReport("Adversarial inputs", columns)
    for name, x in build_adversarial(d):
        for density in (0.001, 0.01):
            k = kernels.entries_kept(x.size, density)
            timing = time_runs(lambda x=x, k=k: kernels.topk(x, k), repeats=repeats)
            exact = is_exact(x, k, kernels.topk(x, k)[0])
            passes = kernels.last_effort().passes
            report.add(input=name, kernel="topk", density=density, ms=timing.median * 1e3, passes=passes, exact=exact)
            zeros, gradient = np.zeros_like(x), np.empty_like(x)
            timing = time_runs(
                lambda g=gradient, z=zeros, k=k: kernels.compress_(g, z, k),
                prepare=lambda g=gradient, x=x: np.copyto(g, x),
                repeats=repeats,
            )
            passes = kernels.last_effort().passes
            np.copyto(gradient, x)
            exact = is_exact(x + zeros, k, kernels.compress_(gradient, zeros, k)[0])
            report.add(
                input=name, kernel="compress_", density=density, ms=timing.median * 1e3, passes=passes, exact=exact
            )
    return report


def report_mstopk(d: int, repeats: int) -> BenchReport:
    columns = {
        "density": "density",
        "ms": "ms",
        "torch_ms": "torch operations, ms",
        "ratio": "ratio",
        "same": "same counts",
    }
    report = BenchReport("MSTopK, N = 30", columns)
    torch.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal(d, dtype=np.float32)
    tensor = torch.from_numpy(x)
    for density in (0.001, 0.01):
        k = kernels.entries_kept(d, density)
        timing = time_runs(lambda k=k: kernels.mstopk(x, k), repeats=repeats)
        thresholds = kernels.last_thresholds()
        counts: list[tuple[int, int]] = []
        peer = time_runs(lambda k=k, counts=counts: counts.append(run_torch_mstopk(tensor, k)), repeats=1, warmups=0)
        same = counts[-1] == (thresholds.above_upper, thresholds.above_lower)
        ratio = peer.median / timing.median
        report.add(density=density, ms=timing.median * 1e3, torch_ms=peer.median * 1e3, ratio=ratio, same=same)
    return report


def measure_codecs(d: int, repeats: int) -> BenchReport:
    """Measure the kernels of signs and of integers. The bound moves as many bytes as the kernel must, at the speed at
    which the array is multiplied by 1 in place. A kernel must read and write the array (8 bytes per element), and read
    or write each message once; the choice of the largest elements must read the array once before."""
    columns = {"kernel": "kernel", "nodes": "nodes", "ms": "ms", "bound_ms": "bound, ms", "of_bound": "of its bound"}
    report = BenchReport("Signs and integers", columns)
    x = np.random.default_rng(0).standard_normal(d, dtype=np.float32)
    work, part = x.copy(), kernels.sign_pack_(x.copy())[:2]
    report.facts |= {"path": kernels.simd(), "elements": d, "load average": round(os.getloadavg()[0], 1)}
    in_place = time_runs(lambda: kernels.scale_(work, 1.0), repeats=repeats).median
    sign_bytes = sum(array.nbytes for array in part)

    def add(kernel: str, nodes: int, seconds: float, message_bytes: int, element_bytes: int = 8) -> None:
        least = in_place * (element_bytes * d + nodes * message_bytes) / (8 * d)
        report.add(kernel=kernel, nodes=nodes, ms=seconds * 1e3, bound_ms=least * 1e3, of_bound=least / seconds)

    timing = time_runs(lambda: kernels.sign_pack_(work, *part), prepare=lambda: np.copyto(work, x), repeats=repeats)
    add("sign_pack_", 1, timing.median, sign_bytes)
    for nodes in (2, 8):
        weights = [1 / nodes] * nodes
        timing = time_runs(lambda: kernels.sign_unpack_add_(work, [part] * nodes, weights), repeats=repeats)  # noqa: B023
        add("sign_unpack_add_", nodes, timing.median, sign_bytes)
    count = kernels.entries_kept(d, TOP_SHARE)
    message = np.empty(kernels.top_sign_bytes(d, count), np.uint8)
    pack = lambda: kernels.top_sign_pack_(work, count, message)  # noqa: E731
    timing = time_runs(pack, prepare=lambda: np.copyto(work, x), repeats=repeats)
    add("top_sign_pack_, a tenth", 1, timing.median, message.nbytes, element_bytes=12)
    timing = time_runs(lambda: kernels.top_sign_unpack_add_(work, count, message, 1.0), repeats=repeats)
    add("top_sign_unpack_add_, a tenth", 1, timing.median, message.nbytes)
    for bits in kernels.QUANTISED_BITS:
        message = np.empty(kernels.quantised_bytes(d, bits), np.uint8)
        pack = lambda: kernels.quantised_pack_(work, bits, message)  # noqa: B023, E731
        add(
            f"quantised_pack_, {bits} bits",
            1,
            time_runs(pack, prepare=lambda: np.copyto(work, x), repeats=repeats).median,
            message.nbytes,
        )
        for nodes in (1, 2, 8):
            messages, weights = [message] * nodes, [1 / nodes] * nodes
            unpack = lambda: kernels.quantised_unpack_add_(work, bits, messages, weights)  # noqa: B023, E731
            seconds = time_runs(unpack, repeats=repeats).median
            add(f"quantised_unpack_add_, {bits} bits", nodes, seconds, message.nbytes)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=25_557_032)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--codecs", action="store_true", help="measure signs and integers only; keep what is stored")
    options = parser.parse_args()
    if options.codecs:
        report = measure_codecs(options.elements, options.repeats)
        Console(width=140).print(report.build_table())
        stored = json.loads(options.out.read_text()) | {"codecs": json.loads(report.to_json())}
        options.out.write_text(json.dumps(stored, indent=1) + "\n")
        return
    reports = [
        measure(options.elements, [0.001, 0.01], repeats=options.repeats),
        report_mstopk(options.elements, options.repeats),
        report_adversarial(options.elements, 3),
        measure_codecs(options.elements, options.repeats),
    ]
    for report in reports:
        Console(width=140).print(report.build_table())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    selection, mstopk, inputs, codecs = (json.loads(report.to_json()) for report in reports)
    stored = selection | {"mstopk": mstopk, "adversarial": inputs, "codecs": codecs}
    options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
