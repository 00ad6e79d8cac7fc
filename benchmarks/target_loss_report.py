"""The section of docs/benchmarks.md about the time to a target loss, and its picture."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from tables import format_number, format_table
from target_loss import CONTENDERS, DDP, DENSE_SHARE, MARGINS, MODELS, OPTIMIZERS, RATES, compute_seconds_to_target

Row = dict[str, Any]
LINKS = {"100mbit": "100 Mbit/s", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
TITLES = {"adamw": "AdamW", "sgd": "SGD"}
SIZES = {"char_gpt": "120,000 parameters", "char_gpt_800k": "830,000 parameters"}


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return a table for each model, optimizer and link, and the facts of the runs."""
    tables = []
    for model, optimizer, length, rate in sorted({_find_kind(row) for row in stored["compared"]}):
        rows = [row for row in stored["compared"] if _find_kind(row) == (model, optimizer, length, rate)]
        link = (model, optimizer, rate)
        times = [row for row in stored["times"] if (row["model"], row["optimizer"], LINKS[row["rate"]]) == link]
        measured = "; ".join(sorted({f"{row['date']}, load {row['load']:g}" for row in times}))
        title = f"**{SIZES[model]}, {rate}, {TITLES[optimizer]}, runs of {length:,} steps** (times: {measured})"
        tables.append(f"{title}\n\n{_format_times(rows, times)}")
    facts = " · ".join(f"{name}: {value}" for name, value in stored["facts"].items())
    return {
        "TARGET_LOSS": "\n\n".join(tables),
        "LAST_LOSSES": _format_losses(stored["losses"]),
        "TARGET_LOSS_FACTS": facts,
    }


def _find_kind(row: Row) -> tuple[str, str, int, str]:
    return row["model"], row["optimizer"], row["length"], LINKS[row["rate"]]


def _format_losses(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        interval = row["interval_percent"]
        cells.append(
            [
                f"{SIZES[row['model']]}, {TITLES[row['optimizer']]}, {row['length']:,} steps, "
                + _format_name(row["contender"]),
                str(row["seeds"]),
                f"{row['ddp_loss']:.4f}",
                f"{row['loss']:.4f}",
                f"{row['difference_percent']:+.2f}%",
                f"{interval[0]:+.2f} to {interval[1]:+.2f}%" if interval else "–",
            ]
        )
    return format_table(["", "seeds", "DDP's last loss", "last loss", "difference", "95% interval"], cells)


def _format_name(contender: str) -> str:
    label = CONTENDERS[contender].label
    return f"**{label}**" if CONTENDERS[contender].world == "mpich" else label


def _format_times(rows: list[Row], times: list[Row]) -> str:
    time_of = {row["contender"]: row for row in times}
    by_margin = {(row["contender"], row["margin_percent"]): row for row in rows}
    cells = []
    for name in sorted(time_of, key=lambda name: median(time_of[name]["turns_ms"])):
        turns = time_of[name]["turns_ms"]
        if (name, MARGINS[0]) not in by_margin:
            continue
        line = [
            _format_name(name),
            f"{median(turns):.1f} ({min(turns):.1f}–{max(turns):.1f})",
            f"{time_of[name]['sent_kb']:,.0f}",
            str(by_margin[name, MARGINS[0]]["seeds"]),
        ]
        for margin in MARGINS:
            line += _format_cells(by_margin[name, margin])
        cells.append(line)
    headings = ["", "step, ms (turns)", "sent per node, KB", "seeds"]
    for margin in MARGINS:
        headings += [f"steps to DDP's loss +{margin:g}%", "seconds", "× the best peer (range)"]
    return format_table(headings, cells)


def _format_cells(row: Row) -> list[str]:
    if row["seconds"] is None:
        missed = row["seeds"] - row["reached"]
        return ["not reached" if missed == row["seeds"] else f"missed by {missed} of {row['seeds']} seeds", "–", "–"]
    low, high = row["range"]
    return [
        format_number(round(row["steps"])),
        format_number(row["seconds"]),
        f"{row['against_best']:.2f} ({low:.2f}–{high:.2f})",
    ]


def draw_picture(stored: dict[str, Any], path: Path) -> None:
    """Plot the held-out loss against the time over each link: the smaller model, AdamW, the first seed, the longest
    runs."""
    from matplotlib import pyplot

    import plots

    lines = {
        "onebit": (plots.OURS, "-"),
        "topk1bit": ("#6a4c93", "-"),
        "onebit_4": (plots.OURS, ":"),
        "topk1bit_4": ("#6a4c93", ":"),
        "dense": (plots.OURS_DENSE, "-"),
        DDP: (plots.INK, "-"),
        "fp16": (plots.PEER, "-"),
        "powersgd4": (plots.TOPK, "-"),
    }
    kind = (MODELS[0], OPTIMIZERS[0])
    first = [run for run in stored["runs"] if (run["model"], run["optimizer"], run["seed"]) == (*kind, 0)]
    length = max((run["steps"] for run in first), default=0)
    runs = {run["contender"]: run for run in first if run["steps"] == length}
    times = {
        (row["contender"], row["rate"]): median(row["turns_ms"])
        for row in stored["times"]
        if (row["model"], row["optimizer"]) == kind
    }
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(4.4 * len(RATES), 4.0), layout="constrained", sharey=True)
    for axes, rate in zip(panels, RATES, strict=True):
        for name, (colour, style) in lines.items():
            if name not in runs or (name, rate) not in times or (DDP, rate) not in times:
                continue
            dense_steps = round(DENSE_SHARE * runs[name]["steps"]) if CONTENDERS[name].is_dense_first else 0
            points = [
                (compute_seconds_to_target(step, times[name, rate], dense_steps, times[DDP, rate]), loss)
                for step, loss in runs[name]["evaluations"]
            ]
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, label=CONTENDERS[name].label)
        axes.set(xlabel="seconds", title=LINKS[rate])
        axes.set_xlim(left=0)
        axes.grid(color=plots.FAINT)
    panels[0].set_ylabel("held-out loss, nats per character")
    panels[-1].legend(frameon=False, fontsize=8)
    plots.save(figure, path, stored)
