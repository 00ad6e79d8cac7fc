"""The section of docs/benchmarks.md about worlds with many ranks."""

from __future__ import annotations

from typing import Any

from tables import format_number, format_table


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the table of the seconds of each phase."""
    phases = [
        ("init", 1, "start a world, s"),
        ("broadcast_parameters", 1, "broadcast, s"),
        ("step, dense", 3, "dense step, s"),
        ("step, hitopk", 3, "hitopk step, s"),
        ("step, naive", 3, "naive step, s"),
        ("step with a NaN on one rank", 1, "step with a NaN, s"),
        ("checkpoint", 1, "run with checkpoint, s"),
        ("until a missing rank is named", 1, "missing rank named, s"),
    ]
    rows = []
    for row in sorted(stored["rows"], key=lambda row: (row["ranks"], row["mpi"], len(row["nodes"]))):
        seconds = {name.replace("resume and checkpoint", "checkpoint"): value for name, value in row["seconds"].items()}
        sizes = sorted(set(row["nodes"]))
        mpi = "MPICH" if row["mpi"] == "mpich" else "Open MPI"
        ranks_per_node = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        rows.append(
            [
                f"{row['ranks']}, {len(row['nodes'])} nodes of {ranks_per_node}, {mpi}",
                *(format_number(seconds[name] / times) for name, times, _ in phases),
                format_number(row["cpu_seconds_per_rank"]),
                f"{row['memory_mib']['median']:.0f} (most {row['memory_mib']['most']:.0f})",
                format_number(row["window_mib_per_node"]),
                format_number(row["files_per_rank"]),
            ]
        )
    headings = ["ranks, nodes, MPI", *(heading for _, _, heading in phases)]
    headings += ["CPU time per rank, s", "memory per rank, MiB", "window per node, MiB", "files per rank"]
    facts = " · ".join(f"{name}: {value}" for name, value in stored["machine"].items())
    return {"RANKS": f"{format_table(headings, rows)}\n\n{facts}"}
