"""The progress display: a bar at the bottom of a terminal, or a plain line every few seconds without a terminal."""

from __future__ import annotations

import importlib.util
import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from topkube.telemetry.history import History

PLAIN_SECONDS = 5.0
"""Seconds between two plain lines."""
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


def format_bytes(number: float) -> str:
    """Return a number of bytes as text: 12 MB, 1.3 GB (powers of 1000)."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while number >= 999.5 and unit != "TB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if number >= 9.95 or unit == "B" else f"{number:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Return seconds as text: 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_rate(per_second: float) -> str:
    """Return a rate as text: 5,120 or 3.4."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def describe_sent_bytes(history: History, nodes: int, ranks: int) -> str:
    """Return the bytes sent between nodes (inside the node if there is one node), compared with dense, as text."""
    sent, dense = count_sent_bytes(history, nodes, ranks)
    if not dense:
        return ""
    if not sent:
        return "nothing sent"
    factor = dense / sent
    # A number below 1.05 either way is "as dense": dense algorithms differ by a few bytes.
    if factor >= 1.05:
        comparison = f"{factor:.0f}x less than dense" if factor >= 9.95 else f"{factor:.1f}x less than dense"
    else:
        comparison = "as dense" if factor > 0.95 else f"{1 / factor:.1f}x more than dense"
    return f"{format_bytes(sent)}, {comparison}"


def count_sent_bytes(history: History, nodes: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that were sent between nodes, and the bytes that a dense ring over all ranks would have sent
    between nodes. A ring has `ranks` links, and `nodes` of them connect two nodes. With one node: the bytes sent inside
    the node, and the bytes of the whole ring."""
    if nodes == 1:
        return sum(history.sent), sum(history.dense)
    return sum(history.between), sum(history.dense) * nodes // ranks


class ProgressDisplay:
    """Shows the progress in `history`, and above it the lines that ranks print. Use it in a `with` statement."""

    def __init__(self, console: Console, history: History, name: str, nodes: int, ranks: int) -> None:
        self.console, self.history, self._nodes, self._ranks = console, history, nodes, ranks
        in_notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        self._live = console.is_terminal or in_notebook
        self._shown_step, self._shown_at = 0, time.monotonic()
        self._bar = Progress(
            _Line(console, history, nodes, ranks),
            console=console,
            refresh_per_second=5,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task(name, total=None)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if not self._live:
            self._print_plain_line()

    def update(self) -> None:
        """Show the current state of the history."""
        last = self.history.last
        if self._live:
            if last is not None:
                self._bar.update(self._task, completed=last.step, total=last.total_steps)
        elif time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._print_plain_line()

    def show_lines(self, worker: int, rank: int, lines: list[str]) -> None:
        """Show lines that a rank printed."""
        if not lines:
            return
        prefix = f"[worker{worker}.rank{rank}] "
        if self._live:
            colour = _COLOURS[rank % len(_COLOURS)]
            shown = [Text(prefix, style=colour).append_text(Text.from_ansi(line)) for line in lines]
            self.console.print(Text("\n").join(shown), soft_wrap=True)
            return
        # Rich needs 160 µs for a line, and a rank may print a million.
        text = "".join(f"{prefix}{line}\n" for line in lines)
        file = self.console.file
        encoding = getattr(file, "encoding", None) or "utf-8"
        file.write(text.encode(encoding, errors="replace").decode(encoding))
        file.flush()

    def note(self, text: str) -> None:
        """Show a line without wrapping it."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def _print_plain_line(self) -> None:
        self._shown_at = time.monotonic()
        last = self.history.last
        if last is not None and last.step != self._shown_step:
            self._shown_step = last.step
            self.note(describe_progress(self.history, self._nodes, self._ranks))


def describe_progress(history: History, nodes: int, ranks: int, width: int | None = None) -> str:
    """Return the state of a run in one line: "step 120/200  loss 1.83  5,120 samples/s  12 MB, 43x less than dense
    41 s left". If `width` is set, the least important parts are left out until the line fits: first the bytes, then
    skipped steps, the rate and the loss."""
    last = history.last
    if last is None:
        return "starting"
    step = f"step {last.step}" + (f"/{last.total_steps}" if last.total_steps else "")
    loss = f"loss {last.loss:.4g}" if last.loss is not None and math.isfinite(last.loss) else ""
    speed = f"{format_rate(last.samples_per_second)} samples/s" if last.samples_per_second else ""
    skipped = f"{last.skipped_steps} skipped" if last.skipped_steps else ""
    eta = history.estimate_seconds_left()
    left = f"{format_duration(eta)} left" if eta and last.total_steps and last.step < last.total_steps else ""
    sent = describe_sent_bytes(history, nodes, ranks)
    parts = {"step": step, "loss": loss, "rate": speed, "bytes": sent, "skipped": skipped, "left": left}
    for least_important in ("", "bytes", "skipped", "rate", "loss"):
        parts.pop(least_important, None)
        line = "  ".join(part for part in parts.values() if part)
        if width is None or len(line) <= width:
            break
    return line


class _Line(ProgressColumn):
    """The line of a run: its name, a bar, and as much text as fits into the terminal."""

    _BAR_LEAST, _NAME_MOST = 8, 20

    def __init__(self, console: Console, history: History, nodes: int, ranks: int) -> None:
        super().__init__()
        self._console, self._arguments = console, (history, nodes, ranks)

    def render(self, task: Task) -> Table:
        name = Text(task.description, style="bold", no_wrap=True, overflow="ellipsis")
        name.truncate(min(self._NAME_MOST, self._console.width // 4), overflow="ellipsis")
        room = self._console.width - name.cell_len - self._BAR_LEAST - 4
        text = Text(describe_progress(*self._arguments, width=room), no_wrap=True)
        bar = ProgressBar(
            total=task.total,
            completed=task.completed,
            width=max(1, self._console.width - name.cell_len - text.cell_len - 4),
            pulse=task.total is None,
            complete_style="cyan",
            finished_style="green",
        )
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(name, bar, text)
        return line
