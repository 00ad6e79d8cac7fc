"""The picture of a training step per method in docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_report import LINKS, NAMES

TRACKS = ("compute", "communication", "link")
HEIGHTS = {"compute": 0.34, "communication": 0.2, "link": 0.2}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "wait": "wait for exchanges",
    "optimizer": "optimizer",
    "work": "communication thread: reduce, select, add",
    "exchange": "exchange between nodes",
}


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the link, and the facts of the run."""
    nodes, ranks = stored["part"].split("x")
    facts = stored["facts"]
    about = f"{facts['date']}, processors: {facts['processors']}, load: {facts['load']:g}"
    return {"TIMELINE": f"{nodes} nodes × {ranks} rank, {LINKS[stored['rate']]} ({about})"}


def draw_picture(stored: dict[str, Any], path: Path) -> None:
    """Plot one step of each method on a common time axis, the longest on top."""
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    import plots

    colours = {
        "forward": plots.OURS_DENSE,
        "backward": plots.OURS,
        "wait": plots.FAINT,
        "optimizer": plots.INK,
        "work": "#6a4c93",
        "exchange": plots.TOPK,
    }
    steps = sorted(stored["steps"], key=lambda step: step["ms"])
    figure, axes = pyplot.subplots(figsize=(10.5, 0.95 * len(steps) + 1.3), layout="constrained")
    for position, step in enumerate(steps):
        top = position + 0.42
        for track in TRACKS:
            for name, kind, start, end in step["events"]:
                # Work and waits lie above the block that contains them.
                if name == track and (track != "communication" or kind == "work"):
                    axes.add_patch(
                        Rectangle(
                            (start, top - HEIGHTS[track]),
                            max(end - start, 0.3),
                            HEIGHTS[track] - 0.03,
                            facecolor=colours[kind],
                            edgecolor="white" if kind == "exchange" else "none",
                            linewidth=0.4,
                            alpha=0.75 if kind == "exchange" else 1.0,
                            zorder=3 if kind in ("wait", "optimizer") else 2,
                        )
                    )
            top -= HEIGHTS[track]
        axes.text(step["ms"] + 4, position + 0.25, plots.format_milliseconds(step["ms"]), va="center", fontsize=9)
    names = [NAMES[step["contender"]] for step in steps]
    axes.set_yticks(range(len(steps)), [name.strip("*") for name in names])
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name.startswith("*") else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, max(step["ms"] for step in steps) * 1.1), ylim=(-0.6, len(steps) - 0.4), xlabel="ms")
    axes.grid(axis="x", color=plots.FAINT, zorder=0)
    nodes, ranks = stored["part"].split("x")
    axes.set_title(f"One training step of rank 0: {nodes} nodes × {ranks} rank, {LINKS[stored['rate']]}")
    handles = [Rectangle((0, 0), 1, 1, facecolor=colours[kind]) for kind in LABELS]
    figure.legend(handles, list(LABELS.values()), frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    plots.save(figure, path, stored)
