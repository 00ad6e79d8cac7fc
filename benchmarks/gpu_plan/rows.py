"""Results, written one row at a time. Rows stay if the run is interrupted, and a new run continues after them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


_MOST_STARTS = 2


class Rows:
    """The rows of a file of JSON lines. Each row has a `key`; a row that exists is not measured again.

    No row is started after `deadline` (monotonic seconds), so that a command with a time limit ends by itself. The
    start of a row is a line too. A row that was started twice and never ended (the process was killed) becomes a row
    with `error` and is not started again: the rows after it must have their turn.
    """

    def __init__(self, path: Path, deadline: float = float("inf")) -> None:
        self.path, self.deadline = path, deadline
        self.left_out: list[str] = []
        """The keys of rows that were not started before the deadline."""
        self._rows = {row["key"]: row for row in read_rows(path)}
        self._starts = _count_unfinished_starts(path)
        if path.exists() and not path.read_text().endswith("\n"):  # a line that was cut off ends here
            with path.open("a") as file:
                file.write("\n")

    def measure(self, key: str, work: Callable[[], Row]) -> Row | None:
        """Return the row `key`. Run `work` for it if the file does not have it, and write it at once. A failure becomes
        a row with `error`, which a new run measures again. Return None after the deadline."""
        row = self._rows.get(key)
        if row is not None and "error" not in row:
            return row
        if time.monotonic() > self.deadline:
            self.left_out.append(key)
            return None
        if self._starts.get(key, 0) >= _MOST_STARTS:
            row = {"key": key, "error": f"it was started {_MOST_STARTS} times and did not end"}
            self._rows[key] = row
            return row
        self._append({"started": key})
        start = time.perf_counter()
        try:
            row = work()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        row = {"key": key, **row, "took s": round(time.perf_counter() - start, 3)}
        self._rows[key] = row
        self._append(row)
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}), flush=True)
        return row

    def _append(self, line: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, the last row of each key. A row that was started and never ended has an `error`."""
    rows = {row["key"]: row for row in _read_lines(path) if "key" in row}
    for key, starts in _count_unfinished_starts(path).items():
        if starts and ("error" in rows.get(key, {"error": ""})):
            rows[key] = {"key": key, "error": f"it was started {starts} times and did not end"}
    return list(rows.values())


def _count_unfinished_starts(path: Path) -> dict[str, int]:
    """Return how often each row was started since its last line."""
    starts: dict[str, int] = {}
    for line in _read_lines(path):
        if "started" in line:
            starts[line["started"]] = starts.get(line["started"], 0) + 1
        else:
            starts[line["key"]] = 0
    return starts


def _read_lines(path: Path) -> list[Row]:
    """Return the lines of a file. A line that was cut off is ignored."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
