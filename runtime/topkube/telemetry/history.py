"""The history of a run: the columns over steps that the bar, the summary and the plot need."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from topkube.telemetry.progress import PROGRESS_FILE, StepRecord, read_records

DATA = "wait for data"
PARTS = (DATA, "compute", "select", "inside node", "between nodes")
"""The parts of a step's time. The exchange overlaps with the backward pass, or is a part of the update, so compute is
the time without an exchange and without the wait for the next batch, and the parts add up to the step."""


@dataclass
class History:
    """Columns over steps; `seconds` has one column per entry of PARTS. Totals are sums over all steps and ranks."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    seconds: dict[str, array[float]] = field(default_factory=lambda: {part: array("d") for part in PARTS})
    samples: array[int] = field(default_factory=lambda: array("q"))
    sent: array[int] = field(default_factory=lambda: array("q"))
    between: array[int] = field(default_factory=lambda: array("q"))
    dense: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    last: StepRecord | None = None
    is_measured: bool = False
    """True if records have times and bytes: a script with a loop of its own, without `run.progress`, reports none."""

    def add(self, record: StepRecord) -> None:
        """Add a step. If the history already has this step or later steps, they were repeated after a restart: the new
        record replaces them."""
        while self.steps and self.steps[-1] >= record.step:
            for column in self._list_columns():
                column.pop()
        self.steps.append(record.step)
        self.losses.append(float("nan") if record.loss is None else record.loss)
        for part, value in split_step(record.seconds).items():
            self.seconds[part].append(value)
        self.samples.append(record.samples)
        self.sent.append(record.intra_bytes + record.inter_bytes)
        self.between.append(record.inter_bytes)
        self.dense.append(record.dense_bytes)
        self.times.append(record.time)
        self.last = record
        self.is_measured |= bool(record.seconds)

    def _list_columns(self) -> list[array[int] | array[float]]:
        integer_columns = [self.steps, self.samples, self.sent, self.between, self.dense]
        return [*integer_columns, self.losses, self.times, *self.seconds.values()]

    @property
    def total_steps(self) -> int | None:
        return self.last.total_steps if self.last else None

    @property
    def samples_per_second(self) -> float | None:
        """The rate over the whole run, from the first record to the last; None if unknown."""
        if not any(self.samples):
            return None
        if len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return self.last.samples_per_second if self.last and self.last.samples_per_second else None
        return sum(self.samples[1:]) / (self.times[-1] - self.times[0])

    def estimate_seconds_left(self, recent: int = 50) -> float | None:
        """Return the expected seconds until the last step, by the pace of the `recent` steps; None if unknown."""
        if self.total_steps is None or len(self.times) < 2:
            return None
        span = min(recent, len(self.times) - 1)
        steps_done = self.steps[-1] - self.steps[-1 - span]
        pace = (self.times[-1] - self.times[-1 - span]) / max(1, steps_done)
        return max(0.0, (self.total_steps - self.steps[-1]) * pace)


def split_step(seconds: dict[str, float]) -> dict[str, float]:
    """Return seconds per part, given seconds per phase. select, intra and inter overlap with backward, which waits for
    them at its end, or with update."""
    step = sum(seconds.get(phase, 0.0) for phase in ("data", "forward", "backward", "update"))
    data = seconds.get("data", 0.0)
    exchange = [seconds.get(phase, 0.0) for phase in ("select", "intra", "inter")]
    compute = step - data - sum(exchange)
    if compute < 0:  # several buckets at the same time, or clocks that differ: keep the step's length
        exchange = [value * (step - data) / sum(exchange) for value in exchange]
        compute = 0.0
    return dict(zip(PARTS, [data, compute, *exchange], strict=True))


class ProgressReader:
    """Reads the records that rank 0 has written since the last call."""

    def __init__(self, directory: Path) -> None:
        self._path, self._offset = directory / PROGRESS_FILE, 0

    def read(self) -> list[StepRecord]:
        """Return the records that were added since the last call."""
        records = []
        for record, offset in read_records(self._path, self._offset):
            records.append(record)
            self._offset = offset
        return records


class LogFollower:
    """Reads the integer_columns lines that were added to a log since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._unfinished = path, 0, b""

    def read(self, most: int = 1 << 20) -> list[str]:
        """Return the new lines, at most about `most` bytes."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(most)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > most:
            lines, self._unfinished = [*lines, self._unfinished], b""
        return [_decode_line(line) for line in lines]

    def finish(self) -> Iterator[list[str]]:
        """Yield the remaining lines in parts of about 1 MiB, and then a last line without its end."""
        before = -1
        while self._offset != before:
            before = self._offset
            yield self.read()
        unfinished, self._unfinished = self._unfinished, b""
        yield [_decode_line(unfinished)] if unfinished else []


def _decode_line(line: bytes) -> str:
    # The progress bar of a script overwrites its line, so only the last version of the line is shown.
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
