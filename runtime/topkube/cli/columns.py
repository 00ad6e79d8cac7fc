"""Align the columns of a table, the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Collection


def align_columns(rows: list[list[str]], indent: str = "  ", right: Collection[int] = ()) -> list[str]:
    """Return one line per row. The columns numbered in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
