"""The dashboards drawn from a real Prometheus, for the docs:
`python -m monitoring.pictures --prometheus URL DIRECTORY`."""

from __future__ import annotations

import argparse
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter

from monitoring.dashboards import DASHBOARDS
from monitoring.grafana import WIDTH, Dashboard, Panel
from monitoring.prometheus import Prometheus, Series, chosen, named

_COLOURS = ("#2f6fb7", "#e9a23b", "#4aa37c", "#cf4f4f", "#7d5fb2", "#5b6b7b", "#c77fb5", "#8a7a4d")
_LINE_INCHES, _COLUMN_INCHES = 0.38, 0.62


def draw(
    prometheus: Prometheus, dashboard: Dashboard, path: Path, seconds: float, interval: str, **choices: str
) -> None:
    """Draws the last `seconds` of a dashboard. `interval` stands for $__rate_interval."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines, places = _places(dashboard)
    figure = pyplot.figure(figsize=(WIDTH * _COLUMN_INCHES, lines * _LINE_INCHES + 0.9), facecolor="white")
    figure.suptitle(f"{dashboard.title}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(
        lines, WIDTH, left=0.035, right=0.99, top=1 - 0.5 / (lines * _LINE_INCHES + 0.9), bottom=0.03
    )
    end = time.time()
    for title, y in [(row, y) for row, y, panel in places if panel is None for row in [row]]:
        axes = figure.add_subplot(grid[y : y + 1, :])
        axes.axis("off")
        axes.text(0, 0.2, str(title), fontsize=10, color="#5b6b7b", fontweight="bold")
    for x, y, panel in places:
        if panel is None:
            continue
        axes = figure.add_subplot(grid[y : y + panel.height, int(x) : int(x) + panel.width])
        _panel(axes, prometheus, panel, (end - seconds, end), interval, choices)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _places(dashboard: Dashboard) -> tuple[int, list[tuple[Any, int, Panel | None]]]:
    """Lines in all, and (column, line, panel); a row's heading as (title, line, None)."""
    places: list[tuple[Any, int, Panel | None]] = []
    y = 0
    for row in dashboard.rows:
        places.append((row.title, y, None))
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            places.append((x, y, panel))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return y, places


def _panel(
    axes: Any, prometheus: Prometheus, panel: Panel, span: tuple[float, float], interval: str, choices: dict[str, str]
) -> None:
    """One panel into its axes, with a margin for its title and ticks."""
    box = axes.get_position()
    axes.set_position([box.x0 + 0.012, box.y0 + 0.25 * box.height, box.width - 0.03, 0.55 * box.height])
    axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
    found: list[tuple[str, Series]] = []
    for query in panel.queries:
        expression = chosen(query.expression, interval, **choices)
        if panel.kind == "timeseries":
            answer = prometheus.query_range(expression, *span, step=(span[1] - span[0]) / 200)
        else:
            answer = prometheus.query(expression)
        found += [(named(query.legend, one.labels), one) for one in answer]
    draw_kind = {"timeseries": _lines, "stat": _numbers, "bargauge": _bars, "table": _table}[panel.kind]
    draw_kind(axes, panel, sorted(found, key=lambda one: one[0]))


def _lines(axes: Any, panel: Panel, found: Sequence[tuple[str, Series]]) -> None:
    if panel.stacked and found:
        times = sorted({at for _, one in found for at, _ in one.points})
        stack = [[dict(one.points).get(at, 0.0) for at in times] for _, one in found]
        axes.stackplot(times, stack, labels=[name for name, _ in found], colors=_COLOURS, alpha=0.8)
    else:
        for index, (name, one) in enumerate(found):
            at, values = zip(*one.points, strict=True)
            axes.plot(at, values, label=name, color=_COLOURS[index % len(_COLOURS)], linewidth=1.2)
    if panel.logarithmic:
        axes.set_yscale("log")
    elif panel.least is not None:
        axes.set_ylim(bottom=panel.least)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M:%S", time.gmtime(at))))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if found:
        axes.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _numbers(axes: Any, panel: Panel, found: Sequence[tuple[str, Series]]) -> None:
    axes.axis("off")
    for index, (name, one) in enumerate(found):
        x = (index + 0.5) / len(found)
        axes.text(x, 0.45, shown(one.points[-1][1], panel.unit), ha="center", fontsize=15, color=_COLOURS[0])
        if len(found) > 1:
            axes.text(x, -0.15, name, ha="center", fontsize=8, color="#5b6b7b")


def _bars(axes: Any, panel: Panel, found: Sequence[tuple[str, Series]]) -> None:
    axes.barh([name for name, _ in found], [one.points[-1][1] for _, one in found], color=_COLOURS[0], height=0.5)
    axes.set_xlim(0, panel.most)
    axes.set_ylim(-1, max(3, len(found)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    axes.tick_params(labelsize=8)


def _table(axes: Any, panel: Panel, found: Sequence[tuple[str, Series]]) -> None:
    axes.axis("off")
    for index, (_, one) in enumerate(found):
        text = "   ".join(f"{name}: {value}" for name, value in sorted(one.labels.items()) if name != "__name__")
        axes.text(0, 0.8 - 0.3 * index, "\n".join(textwrap.wrap(text, 100)), fontsize=8, va="top")


def _scaled(value: float, suffixes: Sequence[str], base: float = 1000.0) -> str:
    index = 0
    while abs(value) >= base and index < len(suffixes) - 1:
        value, index = value / base, index + 1
    return f"{value:.3g} {suffixes[index]}".strip()


def _duration(seconds: float) -> str:
    for least, size, suffix in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s")):
        if abs(seconds) >= least:
            return f"{seconds / size:.3g} {suffix}"
    return f"{1000 * seconds:.3g} ms" if seconds else "0 s"


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": _duration,
    "Bps": lambda value: _scaled(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")),
    "bytes": lambda value: _scaled(value, ("B", "kB", "MB", "GB", "TB")),
    "percentunit": lambda value: f"{100 * value:.3g}%",
    "ops": lambda value: f"{_scaled(value, ('', 'k', 'M'))}/s",
}


def shown(value: float, unit: str) -> str:
    """A value as Grafana writes it, about."""
    if not math.isfinite(value):
        return str(value)
    known = _FORMATS.get(unit)
    return known(value) if known else _scaled(value, ("", "k", "M", "G"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m monitoring.pictures", description="Draw all dashboards.")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--seconds", type=float, default=3600, help="how far back (%(default)s)")
    parser.add_argument("--interval", default="2m", help="what stands for $__rate_interval (%(default)s)")
    parser.add_argument("--training-job", default=".*", help="which job (%(default)s)")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    for dashboard in DASHBOARDS:
        path = args.directory / f"{dashboard.uid}.png"
        draw(Prometheus(args.prometheus), dashboard, path, args.seconds, args.interval, training_job=args.training_job)
        print(path)


if __name__ == "__main__":
    main()
