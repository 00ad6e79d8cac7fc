"""The section of docs/benchmarks.md about exchange rules on simulated nodes, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import format_number, format_table

Row = dict[str, Any]
OPTIMIZERS = ("adamw", "sgd")
STEPS = 2000
"""The length of run at which models are compared."""


def _format_label(row: Row) -> str:
    label = row["rule"] if row["period"] == 1 else f"{row['rule']}, every {row['period']} steps"
    return label if row["batches"] == 1 else f"{label}, {row['batches']} × the samples"


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the table of all rules and models at the learning rates of the tasks, and the table of the guard's numbers
    at all rates."""
    rows = sorted(
        stored["compared"],
        key=lambda row: (row["model"], row["optimizer"], row["nodes"], row["steps"], _format_label(row)),
    )
    return {
        "SIMULATED": _format_rules([row for row in rows if row["rate"] == 1]),
        "POOLED": _format_pools([row for row in rows if row["rate"] == 1 and row["steps"] == STEPS]),
        "GUARD": _format_guard([row for row in rows if row["unsent"] is not None]),
    }


def _format_rules(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        interval = row["interval_percent"]
        cells.append(
            [
                f"{row['model']}, {row['optimizer']}",
                format_number(row["nodes"]),
                format_number(row["steps"]),
                _format_label(row),
                f"{row['times_fewer_bytes']:.1f}×",
                format_number(row["seeds"]),
                f"{row['difference_percent']:+.2f}%",
                f"{interval[0]:+.1f} to {interval[1]:+.1f}%" if interval else "–",
            ]
        )
    headings = ["model, optimizer", "nodes", "steps", "rule", "fewer bytes", "seeds", "difference", "95% interval"]
    return format_table(headings, cells)


def _format_pools(rows: list[Row]) -> str:
    """Return the table of the rules that were measured with several seeds and with both optimizers, all pairs of a rule
    together."""
    from simulated_nodes import compute_interval

    pools: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        pools.setdefault((row["model"], row["nodes"], _format_label(row)), []).append(row)
    cells = []
    for (model, nodes, label), pool in pools.items():
        pairs = [pair for row in pool for pair in row["each_seed"]]
        mean, interval = compute_interval(pairs)
        if len(pool) == len(OPTIMIZERS) and len(pairs) > len(OPTIMIZERS) and interval:
            fewest = min(row["times_fewer_bytes"] for row in pool)
            shown = f"{interval[0]:+.1f} to {interval[1]:+.1f}%"
            cells.append(
                [
                    model,
                    format_number(nodes),
                    label,
                    f"{fewest:.1f}×",
                    format_number(len(pairs)),
                    f"{mean:+.2f}%",
                    shown,
                ]
            )
    return format_table(["model", "nodes", "rule", "fewer bytes", "pairs", "difference", "95% interval"], cells)


def _format_guard(rows: list[Row]) -> str:
    cells = [
        [
            f"{row['model']}, {row['optimizer']}, {row['steps']} steps",
            _format_label(row),
            format_number(row["rate"]),
            *(f"{row[key]:.4f}" for key in ("dense_loss", "loss")),
            *(f"{value:.2f}" for value in row["unsent"]),
            *(f"{value:.3f}" for value in row["spread"]),
        ]
        for row in sorted(rows, key=lambda row: row["spread"][1])
    ]
    headings = ["model, optimizer", "rule", "learning rate ×", "dense loss", "loss", "unsent, median", "largest"]
    return format_table([*headings, "spread, median", "largest"], cells)


def draw_picture(rows: list[Row], path: Path) -> None:
    """Plot the difference to dense against the length of the run, and for each model against the bytes saved."""
    from matplotlib import pyplot

    import plots

    shown = [row for row in rows if row["rate"] == 1 and row["batches"] == 1]
    colours = {
        "hitopk": plots.TOPK,
        "int8": plots.INK,
        "sign-weights": plots.OURS,
        "sign-weights, every 4 steps": plots.OURS_DENSE,
        "sign-weights-two-stage": "#b5473c",
        "topk1bit": "#6a4c93",
        "topk1bit, every 4 steps": "#b9a3d0",
    }
    figure, (lengths, models) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, colour in colours.items():
        line = sorted(
            (
                row
                for row in shown
                if _format_label(row) == label
                and (row["model"], row["optimizer"], row["nodes"]) == ("char_gpt", "adamw", 2)
            ),
            key=lambda row: row["steps"],
        )
        if not any(_format_label(row) == label for row in shown):
            continue
        steps, means = [row["steps"] for row in line], [row["difference_percent"] for row in line]
        lengths.plot(steps, means, color=colour, marker="o", label=label)
        for row in line:
            if row["interval_percent"] and row["seeds"] > 2:
                lengths.vlines(row["steps"], *row["interval_percent"], color=colour, linewidth=1)
    lengths.set_xscale("log")
    lengths.set_xticks(sorted({row["steps"] for row in shown}), minor=False)
    lengths.xaxis.set_major_formatter("{x:.0f}")
    lengths.xaxis.minorticks_off()
    lengths.set(xlabel="steps of the run", ylabel="held-out loss against dense, %", title="char_gpt, AdamW, two nodes")
    markers = dict(zip(sorted({row["model"] for row in shown}), "osD^v", strict=False))
    for row in shown:
        if row["steps"] == STEPS and _format_label(row) in colours:
            models.plot(
                row["times_fewer_bytes"],
                row["difference_percent"],
                marker=markers[row["model"]],
                color=colours[_format_label(row)],
                linestyle="",
            )
    for model, marker in markers.items():
        models.plot([], [], marker=marker, color=plots.INK, linestyle="", label=model)
    models.legend(frameon=False, fontsize=9)
    models.set_xscale("log")
    models.set_xticks([5, 10, 20, 50, 100], ["5×", "10×", "20×", "50×", "100×"])
    models.xaxis.minorticks_off()
    models.set(xlabel="fewer bytes than dense float32", title=f"{STEPS:,} steps, all optimizers, 2 to 8 nodes")
    for axes in (lengths, models):
        axes.axhline(0, color=plots.INK, linewidth=1)
        axes.grid(color=plots.FAINT)
    lengths.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.12, 0.375))
    plots.save(figure, path, rows)
