"""Rows as aligned lines, of the same width with a terminal and without."""

from __future__ import annotations

from collections.abc import Collection


def columns(rows: list[list[str]], indent: str = "  ", right: Collection[int] = ()) -> list[str]:
    """One line per row; the columns numbered in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
