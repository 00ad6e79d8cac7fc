"""Progress of a run: one `StepRecord` per step, one JSON line each, in the run's directory.

Rank 0 appends, anything may read at the same time: a reader takes whole lines only. After a restart the file grows
on, and a step may stand in it twice; the later line counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

PROGRESS_FILE = "progress.jsonl"
"""Name of the file in the run's directory."""


@dataclass(frozen=True)
class StepRecord:
    """One finished step of the whole job.

    Counts (`samples`, the bytes) are sums over all ranks; `loss` is the mean over all samples of the step, None where
    the script reports none or it is not finite; `seconds` are rank 0's. `samples_per_second` covers the time since
    the previous record. `dense_bytes` is what a dense ring all-reduce of the same gradients would have sent.
    `density` is the one in force (warm-up included), 1 for dense steps. `skipped_steps` counts from the start of the
    run, across restarts. `time` is Unix time.
    """

    step: int
    """Steps finished so far, from 1."""
    total_steps: int | None
    """Steps of the whole run, None where unknown."""
    epoch: int = 0
    loss: float | None = None
    samples: int = 0
    samples_per_second: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per phase, see `telemetry.phases.PHASES`; select, intra and inter overlap with backward."""
    intra_bytes: int = 0
    inter_bytes: int = 0
    dense_bytes: int = 0
    density: float = 1.0
    skipped_steps: int = 0
    checkpoint_step: int | None = None
    """Step of the newest checkpoint; None where there is none."""
    failed_checkpoints: int = 0
    """Checkpoints that the disk refused since the start of this attempt."""
    time: float = 0.0

    def to_json(self) -> str:
        """One line without its end. Numbers that JSON has no word for (a NaN loss) become null."""
        values = dataclasses.asdict(self)
        return json.dumps({name: _finite(value) for name, value in values.items()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The record of one line; names that this version does not know are passed over."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in json.loads(line).items() if name in known})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class ProgressWriter:
    """Appends records to `directory`/progress.jsonl; each line is complete on disk before `write` returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (directory / PROGRESS_FILE).open("a", encoding="utf-8", buffering=1)

    def write(self, record: StepRecord) -> None:
        self._file.write(record.to_json() + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[StepRecord, int]]:
    """Records of the file from byte `offset` on, each with the offset behind it, for the next call. Nothing where
    there is no file yet; a line still being written waits for the next call."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield StepRecord.from_json(line.decode("utf-8")), offset
