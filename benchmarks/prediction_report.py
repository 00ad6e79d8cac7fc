"""The section of docs/benchmarks.md about predicted steps."""

from __future__ import annotations

from statistics import median
from typing import Any

from step_report import format_facts
from tables import format_number, format_table

LINKS = {
    "unshaped": "not shaped",
    "10gbit": "10 Gbit/s",
    "1gbit": "1 Gbit/s",
    "200mbit": "200 Mbit/s",
    "100mbit": "100 Mbit/s",
}
GOAL = 0.10
"""The error that predictions should not exceed."""


def build_section(stored: dict[str, Any]) -> dict[str, str]:
    """Return the table of predicted and measured steps, the errors in a sentence, and the cluster of the paper."""
    rows = [row for rate in LINKS for row in stored["rows"] if row["rate"] == rate]
    cells = [
        [
            row["part"].replace("x", " × "),
            LINKS[row["rate"]],
            row["contender"],
            format_number(row["predicted_ms"]),
            format_number(row["ms"]),
            f"{format_number(row['ms_min'])}–{format_number(row['ms_max'])}",
            f"{row['error']:+.1%}",
        ]
        for row in sorted(rows, key=lambda row: (row["part"], row["contender"]))
    ]
    headings = ["nodes × ranks", "link", "algorithm", "predicted, ms", "measured, ms", "min–max", "error"]
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= GOAL for error in errors)
    summary = (
        f"The median error is {median(errors):.1%}, the largest {max(errors):.1%}; {within} of {len(errors)} rows are "
        f"within {GOAL:.0%}."
    )
    return {
        "PREDICTION": format_table(headings, cells),
        "PREDICTION_ERRORS": summary,
        "PREDICTION_FACTS": format_facts(stored["facts"]),
        "PREDICTION_PAPER": _format_paper(stored["paper"]),
    }


def _format_paper(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["model"],
            str(row["batch"]),
            format_number(row["compute_ms"]),
            f"{format_number(row['torus2d_ms'])} ({row['torus2d_efficiency']:.0%})",
            f"{format_number(row['hitopk_ms'])} ({row['hitopk_efficiency']:.0%})",
            f"{row['faster']:.0%}",
        ]
        for row in rows
    ]
    headings = [
        "model",
        "samples per GPU",
        "compute, ms",
        "dense (torus2d), ms",
        "hitopk 1%, ms",
        "hitopk is faster by",
    ]
    return format_table(headings, cells)
