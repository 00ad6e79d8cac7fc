"""The format of figures and tables in docs/benchmarks.md."""

from __future__ import annotations


def format_table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; columns after the first are right-aligned."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_number(value: object) -> str:
    """Return a number with three significant figures."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
