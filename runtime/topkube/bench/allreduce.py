"""`topkube bench allreduce`: measure every all-reduce algorithm on these ranks and links. Start it under mpiexec.

Columns follow NCCL's convention: algbw = bytes / time, busbw = algbw * 2(P-1)/P with P ranks, so busbw can be
compared with the speed of the links for every P. For all algorithms, also sparse ones, bytes are those of the array
that was reduced. The bytes that were sent have columns of their own.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from topkube import algorithms, collectives
from topkube import world as worlds
from topkube.algorithms import DENSITY, SELECTION, WIRE, Algorithm, Scope
from topkube.arrays import BFLOAT16, Array
from topkube.bench.bench_arrays import ArrayMemory, HostArrays, choose_memory
from topkube.bench.report import BenchReport, Timing, check_path, describe_machine, time_runs
from topkube.collectives.coordination import reduce
from topkube.errors import ArgumentError
from topkube.telemetry import phases
from topkube.world import World

_TYPES = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}
_TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}
_CHECKED = 300_007
"""Elements of the array whose result is checked; odd, so that shards differ in length."""

COLUMNS = {
    "algorithm": "algorithm",
    "median_ms": "median ms",
    "minimum_ms": "min ms",
    "maximum_ms": "max ms",
    "algbw": "algbw",
    "busbw": "busbw",
    "inter_mb": "MB/node",
    "intra_mb": "MB inside the node, per rank",
    "inter_ms": "ms between",
    "intra_ms": "ms inside",
    "select_ms": "ms select",
    "error": "error",
    "right": "right",
}

SHOWN = ("algorithm", "median_ms", "minimum_ms", "maximum_ms", "algbw", "busbw", "inter_mb", "error", "right")
"""Columns of the table; the JSON has all columns."""


def command(
    elements: Annotated[int, typer.Option(min=1, help="Length of the array.")] = 25_557_032,
    algorithms: Annotated[str, typer.Option(help="Names of algorithms, separated by commas (default: all).")] = "",
    density: Annotated[float, typer.Option(help="Share of the entries that sparse algorithms send.")] = DENSITY.default,
    wire: Annotated[str, typer.Option(help=f"Sparse values between nodes: {', '.join(WIRE.choices)}.")] = "fp32",
    dtype: Annotated[str, typer.Option(help="Type of the array: fp32, bf16 or fp16.")] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="Number of measured runs of each algorithm.")] = 7,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Reduce on the GPUs of the ranks, and compare with NCCL alone.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Measure all-reduce on the ranks that mpiexec started, and check the results."""
    world = worlds.init()
    if world.rank == 0:
        check_path(json)
    memory = choose_memory(world, gpu)
    report = measure(world, elements, list_names(algorithms, memory), density, wire, dtype, repeats, memory)
    if world.rank == 0:
        dataclasses.replace(report, columns={key: COLUMNS[key] for key in SHOWN}).show()
        report.write(json)


def measure(
    world: World,
    elements: int,
    names: list[str],
    density: float,
    wire: str,
    dtype: str,
    repeats: int,
    memory: ArrayMemory | None = None,
) -> BenchReport:
    """Run each algorithm or peer of `names` `repeats` times on `elements` elements in `memory` (default: host memory).
    The report is complete on rank 0. A collective."""
    memory = memory or HostArrays()
    if dtype not in _TYPES:
        raise ArgumentError(f"dtype is {dtype!r}", next_step=f"choose one of {', '.join(_TYPES)}")
    facts = {
        **describe_machine(),
        "ranks": " + ".join(str(len(ranks)) for ranks in world.node_ranks),
        "elements": elements,
        "type": dtype,
        "memory": memory.name,
        "density": density,
        "wire": wire,
    }
    report = BenchReport(
        "All-reduce: bandwidths in GB/s, MB sent between nodes per node, error against float64", COLUMNS, facts=facts
    )
    values = np.random.default_rng(world.rank).standard_normal(elements, np.float32).astype(_TYPES[dtype])
    start, work = memory.put(values), memory.put(values)
    for name in names:
        checked, error = _check_result(world, memory, name, density, wire, dtype)

        def prepare() -> None:
            memory.restore(work, start)
            world.agree(True)

        def run(name: str = name) -> None:
            memory.reduce(work, name, density, wire)
            world.agree(True)

        prepare()
        run()
        phases.current.take()
        timing = time_runs(run, repeats=repeats, warmups=0, prepare=prepare)
        _add_row(world, report, name, values.nbytes, timing, checked, error, name not in memory.peers)
    return report


def _add_row(
    world: World,
    report: BenchReport,
    name: str,
    nbytes: int,
    timing: Timing,
    right: bool,
    error: float,
    is_counted: bool,
) -> None:
    """Add the row of an array of `nbytes` bytes. `is_counted` is False for peers: their messages and stages are not
    counted."""
    stages = phases.current.take()
    runs = timing.repeats
    sent, inside = world.sum_small(np.array([stages.inter_bytes, stages.intra_bytes], np.float64)) / runs
    algbw = nbytes / timing.median / 1e9
    report.add(
        algorithm=name,
        median_ms=timing.median * 1e3,
        minimum_ms=timing.minimum * 1e3,
        maximum_ms=timing.maximum * 1e3,
        algbw=algbw,
        busbw=algbw * 2 * (world.size - 1) / world.size,
        inter_mb=float(sent) / world.nodes / 1e6 if is_counted else None,
        intra_mb=float(inside) / world.size / 1e6 if is_counted else None,
        **{
            f"{phase}_ms": stages.seconds.get(phase, 0.0) / runs * 1e3 if is_counted else None
            for phase in ("inter", "intra", "select")
        },
        error=error,
        right=right,
    )


def list_names(text: str, memory: ArrayMemory) -> list[str]:
    """Return the algorithms that the text names, or all that work in `memory`, followed by the peers there."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        algorithms.find_algorithm(name)
    if chosen:
        return [*chosen, *memory.peers]
    listed, broken = algorithms.load_all()
    if worlds.current().rank == 0:
        for error in broken:
            print(f"warning: {error}", file=sys.stderr)
    return [algorithm.name for algorithm in listed if memory.can_reduce(algorithm)] + list(memory.peers)


def _check_result(
    world: World, memory: ArrayMemory, name: str, density: float, wire: str, dtype: str
) -> tuple[bool, float]:
    """Reduce a small array with `name`. Return True if the result is right on all ranks, and its largest error relative
    to the largest value."""
    inputs = [
        np.random.default_rng([rank, 1]).standard_normal(_CHECKED, np.float32).astype(_TYPES[dtype])
        for rank in range(world.size)
    ]
    is_peer = name in memory.peers
    algorithm = algorithms.resolve("dense" if is_peer else name, world.nodes, _CHECKED, density)
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[wire] if algorithm.compresses else 0.0)
    if not algorithm.compresses or SELECTION in algorithm.parameters:
        reduced = memory.put(inputs[world.rank])
        memory.reduce(reduced, name, density, wire)
        expected, is_certain = _compute_reference(world, algorithm, inputs, density, _TOLERANCE[dtype])
        actual = memory.read(reduced).astype(np.float64)
    elif algorithm.residual is not None:
        expected = np.sum([array.astype(np.float64) / world.size for array in inputs], axis=0)
        is_certain = np.ones(_CHECKED, np.bool_)
        actual = _reduce_and_add_residuals(world, algorithm, inputs[world.rank].copy(), density, wire)
    else:  # the expected result is not known, so only NaN and infinity are errors
        result = inputs[world.rank].copy()
        collectives.allreduce_(result, algorithm=name, density=density, wire=wire)
        return world.agree(bool(np.isfinite(result).all())), float("nan")
    error = float((np.abs(actual - expected) * is_certain).max() / np.abs(expected).max())
    return world.agree(error <= tolerance), error


def _reduce_and_add_residuals(
    world: World, algorithm: Algorithm, array: Array, density: float, wire: str
) -> npt.NDArray[np.float64]:
    """Reduce `array` and return the result plus what all ranks kept back: the mean of all inputs, if nothing is lost. A
    collective."""
    residual = collectives.new_residual(algorithm.name, array.size)
    collectives.allreduce_(array, algorithm=algorithm.name, density=density, wire=wire, residual=residual)
    start, stop = collectives.residual_range(algorithm, world, array.size)
    kept = np.zeros(array.size)
    kept[start:stop] = residual.current
    total: npt.NDArray[np.float64] = array.astype(np.float64) + reduce(kept, world=world)
    return total


def _compute_reference(
    world: World, algorithm: Algorithm, inputs: list[Array], density: float, margin: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the expected mean in float64, and True for each element that is certain. Rounding decides which of two
    entries with magnitudes near the k-th magnitude is sent. So an element is not certain if its magnitude differs from
    the k-th by less than the share `margin`."""
    means = [array.astype(np.float64) / world.size for array in inputs]
    expected, is_certain = np.zeros(_CHECKED), np.ones(_CHECKED, np.bool_)
    if not algorithm.compresses:
        return np.sum(means, axis=0), is_certain
    is_per_node = algorithm.residual is not None and algorithm.residual.scope is Scope.SHARD
    shards = world.shards if is_per_node else 1
    senders = [sum(means[rank] for rank in ranks) for ranks in world.node_ranks] if is_per_node else means
    k = max(1, int(np.ceil(density * _CHECKED / shards)))
    for shard in range(shards):
        part = slice(_CHECKED * shard // shards, _CHECKED * (shard + 1) // shards)
        for sender in senders:
            values = np.asarray(sender)[part]
            magnitudes = np.abs(values)
            threshold = np.sort(magnitudes)[-min(k, values.size)]
            expected[part] += np.where(magnitudes >= threshold, values, 0.0)
            is_certain[part] &= np.abs(magnitudes - threshold) > margin * threshold
    return expected, is_certain
