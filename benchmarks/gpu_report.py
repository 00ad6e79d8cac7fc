"""The section of docs/benchmarks.md with the figures of a GPU (benchmarks/gpu.py)."""

from __future__ import annotations

from typing import Any

from tables import format_number, format_table

_PLAIN = "plain"
_AUTO_OWN = "auto with own weights"
_PEERS = {"ddp": "DDP over gloo", "fp16": "DDP, fp16 hook", "powersgd1": "DDP, PowerSGD rank 1"}
_CONNECTED = ("plain", "ddp", "hierarchical", "int4")
_PACKING = (
    ("sign_pack_", "signs, pack"),
    ("sign_unpack_add_ 2 nodes", "add 2 nodes"),
    ("sign_unpack_add_ 8 nodes", "add 8 nodes"),
    ("quantised_pack_ 8", "8 bits, pack"),
    ("quantised_unpack_add_ 8 2 nodes", "add 2 nodes"),
    ("quantised_unpack_add_ 8 8 nodes", "add 8 nodes"),
    ("quantised_pack_ 4", "4 bits, pack"),
    ("quantised_unpack_add_ 4 2 nodes", "add 2 nodes"),
    ("quantised_unpack_add_ 4 8 nodes", "add 8 nodes"),
)


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the section by the names that report.template.md has."""
    rows = {row["key"]: row for row in (*stored["earlier rows"], *stored["all rows"])}
    return {
        "GPU": _describe_machine(stored, rows),
        "GPU_SELECTION": _build_selection_table(rows),
        "GPU_PACKING": _build_packing_table(rows),
        "GPU_STEP": _describe_step(rows),
        "GPU_NODES": _build_nodes_table(rows),
        "GPU_CONNECTIONS": _build_connections_table(rows),
    }


def _describe_machine(stored: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    dates = {
        what: {row.get("date", stored["date"]) for key, row in rows.items() if key.startswith(begin)}
        for what, begin in (("kernels", "time "), ("steps of two nodes", "step of 2 nodes"))
    }
    when = ", ".join(f"{what} {' and '.join(sorted(days))}" for what, days in dates.items() if days)
    return (
        f"{stored['device']}, driver {stored['driver'].partition(',')[0]}, torch {stored['torch']}, {when};"
        f" `{stored['command']}`. Times are medians of CUDA events; inputs rotate through more memory than the L2 cache"
        " holds."
    )


def _build_selection_table(rows: dict[str, dict[str, Any]]) -> str:
    cells = [
        [
            f"{row['size']}, {row['dtype']}, {row['density']:g}",
            *(format_number(row[f"{name} ms"]) for name in ("read", "topk", "torch.topk", "compress_", "mstopk")),
            f"{row['topk % of a read']:.0f}%",
            f"{row['topk × torch.topk']:.1f}×",
            f"{row['compress_ % of 12 bytes']:.0f}%",
            f"{row['mstopk × torch']:.0f}×",
        ]
        for key, row in rows.items()
        if key.startswith("time ") and "error" not in row
    ]
    headings = [
        *("elements, type, density", "read, ms", "topk, ms", "torch.topk, ms", "compress_, ms", "mstopk, ms"),
        *("topk of a read", "topk × torch.topk", "compress_ of its bytes", "mstopk × torch"),
    ]
    return format_table(headings, cells)


def _build_packing_table(rows: dict[str, dict[str, Any]]) -> str:
    cells = [
        [row["size"], *(f"{row[f'{name} % of its bytes']:.0f}%" for name, _ in _PACKING)]
        for key, row in rows.items()
        if key.startswith("packing ") and "error" not in row
    ]
    return format_table(["elements", *(heading for _, heading in _PACKING)], cells)


def _describe_step(rows: dict[str, dict[str, Any]]) -> str:
    """Return what a step on one GPU takes. A row of an earlier run names its sources."""
    step = rows.get("training step", {})
    if "dense ms" not in step:
        return "A training step on one GPU was not measured."
    names = ("torch", "DDP", "dense", "hitopk 1%", "hitopk 1% with graphs")
    times = ", ".join(f"{name} {format_number(step[f'{name} ms'])}" for name in names)
    return (
        f"One GPU, one rank: a step of a GPT with {step['parameters']:,} parameters (batch {step['batch']}, context"
        f" {step['context']}, bf16 autocast, AdamW) takes, in ms: {times}. DDP uses NCCL.{_note_sources(step)}"
    )


def _note_sources(row: dict[str, Any]) -> str:
    return " An earlier version was measured." if "sources" in row else ""


def _build_nodes_table(rows: dict[str, dict[str, Any]]) -> str:
    links = {
        key.partition(", ")[2] or "not limited": row
        for key, row in sorted(rows.items(), key=lambda item: item[0] == "step of 2 nodes")
        if key.startswith("step of 2 nodes") and "plain ms" in row
    }
    if not links:
        return "Steps of two nodes were not measured."
    first = next(iter(links.values()))
    names = [key.removesuffix(" ms") for key in first if key.endswith(" ms") and not key.endswith("phases ms")]
    cells = [
        [_name_contender(name), *(cell for row in links.values() for cell in _describe_time(row, name))]
        for name in names
    ]
    headings = ["", *(heading for link in links for heading in (f"{link}, ms", "× DDP"))]
    about = "; ".join(f"{link}: {_describe_choices(row)}" for link, row in links.items())
    return f"{format_table(headings, cells)}\n\nWhat `auto` took, with the predicted time of the exchange: {about}."


def _build_connections_table(rows: dict[str, dict[str, Any]]) -> str:
    cells = []
    for key, row in rows.items():
        if " connections, " in key and "plain ms" in row:
            times = (format_number(row[f"{name} ms"]) for name in _CONNECTED)
            cells.append([key.replace("1 connections", "1 connection"), *times, _describe_time(row, "hierarchical")[1]])
    return format_table(["", *map(_name_contender, _CONNECTED), "`hierarchical` × DDP"], cells)


def _describe_choices(row: dict[str, Any]) -> str:
    """Return what `auto` took, and if it was measured, what it took with `nodeWeights: own`."""
    summaries = {name: row.get(f"{name} is", "").partition(" per step")[0] for name in ("auto", _AUTO_OWN)}
    own = f", with `nodeWeights: own` `{summaries[_AUTO_OWN]}`" if summaries[_AUTO_OWN] else ""
    return f"`{summaries['auto']}`{own}"


def _name_contender(name: str) -> str:
    if name == _PLAIN:
        return "no exchange"
    if name == _AUTO_OWN:
        return "`auto`, `nodeWeights: own`"
    return _PEERS.get(name, f"`{name.split()[0]}`{''.join(f', {word}' for word in name.split()[1:])}")


def _describe_time(row: dict[str, Any], name: str) -> tuple[str, str]:
    milliseconds = row.get(f"{name} ms")
    if milliseconds is None:
        return "", ""
    return format_number(milliseconds), f"{row['ddp ms'] / milliseconds:.2f}"
