"""Results, written one row at a time. Rows stay if the run is interrupted, and a new run continues after them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """The rows of a file of JSON lines. Each row has a `key`; a row that exists is not measured again.

    No row is started after `deadline` (monotonic seconds), so that a command with a time limit ends by itself.
    """

    def __init__(self, path: Path, deadline: float = float("inf")) -> None:
        self.path, self.deadline = path, deadline
        self.left_out: list[str] = []
        """The keys of rows that were not started before the deadline."""
        self._rows = {row["key"]: row for row in read(path)}
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
        start = time.perf_counter()
        try:
            row = work()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        row = {"key": key, **row, "took s": round(time.perf_counter() - start, 3)}
        self._rows[key] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}), flush=True)
        return row


def read(path: Path) -> list[Row]:
    """Return the rows of a file, the last row of each key. A line that was cut off is ignored."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["key"]] = row
    return list(rows.values())
