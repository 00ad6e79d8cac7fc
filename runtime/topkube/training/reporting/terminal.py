"""A progress bar for a script that runs in a terminal without `topkube run`."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from topkube.telemetry.progress import StepRecord


class TerminalBar:
    """A progress bar that shows step records, in place of a `ProgressWriter`."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("step", total=None, numbers="")
        self._progress.start()

    def write(self, record: StepRecord) -> None:
        loss = "" if record.loss is None else f"loss {record.loss:.4f}  "
        numbers = f"{loss}{record.samples_per_second:,.0f} samples/s"
        self._progress.update(self._task, completed=record.step, total=record.total_steps, numbers=numbers)

    def close(self) -> None:
        self._progress.stop()
