"""The tables, texts and plots of the all-reduce between nodes in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import format_number, format_table

WHOLE = 25_557_032
LAYOUTS = {"2x2": "2 nodes × 2 ranks", "4x1": "4 nodes × 1 rank"}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unshaped": "link not shaped"}

Row = dict[str, Any]


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    rows: list[Row] = stored["rows"]
    tables = []
    for part, layout in LAYOUTS.items():
        for rate, link in LINKS.items():
            selected = select_rows(rows, part, rate, WHOLE)
            if selected:
                tables.append(f"#### {layout}, {link}, {WHOLE:,} float32\n\n{format_contenders(selected)}")
    small = []
    for part, layout in LAYOUTS.items():
        for rate, link in LINKS.items():
            for elements in sorted({row["elements"] for row in rows if row["elements"] < WHOLE}):
                selected = select_rows(rows, part, rate, elements)
                if selected:
                    small.append(f"#### {layout}, {link}, {format_size(elements)}\n\n{format_contenders(selected)}")
    node = [
        [
            format_contender(row),
            format_number(row["ms"]),
            f"{format_number(row['ms_min'])}–{format_number(row['ms_max'])}",
            format_number(row["bound_ms"]),
            f"{row['of_bound']:.0f}%",
            format_gain(row, "against_dense"),
        ]
        for row in sorted(select_rows(rows, "node", None, WHOLE), key=lambda row: row["ms"])
    ]
    return {
        "HEADLINE": describe_headline(rows),
        "TABLES": "\n\n".join(tables),
        "SMALL": "\n\n".join(small),
        "NODE": format_table(["contender", "ms", "min–max", "bound, ms", "of bound", "× best peer"], node),
        "LOSSES": format_losses(rows),
        "CROSSING": describe_crossing(rows),
        "FACTS": format_facts(stored["facts"]),
        "TUNING": format_tuning(stored.get("tuning", [])),
    }


def list_pictures(stored: dict[str, Any]) -> dict[str, tuple[Callable[..., None], Any]]:
    """Return the file name of each plot, the function that draws the plot, and its data."""
    import plots

    rows: list[Row] = stored["rows"]
    whole = [row for row in rows if row["elements"] == WHOLE and row["part"] in LAYOUTS]
    return {
        "allreduce.png": (plots.draw_headline, select_rows(rows, "2x2", "1gbit", WHOLE)),
        "allreduce-links.png": (plots.draw_links, whole),
        "allreduce-sizes.png": (plots.draw_sizes, [row for row in rows if row["rate"] == "1gbit"]),
    }


def format_size(elements: int) -> str:
    """Return the size of an array of float32 as text."""
    mebibytes = elements * 4 / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes >= 1 else f"{mebibytes * 1024:.0f} KiB"


def format_contender(row: Row) -> str:
    return f"**{row['contender']}**" if row["kind"].startswith("ours") else str(row["contender"])


def format_gain(row: Row, column: str) -> str:
    return f"{row[column]:.2f}×" if row.get(column) is not None else "–"


def format_contenders(rows: list[Row]) -> str:
    """Return the table of contenders, fastest first."""
    cells = [
        [
            format_contender(row),
            format_number(row["ms"]),
            f"{format_number(row['ms_min'])}–{format_number(row['ms_max'])}",
            format_number(row["bound_ms"]),
            f"{row['of_bound']:.0f}%",
            f"{row['sent_mb']:.2f}",
            f"{row['formula_mb']:.2f}",
            format_gain(row, "against_dense"),
            format_gain(row, "against_topk"),
        ]
        for row in sorted(rows, key=lambda row: row["ms"])
    ]
    headings = ["contender", "ms", "min–max", "bound, ms", "of bound", "sent, MB", "formula, MB", "× best dense peer"]
    return format_table([*headings, "× torch.topk + all-gather"], cells)


def select_rows(rows: list[Row], part: str, rate: str | None, elements: int) -> list[Row]:
    return [row for row in rows if (row["part"], row["rate"], row["elements"]) == (part, rate, elements)]


def find_contender(rows: list[Row], contender: str) -> Row | None:
    return next((row for row in rows if row["contender"] == contender), None)


def describe_headline(rows: list[Row]) -> str:
    selected = select_rows(rows, "2x2", "1gbit", WHOLE)
    sparse, dense = find_contender(selected, "TopKube hitopk 1%"), find_contender(selected, "TopKube hierarchical")
    if sparse is None or dense is None:
        return ""
    best = min((row for row in selected if row["kind"] == "peer dense"), key=lambda row: row["ms"])
    text = (
        f"![All-reduce over 1 Gbit/s](images/allreduce.png)\n\n"
        f"Between 2 nodes × 2 ranks over 1 Gbit/s, summing {WHOLE:,} float32 (ResNet-50's parameters) takes the best "
        f"dense peer ({best['contender']}) {format_number(best['ms'])} ms. `hitopk` at a density of 1% takes "
        f"{format_number(sparse['ms'])} ms: {sparse['against_dense']:.1f}× faster than that peer, "
        f"{sparse['against_topk']:.1f}× faster than torch.topk and an all-gather, "
        f"{sparse['of_bound']:.0f}% of its bound. "
        f"Dense `hierarchical` takes {format_number(dense['ms'])} ms, {dense['of_bound']:.0f}% of its bound."
    )
    node = find_contender(select_rows(rows, "node", None, WHOLE), "TopKube hierarchical")
    if node:
        text += (
            f" Between two ranks of one node `hierarchical` takes {format_number(node['ms'])} ms, "
            f"{node['against_dense']:.1f}× faster than the best peer."
        )
    return text


def format_losses(rows: list[Row]) -> str:
    """Return the table of `hitopk` 1% against the best dense exchange, for all layouts, links and sizes."""
    cells = []
    for part in LAYOUTS:
        for rate in LINKS:
            for elements in sorted({row["elements"] for row in rows}):
                selected = select_rows(rows, part, rate, elements)
                sparse = find_contender(selected, "TopKube hitopk 1%")
                dense = sorted((row for row in selected if row["kind"].endswith("dense")), key=lambda row: row["ms"])
                if sparse is None or not dense:
                    continue
                gain = dense[0]["ms"] / sparse["ms"]
                verdict = "**sparse loses**" if gain < 1 else "small gain" if gain < 2 else "sparse wins"
                cells.append(
                    [
                        f"{LAYOUTS[part]}, {LINKS[rate]}",
                        format_size(elements),
                        format_number(sparse["ms"]),
                        f"{format_number(dense[0]['ms'])} ({dense[0]['contender']})",
                        f"{gain:.2f}×",
                        verdict,
                    ]
                )
    lost = [cell for cell in cells if "loses" in cell[-1]]
    summary = (
        f"Sparse loses in {len(lost)} of these {len(cells)} exchanges." if lost else "Sparse loses in none of these."
    )
    return format_table(["exchange", "array", "hitopk 1%, ms", "best dense, ms", "gain", ""], cells) + f"\n\n{summary}"


def describe_crossing(rows: list[Row]) -> str:
    """Return the text about the link speed at which dense is as fast as sparse, by the rows of 2 x 2 at 1 Gbit/s."""
    selected = select_rows(rows, "2x2", "1gbit", WHOLE)
    sparse, dense = find_contender(selected, "TopKube hitopk 1%"), find_contender(selected, "TopKube hierarchical")
    if sparse is None or dense is None:
        return ""
    fixed = sparse["ms"] - sparse["inter_ms"]
    speed = format_number((dense["formula_mb"] - sparse["formula_mb"]) * 8 / fixed)
    ms, dense_mb = format_number(fixed), format_number(dense["formula_mb"])
    return (
        f"On this machine, all stages of `hitopk` except the link take {ms} ms for the whole array. Dense sends"
        f" {dense_mb} MB per node, sparse {sparse['formula_mb']:.2f} MB. At about **{speed} Gbit/s** the link carries"
        f" the difference in {ms} ms. From there on dense, which overlaps its stages inside the node with the link,"
        " is as fast."
    )


def format_facts(facts: dict[str, Any]) -> str:
    machine = ("processor", "cores", "system", "python")
    lines = [f"- {' · '.join(f'{name}: {facts[name]}' for name in machine if name in facts)}"]
    probed: dict[str, list[str]] = {}
    for name, value in facts.items():
        if name not in machine:
            part, _, measured = name.partition(" ")
            probed.setdefault(part, []).append(f"{measured} {value}")
    return "\n".join([*lines, *(f"- {part}: {'; '.join(values)}" for part, values in probed.items())])


def format_tuning(rows: list[Row]) -> str:
    if not rows:
        return ""
    cells = [
        [row["world"], row["part"], row["settings"] or "as installed", format_number(row["ms"])]
        for row in sorted(rows, key=lambda row: (row["part"], row["ms"]))
    ]
    return "All settings that were tried, on the whole array:\n\n" + format_table(
        ["world", "layout", "settings", "ms at 1 Gbit/s"], cells
    )
