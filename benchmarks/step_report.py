"""The section of docs/benchmarks.md about the training step."""

from __future__ import annotations

from typing import Any

from tables import format_number, format_table

NAMES = {
    "plain": "no exchange",
    "dense": "**TopKube dense**",
    "dense_mpi": "**TopKube dense, messages of MPI**",
    "dense_bf16": "**TopKube dense, bf16**",
    "dear": "**TopKube dense, DeAR**",
    "dear_bf16": "**TopKube dense, DeAR, bf16**",
    "int8": "**TopKube int8**",
    "int4": "**TopKube int4**",
    "int4_dear": "**TopKube int4, DeAR**",
    "int3": "**TopKube int3**",
    "hitopk": "**TopKube hitopk, 1%, bf16**",
    "hitopk_dear": "**TopKube hitopk, 1%, bf16, DeAR**",
    "onebit": "**TopKube onebit**",
    "onebit_delayed": "**TopKube onebit, delay 1**",
    "onebit_period2": "**TopKube onebit, period 2**",
    "onebit_period4": "**TopKube onebit, period 4**",
    "onebit_period4_delayed": "**TopKube onebit, period 4, delay 1**",
    "topk1bit": "**TopKube topk1bit**",
    "topk1bit_delayed": "**TopKube topk1bit, delay 1**",
    "auto": "**TopKube auto**",
    "auto_dear": "**TopKube auto, DeAR**",
    "auto_own": "**TopKube auto, own weights**",
    "powersgd_rank1": "**TopKube powersgd, rank 1**",
    "acpsgd_rank1": "**TopKube acpsgd, rank 1**",
    "acpsgd_rank2": "**TopKube acpsgd, rank 2**",
    "acpsgd_rank4": "**TopKube acpsgd, rank 4**",
    "ddp": "DDP",
    "fp16": "DDP with the fp16 hook",
    "powersgd1": "DDP with PowerSGD rank 1",
    "powersgd2": "DDP with PowerSGD rank 2",
    "powersgd4": "DDP with PowerSGD rank 4",
}
MODELS = {"gpt": "", "resnet50": ", ResNet-50", "timed": ", layers that sleep"}
SPEEDS = {
    "no exchange": ["plain"],
    "`dense`": ["dense"],
    "`dense`, DeAR": ["dear"],
    "`auto`": ["auto"],
    "`auto`, own weights": ["auto_own"],
    "`onebit`, period 4, delay 1": ["onebit_period4_delayed"],
    "DDP, fp16": ["fp16"],
    "DDP, PowerSGD": ["powersgd1", "powersgd2", "powersgd4"],
}
"""The columns of the overview, and whose speeds they show: that of the fastest of these contenders."""
SPEEDS_WITHOUT_AVX512 = {
    "no exchange": ["plain"],
    "`dense`": ["dense"],
    "`dense`, DeAR": ["dear"],
    "`int3`": ["int3"],
    "`auto`": ["auto"],
    "DDP, PowerSGD rank 1": ["powersgd1"],
    "`acpsgd`, rank 1": ["acpsgd_rank1"],
    "DDP, PowerSGD rank 4": ["powersgd4"],
    "`acpsgd`, rank 4": ["acpsgd_rank4"],
}
"""The columns of the overview of a second machine."""
FIXED = ("dense", "int8", "int4", "int3")
"""What `auto` may choose if nodes have equal weights."""
LINKS = {"unshaped": "link not shaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return a table for each layout and link, their overview, and the facts of the run."""
    tables, speeds = _build_tables(stored, SPEEDS)
    return {
        "TRAINING_STEP": "\n\n".join(tables),
        "TRAINING_STEP_SPEEDS": speeds,
        "TRAINING_STEP_FACTS": format_facts(stored["facts"]),
    }


def build_section_without_avx512(stored: dict[str, Any]) -> dict[str, str]:
    """Return the overview of the tables of a machine without AVX-512, and the facts of the run."""
    return {
        "TRAINING_STEP_AVX2_SPEEDS": _build_tables(stored, SPEEDS_WITHOUT_AVX512)[1],
        "TRAINING_STEP_AVX2_FACTS": format_facts(stored["facts"]),
    }


def _build_tables(stored: dict[str, Any], columns: dict[str, list[str]]) -> tuple[list[str], str]:
    """Return a table for each layout and link, and their overview with `columns`."""
    tables, speeds = [], []
    for model, words in MODELS.items():
        own = [row for row in stored["rows"] if row.get("model", "gpt") == model]
        for part in sorted({row["part"] for row in own}):
            for rate, link in LINKS.items():
                rows = [row for row in own if (row["part"], row["rate"]) == (part, rate)]
                if rows:
                    nodes, ranks = part.split("x")
                    title = f"**{nodes} nodes × {ranks}, {link}{words}**"
                    if measured := sorted({f"{row['date']}, load {row['load']:g}" for row in rows if "date" in row}):
                        title += f" ({'; '.join(measured)})"
                    tables.append(f"{title}\n\n{_format_table(rows)}")
                    speeds.append(_list_speeds(f"{nodes} × {ranks}, {link}{words}", rows, columns))
    return tables, format_table(["", "DDP, ms", *columns, "`auto` / fixed"], [row for row in speeds if row])


def build_links_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the table of `dense` over TCP connections of its own and over those of MPI, with DDP."""
    places = [(part, rate) for part in sorted({row["part"] for row in stored["rows"]}) for rate in LINKS]
    cells = [
        [
            f"{part.replace('x', ' × ')}, {LINKS[rate]}",
            NAMES[row["contender"]],
            format_number(row["ms"]),
            f"{row['ms_low']:.0f} to {row['ms_high']:.0f}",
            f"{row['against_ddp']:.2f}×" if row["against_ddp"] else "–",
            format_number(row["main_cpu_ms"]),
            format_number(row["other_cpu_ms"]),
            format_number(row["wakeups"]),
            row["date"],
        ]
        for part, rate in places
        for row in sorted(stored["rows"], key=lambda row: list(NAMES).index(row["contender"]))
        if (row["part"], row["rate"]) == (part, rate)
    ]
    headings = ["", "method", "ms per step", "95% interval", "× DDP", "computing thread, ms", "other threads, ms"]
    return {"TRAINING_STEP_LINKS": format_table([*headings, "wakeups", "date"], cells)}


def _list_speeds(title: str, rows: list[dict[str, Any]], columns: dict[str, list[str]]) -> list[str]:
    """Return the cells of the overview: how many times as fast as DDP of the same run the contenders of `columns` are,
    and the time of `auto` divided by that of the fastest of `FIXED`. Return nothing if DDP was not measured."""
    speeds = {row["contender"]: row["against_ddp"] for row in rows if row["against_ddp"]}
    if "ddp" not in speeds:
        return []
    cells = [title, format_number(next(row["ms"] for row in rows if row["contender"] == "ddp"))]
    for contenders in columns.values():
        measured = [speeds[contender] for contender in contenders if contender in speeds]
        cells.append(f"{max(measured):.2f}×" if measured else "–")
    fixed = [speeds[contender] for contender in FIXED if contender in speeds]
    return [*cells, f"{max(fixed) / speeds['auto']:.2f}" if fixed and "auto" in speeds else "–"]


def format_facts(stored: dict[str, Any]) -> str:
    """Return what the times depend on, as one line."""
    return " · ".join(f"{name.replace('_', ' ')}: {value}" for name, value in stored.items())


def _format_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            NAMES[row["contender"]],
            format_number(row["ms"]),
            f"{format_number(row['ms_low'])}–{format_number(row['ms_high'])}" if "ms_low" in row else "–",
            f"{format_number(row['ms_min'])}–{format_number(row['ms_max'])}",
            f"{row['against_ddp']:.2f}×" if row["against_ddp"] else "–",
            f"{row['sent_mb']:.2f}",
            format_number(row["main_cpu_ms"]),
            format_number(row["other_cpu_ms"]),
            format_number(row["wakeups"]),
        ]
        for row in sorted(rows, key=lambda row: row["ms"])
    ]
    headings = [
        "",
        "step, ms",
        "95% interval",
        "min–max",
        "× DDP",
        "sent per node, MB",
        "computing thread, ms",
        "other threads, ms",
    ]
    return format_table([*headings, "wakeups"], cells)
