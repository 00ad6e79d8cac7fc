"""The dashboards drawn from a real Prometheus, for the docs:
`python -m monitoring.pictures --prometheus URL DIRECTORY`."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from monitoring.dashboards import DASHBOARDS
from monitoring.grafana import WIDTH, Dashboard, Panel
from monitoring.prometheus import Prometheus, Series, fill_variables, format_legend

_COLOURS = ("#2f6fb7", "#e9a23b", "#4aa37c", "#cf4f4f", "#7d5fb2", "#5b6b7b", "#c77fb5", "#8a7a4d")
_COLOUR_OF_NAME = {
    "Pending": "#b9c2cc",
    "Starting": "#8ab6e8",
    "Running": "#4aa37c",
    "Restarting": "#e9a23b",
    "Suspended": "#7d5fb2",
    "Succeeded": "#2f6fb7",
    "Failed": "#cf4f4f",
    "error": "#cf4f4f",
}
"""Colours of names with a fixed meaning. Every other name gets the next of _COLOURS."""
_GREY, _LINE = "#5b6b7b", "#d9dee4"
_COLUMN, _ROW, _HEADING, _TITLE, _MARGIN = 0.56, 0.27, 0.34, 0.5, 0.06
"""Sizes in inches: a column and a line of the grid, the heading of a row and of the page, the margin on each
side of a panel."""


@dataclass(frozen=True)
class _Box:
    """A rectangle in inches from the top left of the picture."""

    left: float
    top: float
    width: float
    height: float

    def shrink(self, left: float, top: float, right: float, bottom: float) -> _Box:
        return _Box(self.left + left, self.top + top, self.width - left - right, self.height - top - bottom)

    def convert_to_figure(self, figure: Any) -> tuple[float, float, float, float]:
        """Return the box in matplotlib's coordinates: shares of the figure, from its bottom left."""
        width, height = figure.get_size_inches()
        return self.left / width, 1 - (self.top + self.height) / height, self.width / width, self.height / height


def draw_dashboard(
    prometheus: Prometheus, dashboard: Dashboard, path: Path, seconds: float, interval: str, **choices: str
) -> None:
    """Draw the last `seconds` of a dashboard. `interval` replaces $__rate_interval."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    headings, panels, height = _lay_out(dashboard)
    figure = pyplot.figure(figsize=(WIDTH * _COLUMN, height), facecolor="white")
    figure.text(0.006, 1 - 0.3 / height, dashboard.title, fontsize=13, fontweight="bold")
    for title, top in headings:
        figure.text(0.006, 1 - (top + 0.24) / height, title, fontsize=10, color=_GREY, fontweight="bold")
    end = time.time()
    for panel, box in panels:
        _draw_frame(figure, panel, box)
        named_series = _query_panel(prometheus, panel, (end - seconds, end), interval, choices)
        _KINDS[panel.kind](figure, panel, box, named_series, (end - seconds, end))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _lay_out(dashboard: Dashboard) -> tuple[list[tuple[str, float]], list[tuple[Panel, _Box]], float]:
    """Return the headings with their distances from the top, the panels with their boxes, and the total height, in
    inches."""
    headings, panels, top = [], [], _TITLE
    for row in dashboard.rows:
        headings.append((row.title, top))
        top, x, tallest = top + _HEADING, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, top, tallest = 0, top + tallest * _ROW, 0
            box = _Box(x * _COLUMN, top, panel.width * _COLUMN, panel.height * _ROW)
            panels.append((panel, box.shrink(_MARGIN, _MARGIN, _MARGIN, _MARGIN)))
            x, tallest = x + panel.width, max(tallest, panel.height)
        top += tallest * _ROW
    return headings, panels, top + _MARGIN


def _draw_frame(figure: Any, panel: Panel, box: _Box) -> None:
    """Draw the panel's frame and title."""
    from matplotlib.patches import Rectangle

    left, bottom, width, height = box.convert_to_figure(figure)
    frame = Rectangle((left, bottom), width, height, fill=False, edgecolor=_LINE, linewidth=0.8)
    figure.add_artist(frame)
    place = box.shrink(0.1, 0.2, 0, 0)
    figure.text(
        place.convert_to_figure(figure)[0],
        1 - place.top / figure.get_size_inches()[1],
        panel.title,
        fontsize=8.5,
        va="center",
    )


def _query_panel(
    prometheus: Prometheus, panel: Panel, span: tuple[float, float], interval: str, choices: dict[str, str]
) -> list[tuple[str, Series]]:
    named_series: list[tuple[str, Series]] = []
    for query in panel.queries:
        expression = fill_variables(query.expression, interval, **choices)
        if panel.kind == "timeseries":
            answer = prometheus.query_range(expression, *span, step=max(1.0, (span[1] - span[0]) / 200))
        else:
            answer = prometheus.query(expression)
        named_series += [(format_legend(query.legend, series.labels), series) for series in answer]
    order = list(_COLOUR_OF_NAME)
    return sorted(named_series, key=lambda series: (order.index(series[0]) if series[0] in order else -1, series[0]))


def _choose_colours(names: Sequence[str]) -> dict[str, str]:
    plain = [name for name in dict.fromkeys(names) if name not in _COLOUR_OF_NAME]
    return _COLOUR_OF_NAME | {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(plain)}


def _draw_lines(
    figure: Any, panel: Panel, box: _Box, named_series: list[tuple[str, Series]], span: tuple[float, float]
) -> None:
    axes = figure.add_axes(box.shrink(0.62, 0.36, 0.14, 0.5).convert_to_figure(figure))
    if panel.stacked:  # series that are always zero are left out of the legend
        named_series = [(name, series) for name, series in named_series if any(value > 0 for _, value in series.points)]
    colours = _choose_colours([name for name, _ in named_series])
    if panel.stacked and named_series:
        times = sorted({moment for _, series in named_series for moment, _ in series.points})
        finite = [
            {moment: value for moment, value in series.points if math.isfinite(value)} for _, series in named_series
        ]
        stack = [[values.get(moment, 0.0) for moment in times] for values in finite]
        names = [name for name, _ in named_series]
        axes.stackplot(times, stack, labels=names, colors=[colours[name] for name in names], alpha=0.85)
    else:
        for name, series in named_series:
            axes.plot(*_insert_gaps(series), label=name, color=colours[name], linewidth=1.3)
    axes.set_xlim(*span)
    if panel.logarithmic:
        axes.set_yscale("log")
    elif panel.least is not None:
        axes.set_ylim(bottom=panel.least, top=panel.most * 1.04 if panel.most else None)
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator() if panel.logarithmic else MaxNLocator(5))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, panel.unit)))
    tick_seconds = max(1, round((span[1] - span[0]) / 300)) * 60  # whole minutes
    axes.xaxis.set_major_locator(FixedLocator([span[1] - tick_seconds * step for step in range(6)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda moment, _: _format_ago(span[1] - moment)))
    axes.tick_params(labelsize=7, length=2, color=_LINE, labelcolor=_GREY)
    axes.grid(alpha=0.25)
    for side in axes.spines.values():
        side.set_color(_LINE)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)
    if named_series:
        longest = max(len(name) for name, _ in named_series)
        corner = _Box(box.left + 0.05, box.top, 0, box.height - 0.29).convert_to_figure(figure)
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=corner[:2],
            fontsize=7,
            ncol=max(1, int(box.width / (0.35 + 0.062 * longest))),
            frameon=False,
            handlelength=1,
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0,
            borderpad=0.1,
            labelspacing=0.2,
            labelcolor=_GREY,
        )


def _insert_gaps(series: Series) -> tuple[list[float], list[float]]:
    """Return times and values, with a gap after more than three steps of the plot without a value."""
    interval = min((after[0] - before[0] for before, after in itertools.pairwise(series.points)), default=0.0)
    times, values, last = [], [], math.inf
    for moment, value in series.points:
        if moment - last > 3 * interval:
            times.append(moment - interval)
            values.append(math.nan)
        times.append(moment)
        values.append(value)
        last = moment
    return times, values


def _draw_numbers(
    figure: Any, panel: Panel, box: _Box, named_series: list[tuple[str, Series]], span: tuple[float, float]
) -> None:
    axes = figure.add_axes(box.shrink(0.1, 0.3, 0.1, 0.08).convert_to_figure(figure))
    axes.axis("off")
    colours = _choose_colours(["" if len(named_series) == 1 else name for name, _ in named_series])
    for index, (name, series) in enumerate(named_series):
        x, several = (index + 0.5) / len(named_series), len(named_series) > 1
        text, colour = format_value(series.points[-1][1], panel.unit), colours["" if not several else name]
        axes.text(x, 0.62 if several else 0.5, text, ha="center", va="center", fontsize=15, color=colour)
        if several:
            axes.text(x, 0.14, name, ha="center", va="center", fontsize=8, color=_GREY)


def _draw_bars(
    figure: Any, panel: Panel, box: _Box, named_series: list[tuple[str, Series]], span: tuple[float, float]
) -> None:
    axes = figure.add_axes(box.shrink(0.15, 0.4, 0.15, 0.15).convert_to_figure(figure))
    axes.axis("off")
    most = panel.most or max((series.points[-1][1] for _, series in named_series), default=1.0) or 1.0
    axes.set_xlim(0, most)
    axes.set_ylim(-max(4, len(named_series)), 0)
    for index, (name, series) in enumerate(named_series):
        y, value = -index - 0.7, series.points[-1][1]
        axes.barh([y], [most], color="#eef1f4", height=0.34)
        axes.barh([y], [value], color=_COLOURS[0], height=0.34)
        axes.text(0, y + 0.34, name, fontsize=7.5, color=_GREY, va="center")
        axes.text(most, y + 0.34, format_value(value, panel.unit), fontsize=7.5, ha="right", va="center")


def _draw_table(
    figure: Any, panel: Panel, box: _Box, named_series: list[tuple[str, Series]], span: tuple[float, float]
) -> None:
    axes = figure.add_axes(box.shrink(0.1, 0.34, 0.1, 0.08).convert_to_figure(figure))
    axes.axis("off")
    names = sorted({name for _, series in named_series for name in series.labels if name != "__name__"})
    if not names:
        axes.text(0.5, 0.5, "nothing", ha="center", va="center", fontsize=8, color=_GREY)
        return
    rows = [[series.labels.get(name, "") for name in names] for _, series in named_series]
    widths = [max(len(text) for text in [name, *(row[index] for row in rows)]) for index, name in enumerate(names)]
    lines = max(2.0, axes.get_position().height * figure.get_size_inches()[1] / 0.19)
    for number, row in enumerate([names, *rows[: int(lines) - 1]]):
        x = 0.0
        for text, width in zip(row, widths, strict=True):
            axes.text(
                x, 1 - (number + 0.5) / lines, text, fontsize=7.5, va="center", color="black" if number else _GREY
            )
            x += (width + 2) / (sum(widths) + 2 * len(widths))


def _format_ago(seconds: float) -> str:
    return f"-{seconds / 60:.0f} min" if round(seconds / 60) else "now"


_KINDS = {"timeseries": _draw_lines, "stat": _draw_numbers, "bargauge": _draw_bars, "table": _draw_table}


def _format_scaled(value: float, suffixes: Sequence[str], base: float = 1000.0) -> str:
    index = 0
    while abs(value) >= base and index < len(suffixes) - 1:
        value, index = value / base, index + 1
    return f"{value:.3g} {suffixes[index]}".strip()


def _format_duration(seconds: float) -> str:
    for least, size, suffix in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s")):
        if abs(seconds) >= least:
            return f"{seconds / size:.3g} {suffix}"
    return f"{1000 * seconds:.3g} ms" if seconds else "0 s"


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": _format_duration,
    "Bps": lambda value: _format_scaled(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")),
    "bytes": lambda value: _format_scaled(value, ("B", "kB", "MB", "GB", "TB")),
    "percentunit": lambda value: f"{100 * value:.3g}%",
    "ops": lambda value: f"{_format_scaled(value, ('', 'k', 'M'))}/s",
}


def format_value(value: float, unit: str) -> str:
    """Return a value approximately as Grafana formats it."""
    if not math.isfinite(value):
        return str(value)
    format_unit = _FORMATS.get(unit)
    return format_unit(value) if format_unit else _format_scaled(value, ("", "k", "M", "G"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m monitoring.pictures", description="Draw all dashboards.")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--seconds", type=float, default=3600, help="how far back (%(default)s)")
    parser.add_argument("--interval", default="2m", help="the value of $__rate_interval (%(default)s)")
    parser.add_argument("--training-job", default=".*", help="which job (%(default)s)")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    for dashboard in DASHBOARDS:
        path = args.directory / f"{dashboard.uid}.png"
        draw_dashboard(
            Prometheus(args.prometheus), dashboard, path, args.seconds, args.interval, training_job=args.training_job
        )
        print(path)


if __name__ == "__main__":
    main()
