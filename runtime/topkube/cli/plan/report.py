"""Print the results of `topkube plan` as tables and sentences."""

from __future__ import annotations

from typing import Any

from topkube.algorithms import CHOICES, DENSE_WIRE, OVERLAP
from topkube.cli.columns import align_columns
from topkube.cli.plan.comparison import Comparison
from topkube.cli.plan.options import PlanOptions
from topkube.cli.plan.results import name_overlap
from topkube.planning import guidelines
from topkube.planning.step import Prediction
from topkube.telemetry.bar import format_bytes, format_duration


def describe_situation(comparison: Comparison, options: PlanOptions, with_nodes: bool = True) -> str:
    """Return the cluster, the size of the model and the settings in a line."""
    machines, situation = comparison.machines, comparison.situation
    ranks = f"{machines.nodes} x {machines.slots} ranks" if with_nodes else f"{machines.slots} ranks per node"
    settings = f"density {situation.density:g}, {situation.wire}"
    if situation.dense_wire != DENSE_WIRE.default:
        settings += f", dense {situation.dense_wire}"
    if situation.period is not None:
        settings += f", period {situation.period}"
    if name_overlap(situation) != OVERLAP.default:
        settings += f", overlap {name_overlap(situation)}"
    if situation.delay:
        settings += f", delay {situation.delay}"
    return f"{ranks}, {comparison.elements:,} parameters, {settings}; link {options.link}, memory {options.memory}"


def print_table(comparison: Comparison, rows: list[dict[str, Any]], options: PlanOptions) -> None:
    """Print a row for each algorithm, with its step if the time of a step is known."""
    head = ["", "all-reduce", "a node sends", "between nodes", "inside a node", "exchange"]
    has_measured_rows = any(row.get("measured") for row in rows)
    lines = [head + (["step", "scaling"] if comparison.profile else []) + (["thread"] if has_measured_rows else [])]
    for row in rows:
        cells = ["->" if row["chosen"] else "", row["algorithm"], format_bytes(row["sentBytes"])]
        cells += [_format_seconds(row[f"{part}Seconds"]) for part in ("between", "inside", "exchange")]
        if comparison.profile:
            cells += [_format_seconds(row["stepSeconds"]), f"{row['efficiency']:.0%}"]
        if has_measured_rows:
            cells.append("measured" if row["measured"] else "bound")
        lines.append(cells)
    print(describe_situation(comparison, options))
    if comparison.profile:
        profile = comparison.profile
        parts = [("forward", profile.forward), ("backward", profile.backward)]
        parts += [("update", profile.update), ("other", profile.other), ("data", profile.data)]
        listed = ", ".join(f"{name} {_format_seconds(value)}" for name, value in parts if value)
        print(f"{profile.name}: {listed}")
    print("\n".join(align_columns(lines, "", right=range(2, len(lines[0])))))
    print(f"{_explain_choice(comparison)} An exchange is the lower bound of the cost model, without any overlap.")
    if has_measured_rows and not all(row["measured"] for row in rows):
        print(
            'With "bound", the work of the communication thread is a lower bound, so the step is too short in'
            ' comparison with "measured". Add traces of these algorithms with --trace.'
        )
    if comparison.profile is None:
        print("Add --compute SECONDS (forward and backward of one step) or --trace FILE to see how the job scales.")


def _explain_choice(comparison: Comparison) -> str:
    if comparison.wanted not in CHOICES:
        return "-> marks the algorithm of the job."
    if comparison.find_chosen() is None:
        return f"What {comparison.wanted} takes depends on the time of a step: add --compute or --trace."
    return f"-> marks what {comparison.wanted} takes."


def print_sweep(swept: list[tuple[int, list[Prediction]]]) -> None:
    """Print the predicted steps of all algorithms by the number of nodes."""
    lines = [["nodes", *(prediction.algorithm.name for prediction in swept[0][1])]]
    for nodes, predictions in swept:
        cells = [f"{_format_seconds(prediction.step)} {prediction.efficiency:4.0%}" for prediction in predictions]
        lines.append([f"{nodes:,}", *cells])
    print("\nstep and scaling by the number of nodes")
    print("\n".join(align_columns(lines, "", right=range(len(lines[0])))))


def print_recommendations(advice: dict[str, Any], options: PlanOptions) -> None:
    """Print the recommendations that `recommend` returned, each in a line."""
    scaling, name = f"{advice['efficiency']:.0%}", advice["algorithm"]
    print()
    if advice["fastest"] != name:
        print(f"fastest here: {advice['fastest']}")
    nodes = advice["nodes"]
    print(
        f"workers: up to {nodes:,} keep a scaling of {scaling} with {name} and the same batch per rank"
        if nodes > 1
        else f"workers: two already scale below {scaling} with {name}; use a larger batch per rank or a faster link"
    )
    ranks = advice["ranksOfThisTotalBatch"]
    print(f"workers for the same total batch: {f'{ranks:,} ranks keep' if ranks > 1 else '1 rank keeps'} {scaling}")
    factor = advice["batchFactor"]
    if factor is None:
        print(f"batch: no batch per rank reaches {scaling} on this cluster with {name}")
    elif advice["batch"] is not None:
        print(f"batch: {advice['batch']:,} samples per rank are enough for {scaling} with {name}")
    else:
        shown = f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"
        print(f"batch: {shown} x the present batch per rank is enough for {scaling} with {name}")
    if (steps := advice["overlap"]) is not None:
        ratio, texts = steps["backward"] / steps["dear"], {key: _format_seconds(value) for key, value in steps.items()}
        print(f"overlap: a step of {name} takes {texts['dear']} with dear, {texts['backward']} without: {ratio:.2f}x")
    if (steps := advice["delay"]) is not None:
        ratio, texts = steps["0"] / steps["1"], {key: _format_seconds(value) for key, value in steps.items()}
        print(f"delay: a step of {name} takes {texts['1']} with delay 1, {texts['0']} without: {ratio:.2f}x")
    if (samples := advice["largestBatchInMemory"]) is not None:
        print(
            f"batch: {options.device_memory} hold at most {samples:,} samples per rank"
            if samples
            else f"batch: the model does not fit into {options.device_memory}, not even with one sample per rank"
        )
    for algorithm, row in advice["breakEven"].items():
        link = row["linkBitsPerSecond"]
        if link is not None:
            links = f"on links below {_format_rate(link)}"
        else:
            links = "on every link" if row["fasterOnAllLinks"] else "on no link"
        note = "" if row["comparable"] else " (compares a measured step with a bound)"
        print(f"break-even: {algorithm} saves at least {guidelines.LEAST_SAVING:.0%} of the dense step {links}{note}")


def _format_rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _format_seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else format_duration(value)
