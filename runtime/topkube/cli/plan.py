"""`topkube plan`: compute the bytes, seconds and scaling of each all-reduce on a cluster, for a model."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube import algorithms
from topkube.algorithms import AUTO, DENSITY, WIRE, Cost, Machines, Workload, cost
from topkube.cli.columns import columns
from topkube.errors import ArgumentError
from topkube.job import TrainingJob
from topkube.telemetry.bar import duration, size

OVERLAPPED = 2 / 3
"""Share of backward in the time of forward and backward: gradients are exchanged during backward."""
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    job: Path | None
    parameters: str
    link: str
    memory: str
    compute: float | None
    workers: int | None
    slots: int | None
    density: float | None
    wire: str | None
    json: bool


def number(text: str, unit: str, option: str) -> float:
    """Return '25.6M' as 25600000.0; a unit such as bit/s may follow. Raises ArgumentError with an example."""
    match = re.fullmatch(rf"([0-9.]+(?:e[0-9]+)?)\s*([kMGBT]?)(?:{unit})?", text.strip())
    try:
        value = float(match[1]) * _SCALES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        examples = {"--parameters": "25.6M or 7B", "--link": "10Gbit/s or 400Mbit", "--memory": "20GB/s"}
        raise ArgumentError(f"{option} is {text!r}", next_step=f"write it as {examples[option]}")
    return value


def show_plan(options: PlanOptions) -> None:
    """Print a table, or JSON."""
    job = TrainingJob.from_yaml(options.job) if options.job else None
    spec = job.spec if job else None
    aggregation = spec.aggregation if spec else None
    workers = options.workers or (spec.workers if spec else 2)
    slots = options.slots or (spec.slots_per_worker if spec else 1)
    density = options.density if options.density is not None else (aggregation.density if aggregation else None)
    density = DENSITY.default if density is None else density
    wire = options.wire or (aggregation.wire if aggregation else WIRE.default)
    if not 0 < density <= 1:
        raise ArgumentError(f"--density is {density:g}", next_step="pass a share above 0 and at most 1, such as 0.01")
    if wire not in WIRE.choices:
        raise ArgumentError(f"--wire is {wire!r}", next_step=f"choose one of {', '.join(WIRE.choices)}")
    if options.compute == 0:
        raise ArgumentError("--compute is 0", next_step="pass the seconds of forward and backward, or omit the option")
    elements = int(number(options.parameters, "", "--parameters"))
    machines = Machines(
        nodes=workers,
        slots=slots,
        link=number(options.link, r"(?:bit|b)(?:/s|ps)?", "--link") / 8,
        memory=number(options.memory.replace("GB", "G"), r"(?:/s)?", "--memory"),
    )
    wanted = aggregation.algorithm if aggregation else AUTO
    chosen = algorithms.resolve(wanted, workers, elements, density)
    listed, broken = algorithms.load_all()
    for error in broken:
        print(f"warning: {error}", file=sys.stderr)
    workload = Workload(workers, slots, elements, density, wire)
    rows = []
    for algorithm in listed:
        row = _row(cost(algorithm, machines, elements, density, wire), options.compute, algorithm == chosen)
        rows.append(row | {"stateBytes": algorithm.state_bytes(workload)})
    if options.json:
        known = {"workers": workers, "slotsPerWorker": slots, "parameters": elements, "density": density, "wire": wire}
        print(json.dumps({**known, "wanted": wanted, "chosen": chosen.name, "algorithms": rows}, indent=1))
        return
    _table(rows, options, f"{workers} x {slots} ranks, {elements:,} parameters, density {density:g}, {wire}", wanted)


def _row(exchange: Cost, compute: float | None, chosen: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "algorithm": exchange.algorithm.name,
        "chosen": chosen,
        "sentBytes": round(exchange.sent),
        "betweenSeconds": exchange.between,
        "insideSeconds": exchange.inside,
        "exchangeSeconds": exchange.seconds,
    }
    if compute is not None:
        step = compute + max(0.0, exchange.seconds - OVERLAPPED * compute)
        row |= {"stepSeconds": step, "efficiency": compute / step}
    return row


def _table(rows: list[dict[str, Any]], options: PlanOptions, title: str, wanted: str) -> None:
    head = ["", "all-reduce", "a node sends", "between nodes", "inside a node", "exchange"]
    lines = [head + ([] if options.compute is None else ["step", "scaling"])]
    for row in rows:
        cells = ["->" if row["chosen"] else "", row["algorithm"], size(row["sentBytes"])]
        cells += [_seconds(row[f"{part}Seconds"]) for part in ("between", "inside", "exchange")]
        if options.compute is not None:
            cells += [_seconds(row["stepSeconds"]), f"{row['efficiency']:.0%}"]
        lines.append(cells)
    print(f"{title}; link {options.link}, memory {options.memory}")
    print("\n".join(columns(lines, "", right=range(2, len(lines[0])))))
    print(f"-> is what {wanted} takes. The cost model gives best-case times; docs/benchmarks.md has measured times.")
    if options.compute is None:
        print("Add --compute SECONDS (forward and backward of one step) to see how the job scales.")


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else duration(value)
