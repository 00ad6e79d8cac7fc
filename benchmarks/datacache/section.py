"""The section of docs/benchmarks.md about the data cache: its tables and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import format_table

Row = dict[str, Any]
LINKS = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}


def describe_problem(problem: dict[str, Any]) -> str:
    """Return the size of a problem in a few words."""
    size = f"{problem['sample_bytes'] / 1000:.0f} KB" if problem["sample_bytes"] > 10_000 else "3 KB"
    samples = f"{problem['samples']:,}"
    return (
        f"{samples} files of {size}" if problem["form"] == "files" else f"shards of 64 MB, {samples} samples of {size}"
    )


def _format_contender(row: Row) -> str:
    if row["contender"].startswith("TopKube"):
        return f"**{row['contender']}**"
    return str(row["contender"]) + (f" (returned {row['repeated']:,} samples twice)" if row.get("repeated") else "")


def fill_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the values of the template's placeholders."""
    first = [
        [
            describe_problem(stored["problems"][row["problem"]]),
            _format_contender(row),
            LINKS[row["link"]],
            f"{row['seconds']:.2f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['percent_of_link']:.0f}%",
            f"{row['fetched_of_dataset']:.3f}×",
            *([f"{row['processor_seconds']:.1f} s"] if "processor_seconds" in row else []),
            f"{row['processors_percent']}%",
        ]
        for row in stored["first"]
    ]
    second = [
        [
            describe_problem(stored["problems"][row["problem"]]),
            _format_contender(row),
            f"{row['mb_per_s']:,.0f}",
            f"{row['min']:,.0f}–{row['max']:,.0f}",
            f"{row['percent']:.0f}% of {row['of']}" if row["of"] else "",
            f"{row['fetched_mb_per_epoch']:.0f}",
        ]
        for row in stored["second"]
    ]
    work_heading = ["work of the ranks"] if "processor_seconds" in stored["first"][0] else []
    entries, facts = stored["entries"], stored["facts"]
    return {
        "CACHE_FIRST": format_table(
            ["dataset", "contender", "link", "seconds", "MB/s", "of the link", "fetched", *work_heading, "processors"],
            first,
        ),
        "CACHE_SECOND": format_table(["dataset", "contender", "MB/s", "min–max", "", "MB fetched"], second),
        "CACHE_IMPORTS": "" if stored.get("imports_are_timed", True) else "; imports of Python modules are not",
        "CACHE_LINK": ", ".join(sorted({f"{rate:.0f}" for rate in stored["link_mb_per_s"].values()})),
        "CACHE_ENTRIES": (
            f"With a manifest of {entries['entries']:,} objects ({entries['shards']:,} shards), listing it and "
            f"opening the cache take {entries['first_seconds']:.1f} s and at most {entries['first_peak_mb']} MB the "
            f"first time, and {entries['again_seconds']:.1f} s and {entries['again_peak_mb']} MB afterwards, including "
            "the start of Python and imports."
        ),
        "CACHE_FACTS": (
            f"{stored['date']}, {stored['command']}; "
            + "; ".join(f"{name}: {value}" for name, value in facts.items())
            + f"; peers: {stored['versions']}"
        ),
    }


def draw_picture(stored: dict[str, Any], path: Path) -> None:
    """Plot first epochs relative to the link and second epochs relative to memory, with one column per dataset."""
    from matplotlib import pyplot

    import plots

    names = list(stored["problems"])
    figure, grid = pyplot.subplots(2, len(names), figsize=(4.9 * len(names), 6.4), layout="constrained", squeeze=False)
    for column, name in enumerate(names):
        for axes, part, value in (
            (grid[0][column], "first", "percent_of_link"),
            (grid[1][column], "second", "mb_per_s"),
        ):
            rows = [row for row in stored[part] if row["problem"] == name and row.get("link", "1gbit") == "1gbit"]
            rows.sort(key=lambda row: row[value])
            for position, row in enumerate(rows):
                colour = plots.OURS if row["contender"].startswith("TopKube") else plots.PEER
                if row["contender"].startswith(("NumPy", "page cache")):
                    colour = plots.TOPK
                axes.barh(position, row[value], color=colour, height=0.72, zorder=2)
                shown = f"{row[value]:.0f}%" if part == "first" else f"{row[value]:,.0f} MB/s"
                axes.text(row[value] * 1.03, position, shown, va="center", fontsize=9)
            labels = [row["contender"].replace("DataLoader + fsspec ", "DataLoader + fsspec\n") for row in rows]
            axes.set_yticks(range(len(rows)), labels)
            for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
                tick.set_fontweight("bold" if row["contender"].startswith("TopKube") else "normal")
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", color=plots.FAINT, zorder=0)
            if part == "first":
                axes.set_title(describe_problem(stored["problems"][name]).replace(", ", ",\n"))
                axes.axvline(100, color=plots.INK, linewidth=1.4, zorder=3)
                axes.set_xlim(0, 119)
                axes.set_xlabel("first epoch, % of the link's rate (1 Gbit/s)")
            else:
                axes.set_xscale("log")
                axes.set_xlim(min(row[value] for row in rows) * 0.5, max(row[value] for row in rows) * 5)
                axes.set_xlabel("second epoch, MB/s (log scale)")
    plots.save(figure, path, stored)
