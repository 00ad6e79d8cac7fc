"""The plot of a run: the loss, and the parts of each step's time. It needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.errors import ArgumentError, TopKubeError
from topkube.files import replace_file
from topkube.installation import build_install_command
from topkube.telemetry.history import PARTS, History
from topkube.telemetry.summary import average_edge_losses, describe_mean

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
LOSS = "#2f6fb7"
COLOURS = dict(zip(PARTS, ("#8e7cc3", "#c3cfdb", "#e9a23b", "#4aa37c", "#cf4f4f"), strict=True))
_ABOVE: Any = {
    "frameon": False,
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 0.98),
    "labelcolor": MUTED,
    "handlelength": 1.1,
    "columnspacing": 1.4,
}
"""Legends are above their panel, so that they hide nothing."""
MOST_POINTS = 400
"""The most columns of the time panel. Longer runs are averaged over neighbours."""

ENDINGS = (".png", ".pdf", ".svg", ".svgz", ".eps", ".ps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
"""The formats that matplotlib writes."""

Values = npt.NDArray[np.float64]


class PlotError(TopKubeError, RuntimeError):
    """The plot could not be drawn. The run is not affected."""


def check_ending(path: Path) -> None:
    """Raise ArgumentError if the ending of `path` is no format of a plot: before the training, not after it."""
    if path.suffix.lower() not in ENDINGS:
        raise ArgumentError(
            f"--plot {path}: the ending names no format of a picture",
            next_step="pass a file that ends in .png, .pdf or .svg",
        )


def draw(history: History, path: Path, title: str) -> None:
    """Write the plot to `path` in the format of its ending. Raises PlotError."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot, ticker
    except ImportError:
        raise PlotError(
            "there is no plot: matplotlib is not installed",
            next_step=f"{build_install_command('train')}, or use --no-plot",
        ) from None
    steps = np.array(history.steps, np.float64)
    style: Any = {
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(style):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(9, 6.4), dpi=150, sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        layout: Any = figure.get_layout_engine()
        layout.set(h_pad=0.12, w_pad=0.12)
        figure.suptitle(title, x=0.015, ha="left", fontsize=12.5, fontweight="bold")
        _draw_losses(upper, steps, np.array(history.losses))
        _draw_times(lower, steps, history)
        for axes in (upper, lower):
            axes.grid(axis="y", color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        lower.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=10))
        lower.set_xlabel("step")
        if len(steps) > 1:
            lower.set_xlim(steps[0], steps[-1])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as part:
                figure.savefig(part, format=path.suffix[1:].lower())
        except (OSError, ValueError) as error:
            raise PlotError(f"the plot {path} cannot be written: {error}", next_step="pass another --plot") from None
        finally:
            pyplot.close(figure)


def _draw_losses(axes: Any, steps: Values, losses: Values) -> None:
    axes.set_ylabel("loss")
    has_loss = np.isfinite(losses)
    if not has_loss.any():
        axes.text(0.5, 0.5, "the script reported no loss", transform=axes.transAxes, ha="center", color=MUTED)
        return
    steps, losses = steps[has_loss], losses[has_loss]
    smooth = smooth_values(losses)
    axes.plot(steps, losses, color=LOSS, alpha=0.28, linewidth=1, label="each step")
    axes.plot(steps, smooth, color=LOSS, linewidth=2.2, label="smoothed")
    _, final, count = average_edge_losses(losses)  # the same number as in the summary
    assert final is not None
    axes.plot(steps[-1:], [final], "o", color=LOSS, markersize=6, clip_on=False, zorder=5)
    axes.annotate(
        f"{final:.4g} ({describe_mean(count)})",
        (steps[-1], final),
        (-8, 10),
        textcoords="offset points",
        ha="right",
        fontweight="bold",
        color=LOSS,
    )
    # A few spikes must not flatten the curve.
    low, high = losses.min(), max(float(np.quantile(losses, 0.995)), float(smooth.max()))
    margin = 0.08 * (high - low) or 0.1 * (abs(high) or 1)
    axes.set_ylim(low - margin, high + margin)
    axes.legend(**_ABOVE, ncols=2)


def _draw_times(axes: Any, steps: Values, history: History) -> None:
    axes.set_ylabel("time per step, ms")
    columns = {part: 1000 * np.array(history.seconds[part]) for part in PARTS}
    total = sum(columns.values())
    if not np.any(total):
        axes.text(0.5, 0.5, "the script reported no times", transform=axes.transAxes, ha="center", color=MUTED)
        return
    group = max(1, -(-len(steps) // MOST_POINTS))
    edges = np.append(steps[::group], steps[-1] + (1 if len(steps) > 1 else 0.5))
    bottom = np.zeros(len(edges) - 1)
    mean = float(np.mean(total))
    for part, column in columns.items():
        heights = average_groups(column, group)
        share = float(np.mean(column)) / mean
        axes.stairs(
            bottom + heights, edges, baseline=bottom, fill=True, color=COLOURS[part], label=f"{part} {share:.0%}"
        )
        bottom = bottom + heights
    # The first steps can be far slower because caches are cold; they may be cut off.
    axes.set_ylim(0, 1.08 * max(float(np.quantile(bottom, 0.98)), float(np.median(bottom))))
    axes.legend(**_ABOVE, ncols=len(PARTS))


def smooth_values(values: Values) -> Values:
    """Return the exponential mean over about 3% of the steps, without the bias of its start. (n,) -> (n,)."""
    keep = 1 - 1 / max(2.0, 0.03 * len(values))
    result, mean, weight = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result[index] = mean / weight
    return result


def average_groups(values: Values, group: int) -> Values:
    """Return the means of groups of `group` neighbours; the last group may be smaller. (n,) -> (ceil(n / group),)."""
    starts = np.arange(0, len(values), group)
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts) / counts
