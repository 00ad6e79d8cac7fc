"""The picture of a plan: step time and scaling efficiency from 2 to 4,096 nodes. It needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from topkube.installation import build_install_command
from topkube.planning.step import Prediction
from topkube.telemetry.plot import GRID, INK, MUTED, PlotError

_COLOURS = ("#2f6fb7", "#cf4f4f", "#4aa37c", "#e9a23b", "#7d5ba6", "#6b7785", "#2a9d9d", "#b0567b")


def draw_sweep(rows: list[tuple[int, list[Prediction]]], path: Path, title: str) -> None:
    """Write the picture to `path` in the format of its ending. Raises PlotError."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlotError(
            "there is no picture: matplotlib is not installed", next_step=build_install_command("train")
        ) from None
    style: Any = {"font.family": "sans-serif", "text.color": INK, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED}
    style |= {"xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False}
    nodes = [count for count, _ in rows]
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), dpi=150, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, algorithm in enumerate(prediction.algorithm for prediction in rows[0][1]):
            colour = _COLOURS[number % len(_COLOURS)]
            predictions = [row[number] for _, row in rows]
            left.plot(nodes, [1e3 * p.step for p in predictions], color=colour, marker="o", ms=3, label=algorithm.name)
            right.plot(nodes, [100 * p.efficiency for p in predictions], color=colour, marker="o", ms=3)
        left.set_yscale("log")
        left.set_ylabel("step, ms")
        right.set_ylabel("scaling efficiency, %")
        right.set_ylim(0, 105)
        left.legend(frameon=False, fontsize=8.5)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(nodes, [f"{count:,}" for count in nodes], rotation=45)
            axes.set_xlabel("nodes")
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise PlotError(
                f"the picture could not be written to {path}: {error}",
                cause="the folder is not writable, or matplotlib does not know the format of this ending",
                next_step="pass a file that ends in .png, .pdf or .svg",
            ) from error
        finally:
            pyplot.close(figure)
