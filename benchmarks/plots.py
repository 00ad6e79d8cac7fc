"""The plots of docs/benchmarks.md. Each file contains a digest of its figures, so that a stale plot can be detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

Row = dict[str, Any]
OURS, OURS_DENSE, PEER, TOPK, INK, FAINT = "#0f8b8d", "#7cc6c3", "#b4b9c1", "#e0a458", "#22303c", "#e4e7eb"
KINDS = {"ours sparse": OURS, "ours dense": OURS_DENSE, "peer dense": PEER, "peer sparse": TOPK}
NAMES = {
    "ours sparse": "TopKube, sparse",
    "ours dense": "TopKube, dense",
    "peer dense": "peers, dense",
    "peer sparse": "torch.topk + all-gather",
}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
pyplot.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def read_digest(path: Path) -> str:
    """Return the digest in a plot that `save` wrote."""
    with Image.open(path) as picture:
        return str(picture.info.get("Figures", ""))


def save(figure: Figure, path: Path, data: object) -> None:
    figure.savefig(path, dpi=140, facecolor="white", metadata={"Figures": digest(data), "Software": ""})
    pyplot.close(figure)


def format_milliseconds(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def draw_bars(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """Plot the time of each contender, the slowest on top; the dark tick is its bound."""
    rows = sorted(rows, key=lambda row: row["ms"])
    places = range(len(rows))
    times = [row["ms"] for row in rows]
    axes.barh(places, times, color=[KINDS[row["kind"]] for row in rows], height=0.72, zorder=2)
    for place, row in zip(places, rows, strict=True):
        axes.plot([row["bound_ms"]] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=2.2, zorder=3)
        axes.text(row["ms"] * 1.06, place, format_milliseconds(row["ms"]), va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(row["bound_ms"] for row in rows) * 0.6, max(times) * 2.1)
    axes.set_yticks(list(places), [str(row["contender"]) for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row["kind"].startswith("ours") else "normal")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: format_milliseconds(value).replace(".0 ", " ").replace(".00 ", " "))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(axis="x", color=FAINT, zorder=0)
    axes.set_title(title)


def draw_legend(figure: Figure, kinds: Sequence[str], **place: Any) -> None:
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=KINDS[kind]) for kind in kinds]
    handles.append(Line2D([], [], color=INK, linewidth=2.2, marker="|", linestyle="none", markersize=11, mew=2.2))
    figure.legend(handles, [*(NAMES[kind] for kind in kinds), "bound of the same exchange"], frameon=False, **place)


def draw_headline(rows: list[Row], path: Path) -> None:
    """Plot the whole array with 2 nodes x 2 ranks at 1 Gbit/s, for the README."""
    left_out = ("naive", "torus", "(MPICH)")
    shown = [row for row in rows if not any(word in row["contender"] for word in left_out)]
    figure, axes = pyplot.subplots(figsize=(9.6, 5.0), layout="constrained")
    elements = f"{shown[0]['elements']:,}"
    draw_bars(axes, shown, f"All-reduce of {elements} float32 over 1 Gbit/s, 2 nodes × 2 ranks (log scale)")
    draw_legend(figure, list(KINDS), loc="outside lower center", ncols=5, fontsize=9)
    save(figure, path, rows)


def draw_links(rows: list[Row], path: Path) -> None:
    """Plot every layout and link speed."""
    parts = [part for part in ("2x2", "4x1") if any(row["part"] == part for row in rows)]
    rates = [rate for rate in LINKS if any(row["rate"] == rate for row in rows)]
    figure, grid = pyplot.subplots(
        len(parts), len(rates), figsize=(6.0 * len(rates), 4.4 * len(parts)), layout="constrained", squeeze=False
    )
    for line, part in zip(grid, parts, strict=True):
        for axes, rate in zip(line, rates, strict=True):
            nodes, ranks = part.split("x")
            selected = [row for row in rows if (row["part"], row["rate"]) == (part, rate)]
            if selected:
                draw_bars(axes, selected, f"{LINKS[rate]}, {nodes} nodes × {ranks} rank{'s' if ranks != '1' else ''}")
    draw_legend(figure, list(KINDS), loc="outside lower center", ncols=5)
    save(figure, path, rows)


def draw_sizes(rows: list[Row], path: Path) -> None:
    """Plot the time against the size of the array at 1 Gbit/s."""
    chosen = {
        "TopKube hitopk 1%": (OURS, "-", "o"),
        "TopKube hitopk 0.1%": (OURS, ":", "o"),
        "TopKube hierarchical": (OURS_DENSE, "-", "s"),
        "best dense peer": (PEER, "-", "D"),
        "torch.topk + all-gather (gloo) 1%": (TOPK, "-", "^"),
    }
    parts = [part for part in ("2x2", "4x1") if any(row["part"] == part for row in rows)]
    figure, line = pyplot.subplots(1, len(parts), figsize=(5.6 * len(parts), 4.2), layout="constrained", squeeze=False)
    for axes, part in zip(line[0], parts, strict=True):
        selected = [row for row in rows if row["part"] == part]
        lengths = sorted({row["elements"] for row in selected})
        for label, (colour, style, marker) in chosen.items():
            points = []
            for length in lengths:
                times = [
                    row["ms"]
                    for row in selected
                    if row["elements"] == length
                    and (row["contender"] == label or (label == "best dense peer" and row["kind"] == "peer dense"))
                ]
                if times:
                    points.append((length * 4 / 2**20, min(times)))
            shown = label.replace(" (gloo)", "")
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=style, marker=marker, label=shown, linewidth=2
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("array, MiB (float32)")
        axes.set_xticks([length * 4 / 2**20 for length in lengths], [f"{length * 4 / 2**20:.2g}" for length in lengths])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(
            lambda value, _: format_milliseconds(value).replace(".0 ", " ").replace(".00 ", " ")
        )
        axes.grid(color=FAINT)
        nodes, ranks = part.split("x")
        axes.set_title(f"1 Gbit/s, {nodes} nodes × {ranks} rank{'s' if ranks != '1' else ''}")
    line[0][0].legend(frameon=False, fontsize=9)
    save(figure, path, rows)


def draw_convergence(runs: list[Row], path: Path) -> None:
    """Plot the training loss of every run."""
    colours = {"dense": INK, "hitopk": OURS, "hitopk, corrected": "tab:green", "hitopk without feedback": TOPK}
    cells = sorted({(run["model"], run["optimizer"]) for run in runs})
    columns = sorted({optimizer for _, optimizer in cells}, reverse=True)
    models = sorted({model for model, _ in cells})
    figure, grid = pyplot.subplots(
        len(models), len(columns), figsize=(5.4 * len(columns), 3.6 * len(models)), layout="constrained", squeeze=False
    )
    for line, model in zip(grid, models, strict=True):
        for axes, optimizer in zip(line, columns, strict=True):
            for condition, colour in colours.items():
                selected = [
                    r for r in runs if (r["model"], r["optimizer"], r["condition"]) == (model, optimizer, condition)
                ]
                for index, run in enumerate(selected):
                    steps = [run["steps"] * (i + 1) / len(run["curve"]) for i in range(len(run["curve"]))]
                    axes.plot(
                        steps, run["curve"], color=colour, alpha=0.55, linewidth=1.1, label="" if index else condition
                    )
            axes.set_title(f"{model}, {optimizer}")
            axes.set_xlabel("step")
            axes.set_ylabel("training loss, nats")
            axes.grid(color=FAINT)
    grid[0][0].legend(frameon=False, fontsize=9)
    save(figure, path, runs)
