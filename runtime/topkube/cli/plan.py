"""`topkube plan`: what a cluster will do with a model: bytes, seconds and scaling of each all-reduce."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.cli.columns import columns
from topkube.collectives.cost import ALGORITHMS, VALUE_BYTES, Cost, Machines, cost, resolved
from topkube.errors import ArgumentError
from topkube.job import TrainingJob
from topkube.telemetry.bar import duration, size

OVERLAPPED = 2 / 3
"""Share of forward and backward together that is backward: gradients are exchanged while it runs."""
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

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
    """'25.6M' -> 25600000.0; a unit such as bit/s may follow. Raises ArgumentError that shows how it is written."""
    match = re.fullmatch(rf"([0-9.]+(?:e[0-9]+)?)\s*([kMGBT]?)(?:{unit})?", text.strip())
    try:
        value = float(match[1]) * _SCALES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        examples = {"--parameters": "25.6M or 7B", "--link": "10Gbit/s or 400Mbit", "--memory": "20GB/s"}
        raise ArgumentError(f"{option} is {text!r}", next_step=f"write it as {examples[option]}")
    return value


def show_plan(options: Options) -> None:
    """Prints a table, or JSON."""
    job = TrainingJob.from_yaml(options.job) if options.job else None
    spec = job.spec if job else None
    aggregation = spec.aggregation if spec else None
    workers = options.workers or (spec.workers if spec else 2)
    slots = options.slots or (spec.slots_per_worker if spec else 1)
    density = options.density if options.density is not None else (aggregation.density if aggregation else 0.01)
    wire = options.wire or (aggregation.wire if aggregation else "bf16")
    if not 0 < density <= 1:
        raise ArgumentError(f"--density is {density:g}", next_step="give a share above 0 and at most 1, such as 0.01")
    if wire not in VALUE_BYTES:
        raise ArgumentError(f"--wire is {wire!r}", next_step=f"choose one of {', '.join(VALUE_BYTES)}")
    if options.compute == 0:
        raise ArgumentError("--compute is 0", next_step="give the seconds of forward and backward, or leave it out")
    elements = int(number(options.parameters, "", "--parameters"))
    machines = Machines(
        nodes=workers,
        slots=slots,
        link=number(options.link, r"(?:bit|b)(?:/s|ps)?", "--link") / 8,
        memory=number(options.memory.replace("GB", "G"), r"(?:/s)?", "--memory"),
    )
    wanted = aggregation.algorithm if aggregation else "auto"
    chosen = resolved(wanted, workers, elements, density)
    costs = [cost(name, machines, elements, density, wire) for name in ALGORITHMS]
    rows = [_row(one, options.compute, one.algorithm == chosen) for one in costs]
    if options.json:
        known = {"workers": workers, "slotsPerWorker": slots, "parameters": elements, "density": density, "wire": wire}
        print(json.dumps({**known, "wanted": wanted, "chosen": chosen, "algorithms": rows}, indent=1))
        return
    _table(rows, options, f"{workers} x {slots} ranks, {elements:,} parameters, density {density:g}, {wire}", wanted)


def _row(one: Cost, compute: float | None, chosen: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "algorithm": one.algorithm,
        "chosen": chosen,
        "sentBytes": round(one.sent),
        "betweenSeconds": one.between,
        "insideSeconds": one.inside,
        "exchangeSeconds": one.seconds,
    }
    if compute is not None:
        step = compute + max(0.0, one.seconds - OVERLAPPED * compute)
        row |= {"stepSeconds": step, "efficiency": compute / step}
    return row


def _table(rows: list[dict[str, Any]], options: Options, title: str, wanted: str) -> None:
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
    print(f"-> is what {wanted} takes. Times are at best, by the cost model; docs/benchmarks.md has measured ones.")
    if options.compute is None:
        print("With --compute SECONDS (forward and backward of one step) it also says how the job scales.")


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else duration(value)
