"""`topkube plan`: predict the bytes, the steps and the scaling of each all-reduce on a cluster, for a model."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube import algorithms
from topkube.algorithms import (
    AUTO,
    CHOICES,
    DENSE,
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    OVERLAP,
    PERIOD,
    WIRE,
    Algorithm,
    BucketSize,
    Choice,
    Machines,
    rank_choices,
)
from topkube.cli.columns import align_columns
from topkube.errors import ArgumentError
from topkube.job import Aggregation, TrainingJob
from topkube.planning import guidelines
from topkube.planning.models import Model, find_model
from topkube.planning.picture import draw_sweep
from topkube.planning.profile import StepProfile, from_trace, uniform, with_host_costs
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, can_decouple, predict
from topkube.telemetry import trace
from topkube.telemetry.bar import format_bytes, format_duration

EFFICIENCY = 0.8
"""The scaling efficiency that recommendations keep."""
_LATENCY = 50e-6
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_EXAMPLES = {
    "--parameters": "25.6M or 7B",
    "--link": "10Gbit/s or 400Mbit",
    "--memory": "20GB/s",
    "--compute": "0.15 (seconds) or 60TFLOP/s",
    "--device-memory": "16GB",
}


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    job: Path | None
    model: str | None
    traces: tuple[Path, ...]
    parameters: str | None
    link: str
    memory: str
    compute: str | None
    batch: int | None
    device_memory: str | None
    workers: int | None
    slots: int | None
    cores: int | None
    device: str | None
    data: float
    spread: float | None
    density: float | None
    wire: str | None
    dense_wire: str | None
    period: int | None
    overlap: bool
    dear: bool | None
    plot: Path | None
    json: bool


def number(text: str, unit: str, option: str) -> float:
    """Return '25.6M' as 25600000.0; a unit such as bit/s may follow. Raises ArgumentError with an example."""
    match = re.fullmatch(rf"([0-9.]+(?:e-?[0-9]+)?)\s*([kMGBT]?)(?:{unit})?", text.strip())
    try:
        value = float(match[1]) * _SCALES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ArgumentError(f"{option} is {text!r}", next_step=f"write it as {_EXAMPLES[option]}")
    return value


@dataclass(frozen=True)
class _Plan:
    """What is planned: the cluster, the model and the algorithms."""

    situation: Situation
    elements: int
    wanted: str
    listed: list[Algorithm]
    profile: StepProfile | None
    model: Model | None

    @property
    def machines(self) -> Machines:
        return self.situation.machines

    def resolve(self, name: str) -> Algorithm:
        """Return the algorithm called `name`, or what the name stands for on this cluster."""
        if name not in CHOICES:
            return algorithms.find_algorithm(name)
        return _choose(name, self.machines, self.elements, self.situation.dense_wire).algorithm


def _choose(name: str, machines: Machines, elements: int, dense_wire: str) -> Choice:
    """Return what `auto` or `dense` stands for, as the ranks choose it from their measurements."""
    return rank_choices(name, machines, [BucketSize(elements)], dense_wire)[0]


def show_plan(options: PlanOptions) -> None:
    """Print tables and recommendations, or JSON; draw the picture. Raises ArgumentError, TraceError and PlotError."""
    plan = _plan(options)
    chosen = plan.resolve(plan.wanted)
    rows = [_row(plan, algorithm, algorithm == chosen) for algorithm in plan.listed]
    swept = guidelines.sweep(plan.profile, plan.situation, plan.listed) if plan.profile else []
    if options.plot is not None:
        if plan.profile is None:
            raise ArgumentError("--plot needs the time of a step", next_step="add --compute SECONDS or --trace FILE")
        draw_sweep(swept, options.plot, f"{plan.profile.name}: {_cluster(plan, options, with_nodes=False)}")
    advice = _advice(plan, options, chosen) if plan.profile else None
    if options.json:
        print(json.dumps(_as_json(plan, rows, swept, advice, chosen), indent=1))
        return
    _print_table(plan, rows, options)
    if advice is not None:
        _print_sweep(swept)
        _print_advice(advice, options)


def _plan(options: PlanOptions) -> _Plan:
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
    dense_wire = options.dense_wire or (aggregation.dense_wire if aggregation else DENSE_WIRE.default)
    if dense_wire not in DENSE_WIRE.choices:
        raise ArgumentError(
            f"--dense-wire is {dense_wire!r}", next_step=f"choose one of {', '.join(DENSE_WIRE.choices)}"
        )
    period = _period(options, aggregation)
    link = number(options.link, r"(?:bit|b)(?:/s|ps)?", "--link") / 8
    memory = number(options.memory.replace("GB", "G"), r"(?:/s)?", "--memory")
    if options.device not in (None, "cpu", "gpu"):
        raise ArgumentError(f"--device is {options.device!r}", next_step="choose cpu or gpu")
    profile, model = _profile(options)
    elements = profile.elements if profile else model.parameters if model else _parameters(options)
    latency = profile.latency if profile and profile.latency else _LATENCY
    cores = options.cores or (profile.cores if profile and profile.cores else math.inf)
    machines = Machines(workers, slots, link, memory, latency)
    listed, broken = algorithms.load_all()
    for error in broken:
        print(f"warning: {error}", file=sys.stderr)
    wanted = aggregation.algorithm if aggregation else AUTO
    if period is not None:
        listed = _select_allowed(listed, period, wanted)
    if wanted in CHOICES:
        dense_wire = _choose(wanted, machines, elements, dense_wire).dense_wire
    listed = [algorithm for algorithm in listed if not algorithm.needs_gpu or algorithm.name == wanted]
    situation = Situation(
        machines,
        density,
        wire,
        cores,
        options.overlap,
        dense_wire=dense_wire,
        period=period,
        is_decoupled=_is_decoupled(options, aggregation, profile),
        matrix_rank=aggregation.matrix_rank if aggregation else MATRIX_RANK.default,
    )
    return _Plan(situation, elements, wanted, listed, profile, model)


def _is_decoupled(options: PlanOptions, aggregation: Aggregation | None, profile: StepProfile | None) -> bool:
    """Return True if an option or the job asks for DeAR. Raises ArgumentError if it has no effect here."""
    wanted = aggregation is not None and aggregation.overlap == "dear" if options.dear is None else options.dear
    if not wanted:
        return False
    source = "--dear is set" if options.dear else "the job has overlap: dear"
    if not options.overlap:
        raise ArgumentError(
            f"{source}, and exchanges do not overlap", next_step="leave out --no-overlap, or add --no-dear"
        )
    if profile is not None and not profile.on_cpu:
        raise ArgumentError(
            f"{source}, and the gradients are on a GPU",
            cause="DeAR works with gradients in host memory only; without a trace, ranks compute on GPUs",
            next_step="add --device cpu, or --no-dear",
        )
    return True


def _period(options: PlanOptions, aggregation: Aggregation | None) -> int | None:
    """Return the period that an option or the job sets; None if neither does."""
    if options.period is not None:
        PERIOD.check(options.period)
        return options.period
    return aggregation.period if aggregation and "period" in aggregation.model_fields_set else None


def _select_allowed(listed: list[Algorithm], period: int, wanted: str) -> list[Algorithm]:
    """Return the algorithms that allow the period, and print why the others are left out. Raises ArgumentError if the
    algorithm `wanted` does not allow it."""
    allowed = []
    for algorithm in listed:
        try:
            algorithm.check_period(period)
        except ArgumentError as error:
            if algorithm.name == wanted:
                raise
            print(f"warning: {algorithm.name} is left out: {error.what}", file=sys.stderr)
        else:
            allowed.append(algorithm)
    return allowed


def _parameters(options: PlanOptions) -> int:
    return int(number(options.parameters or "25.6M", "", "--parameters"))


def _profile(options: PlanOptions) -> tuple[StepProfile | None, Model | None]:
    """Return the profile of a step, None if its time is unknown, and the built-in model if one was chosen."""
    sources = [("--model", options.model), ("--trace", options.traces), ("--parameters", options.parameters)]
    given = [option for option, value in sources if value]
    if len(given) > 1:
        raise ArgumentError(
            f"{given[0]} and {given[1]} both describe the model", next_step=f"pass {given[0]} or {given[1]}, not both"
        )
    model = find_model(options.model) if options.model else None
    profile: StepProfile | None = None
    if options.traces:
        profiles = [from_trace(trace.read(path), path.name) for path in options.traces]
        profile = with_host_costs(profiles[0], profiles[1:])
    compute = _compute(options, model)
    if compute is not None:
        if profile is not None:
            profile = profile.scaled(compute / profile.compute)
        else:
            profile = model.profile(compute) if model else uniform(_parameters(options), compute)
    if profile is None:
        return None, model
    changes: dict[str, Any] = {"data": options.data} if options.data else {}
    if options.device is not None:
        changes["on_cpu"] = options.device == "cpu"
    if options.spread is not None:
        changes["spread"] = options.spread
    return dataclasses.replace(profile, **changes), model


def _compute(options: PlanOptions, model: Model | None) -> float | None:
    """Return the seconds of forward and backward that --compute gives, None without it."""
    if options.compute is None:
        return None
    if not re.search(r"FLOP", options.compute):
        return number(options.compute, "s?", "--compute")
    rate = number(options.compute, r"FLOP(?:/s|S)", "--compute")
    if model is None or options.batch is None:
        raise ArgumentError(
            f"--compute is {options.compute!r}, a rate", next_step="add --model and --batch, or pass seconds"
        )
    return model.flops * options.batch / rate


# ---- rows


def _compare_overlaps(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> dict[str, float] | None:
    """Return the step with each overlap, None if DeAR has no effect."""
    if not can_decouple(profile, situation, algorithm):
        return None
    steps = (
        predict(profile, dataclasses.replace(situation, is_decoupled=dear), algorithm).step for dear in (False, True)
    )
    return dict(zip(OVERLAP.choices, steps, strict=True))


def _row(plan: _Plan, algorithm: Algorithm, chosen: bool) -> dict[str, Any]:
    situation = plan.situation
    exchange = situation.estimate_cost(algorithm, plan.elements)
    row: dict[str, Any] = {
        "algorithm": algorithm.name,
        "chosen": chosen,
        "sentBytes": round(exchange.sent),
        "betweenSeconds": exchange.between,
        "insideSeconds": exchange.inside,
        "exchangeSeconds": exchange.seconds,
        "stateBytes": algorithm.state_bytes(situation.workload(algorithm, plan.elements)),
    }
    if plan.profile is not None:
        row |= _step(predict(plan.profile, situation, algorithm))
    return row


def _step(prediction: Prediction) -> dict[str, float]:
    return {"stepSeconds": prediction.step, "efficiency": prediction.efficiency}


def _advice(plan: _Plan, options: PlanOptions, chosen: Algorithm) -> dict[str, Any]:
    """Return the recommendations. Batches are samples per rank if --batch says how many the present batch has, else
    multiples of the present batch."""
    assert plan.profile is not None
    profile, situation, dense = plan.profile, plan.situation, plan.resolve(DENSE)
    best = min(plan.listed, key=lambda algorithm: predict(profile, situation, algorithm).step)
    prediction = predict(profile, situation, chosen)
    factor = guidelines.batch_factor(profile, situation, chosen, EFFICIENCY)
    limit = None
    if options.device_memory is not None and plan.model is not None:
        memory = number(options.device_memory.replace("GB", "G").replace("Gi", "G"), "B?", "--device-memory")
        limit = guidelines.most_samples(memory, plan.elements, plan.model.activations, chosen, situation)
    even = {
        algorithm.name: guidelines.break_even(profile, situation, algorithm, dense)
        for algorithm in plan.listed
        if algorithm.compresses
    }
    return {
        "efficiency": EFFICIENCY,
        "fastest": best.name,
        "algorithm": chosen.name,
        "nodes": guidelines.most_nodes(profile, situation, chosen, EFFICIENCY),
        "ranksOfThisTotalBatch": guidelines.ranks_of_fixed_batch(prediction, situation.ranks, EFFICIENCY),
        "batchFactor": factor,
        "batch": math.ceil(factor * options.batch) if factor is not None and options.batch else None,
        "largestBatchInMemory": limit,
        "overlap": _compare_overlaps(profile, situation, chosen),
        "breakEven": {
            name: {"linkBitsPerSecond": None if row.link is None else row.link * 8, "fasterOnAllLinks": row.is_faster}
            for name, row in even.items()
        },
    }


def _as_json(plan: _Plan, rows: Any, swept: Any, advice: dict[str, Any] | None, chosen: Algorithm) -> dict[str, Any]:
    machines, situation = plan.machines, plan.situation
    values: dict[str, Any] = {
        "workers": machines.nodes,
        "slotsPerWorker": machines.slots,
        "parameters": plan.elements,
        "density": situation.density,
        "wire": situation.wire,
        "denseWire": situation.dense_wire,
        "period": situation.period,
        "overlap": _name_overlap(situation),
        "wanted": plan.wanted,
        "chosen": chosen.name,
        "algorithms": rows,
    }
    if plan.profile is not None:
        profile = plan.profile
        values["profile"] = {
            "name": profile.name,
            "forwardSeconds": profile.forward,
            "backwardSeconds": profile.backward,
            "updateSeconds": profile.update,
            "otherSeconds": profile.other,
            "spread": profile.spread,
            "latencySeconds": machines.latency,
        }
        values["nodes"] = [
            {"nodes": nodes, "algorithms": {row.algorithm.name: _step(row) for row in predictions}}
            for nodes, predictions in swept
        ]
        values["advice"] = advice
    return values


# ---- text


def _name_overlap(situation: Situation) -> str:
    if not situation.overlap:
        return "none"
    return "dear" if situation.is_decoupled else OVERLAP.default


def _cluster(plan: _Plan, options: PlanOptions, with_nodes: bool = True) -> str:
    machines, situation = plan.machines, plan.situation
    ranks = f"{machines.nodes} x {machines.slots} ranks" if with_nodes else f"{machines.slots} ranks per node"
    settings = f"density {situation.density:g}, {situation.wire}"
    if situation.dense_wire != DENSE_WIRE.default:
        settings += f", dense {situation.dense_wire}"
    if situation.period is not None:
        settings += f", period {situation.period}"
    if _name_overlap(situation) != OVERLAP.default:
        settings += f", overlap {_name_overlap(situation)}"
    return f"{ranks}, {plan.elements:,} parameters, {settings}; link {options.link}, memory {options.memory}"


def _print_table(plan: _Plan, rows: list[dict[str, Any]], options: PlanOptions) -> None:
    head = ["", "all-reduce", "a node sends", "between nodes", "inside a node", "exchange"]
    lines = [head + (["step", "scaling"] if plan.profile else [])]
    for row in rows:
        cells = ["->" if row["chosen"] else "", row["algorithm"], format_bytes(row["sentBytes"])]
        cells += [_seconds(row[f"{part}Seconds"]) for part in ("between", "inside", "exchange")]
        if plan.profile:
            cells += [_seconds(row["stepSeconds"]), f"{row['efficiency']:.0%}"]
        lines.append(cells)
    print(_cluster(plan, options))
    if plan.profile:
        profile = plan.profile
        parts = [("forward", profile.forward), ("backward", profile.backward)]
        parts += [("update", profile.update), ("other", profile.other), ("data", profile.data)]
        listed = ", ".join(f"{name} {_seconds(value)}" for name, value in parts if value)
        print(f"{profile.name}: {listed}")
    print("\n".join(align_columns(lines, "", right=range(2, len(lines[0])))))
    print(f"-> is what {plan.wanted} takes. An exchange is the lower bound of the cost model, without any overlap.")
    if plan.profile is None:
        print("Add --compute SECONDS (forward and backward of one step) or --trace FILE to see how the job scales.")


def _print_sweep(swept: list[tuple[int, list[Prediction]]]) -> None:
    lines = [["nodes", *(prediction.algorithm.name for prediction in swept[0][1])]]
    for nodes, predictions in swept:
        cells = [f"{_seconds(prediction.step)} {prediction.efficiency:4.0%}" for prediction in predictions]
        lines.append([f"{nodes:,}", *cells])
    print("\nstep and scaling by the number of nodes")
    print("\n".join(align_columns(lines, "", right=range(len(lines[0])))))


def _print_advice(advice: dict[str, Any], options: PlanOptions) -> None:
    wanted, name = f"{advice['efficiency']:.0%}", advice["algorithm"]
    print()
    if advice["fastest"] != name:
        print(f"fastest here: {advice['fastest']}")
    nodes = advice["nodes"]
    print(
        f"workers: up to {nodes:,} keep a scaling of {wanted} with {name} and the same batch per rank"
        if nodes > 1
        else f"workers: two already scale below {wanted} with {name}; use a larger batch per rank or a faster link"
    )
    print(f"workers for the same total batch: {advice['ranksOfThisTotalBatch']:,} ranks keep {wanted}")
    factor = advice["batchFactor"]
    if factor is None:
        print(f"batch: no batch per rank reaches {wanted} on this cluster with {name}")
    elif advice["batch"] is not None:
        print(f"batch: {advice['batch']:,} samples per rank are enough for {wanted} with {name}")
    else:
        print(f"batch: {factor:.2g} x the present batch per rank is enough for {wanted} with {name}")
    if (steps := advice["overlap"]) is not None:
        ratio, texts = steps["backward"] / steps["dear"], {key: _seconds(value) for key, value in steps.items()}
        print(f"overlap: a step of {name} takes {texts['dear']} with dear, {texts['backward']} without: {ratio:.2f}x")
    if advice["largestBatchInMemory"] is not None:
        print(f"batch: {options.device_memory} hold at most {advice['largestBatchInMemory']:,} samples per rank")
    for algorithm, row in advice["breakEven"].items():
        link = row["linkBitsPerSecond"]
        if link is not None:
            where = f"on links below {_rate(link)}"
        else:
            where = "on every link" if row["fasterOnAllLinks"] else "on no link"
        print(f"break-even: {algorithm} saves at least {guidelines.WORTH:.0%} of the dense step {where}")


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else format_duration(value)
