"""The picture of a plan: step time and scaling efficiency from 2 to 4,096 nodes. It needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from topkube.files import replace_file
from topkube.installation import build_install_command
from topkube.planning.step import Prediction
from topkube.telemetry.plot import GRID, INK, MUTED, PlotError

_LINES = ("-", "--", ":")
_MARKERS = ("o", "s", "^")
"""The style of the lines with a colour: the first line with it, the second, the third."""
_TITLE_CHARACTERS = 120
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
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.5, 5.2), dpi=150, layout="constrained")
        wrapped_title = textwrap.fill(title, _TITLE_CHARACTERS)
        figure.suptitle(wrapped_title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, algorithm in enumerate(prediction.algorithm for prediction in rows[0][1]):
            turn, colour = divmod(number, len(_COLOURS))
            line: Any = {"color": _COLOURS[colour], "ms": 4, "label": algorithm.name}
            line |= {"linestyle": _LINES[turn % len(_LINES)], "marker": _MARKERS[turn % len(_MARKERS)]}
            predictions = [row[number] for _, row in rows]
            left.plot(nodes, [1e3 * p.step for p in predictions], **line)
            right.plot(nodes, [100 * p.efficiency for p in predictions], **line)
        left.set_yscale("log")
        left.set_ylabel("step, ms")
        right.set_ylabel("scaling efficiency, %")
        right.set_ylim(0, 105)
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False, handlelength=3.5)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(nodes, [f"{count:,}" for count in nodes], rotation=45)
            axes.set_xlabel("nodes")
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as part:
                figure.savefig(part, format=path.suffix[1:].lower())
        except (OSError, ValueError) as error:
            raise PlotError(
                f"the picture could not be written to {path}: {error}",
                next_step="pass another --plot",
            ) from error
        finally:
            pyplot.close(figure)
