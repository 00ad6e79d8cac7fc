"""The progress file of a run: one `StepRecord` per step, as a line of JSON, in the run's directory.

Rank 0 appends lines. Other processes may read at the same time; they read whole lines only. After a restart the file
is continued. It may then contain a step twice; the later line is valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.jsonl"
"""Name of the file in the run's directory."""

_LARGEST_COUNT = 1 << 62
"""A record with a larger count is not valid."""


@dataclass(frozen=True)
class StepRecord:
    """The record of a finished step of the whole job.

    `samples` and the bytes are sums over all ranks. `loss` is the mean over all samples of the step; None if the script
    reports no loss or the loss is not finite. `seconds` are those of rank 0. `samples_per_second` covers the time since
    the previous record. `dense_bytes` are the bytes of a dense ring all-reduce of the same gradients. `density` is the
    current density (it changes during warm-up), 1 for dense steps. `skipped_steps` are counted from the start of the
    run, across restarts. `time` is Unix time.
    """

    step: int
    """Steps finished so far, from 1."""
    total_steps: int | None
    """Steps of the whole run, None if unknown."""
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
    """Step of the newest checkpoint; None if there is no checkpoint."""
    failed_checkpoints: int = 0
    """Checkpoints that could not be written since the start of this attempt."""
    choice: str | None = None
    """What `auto` or `dense` stands for, and why; None if the job names its algorithm, and with one node."""
    time: float = 0.0

    def to_json(self) -> str:
        """Return the line without its end. Numbers that JSON cannot represent (a NaN loss) become null."""
        values = dataclasses.asdict(self)
        return json.dumps({name: _replace_nonfinite(value) for name, value in values.items()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Return the record in a line. Unknown names are ignored. Raises ValueError if the line is not a record: a
        script may write anything into the run's directory."""
        field_names = {entry.name for entry in dataclasses.fields(cls)}
        try:
            record = cls(**{name: value for name, value in json.loads(line).items() if name in field_names})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"this is not the record of a step: {error}") from None
        if not record._is_valid():
            raise ValueError("this is not the record of a step: a value has the wrong type")
        return record

    def _is_valid(self) -> bool:
        """Return True if all values have their types. Numbers that were not finite are None."""
        counts = (self.step, self.epoch, self.samples, self.intra_bytes, self.inter_bytes, self.dense_bytes)
        more_counts = (self.skipped_steps, self.failed_checkpoints, self.total_steps or 0, self.checkpoint_step or 0)
        numbers = (self.loss, self.samples_per_second, self.density)
        return (
            all(isinstance(count, int) and abs(count) < _LARGEST_COUNT for count in (*counts, *more_counts))
            and all(number is None or isinstance(number, int | float) for number in numbers)
            and isinstance(self.seconds, dict)
            and all(isinstance(number, int | float) for number in (self.time, *self.seconds.values()))
            and isinstance(self.choice, str | None)
        )


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class ProgressWriter:
    """Appends records to `directory`/progress.jsonl; each line is complete on disk before `write` returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / PROGRESS_FILE).open("ab", buffering=0)

    def write(self, record: StepRecord) -> None:
        """Append a record. Raises OSError if the disk is full; the file has whole lines then, and a later call can
        succeed."""
        line, end = record.to_json().encode() + b"\n", os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[StepRecord, int]]:
    """Yield the records of the file from byte `offset` on, each with the offset after it, for the next call. Yields
    nothing if the file does not exist. A line that is still being written is left for the next call."""
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
