"""Progress for people: one bar at the bottom of a terminal, or a plain line now and then where there is none."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from topkube.telemetry.history import History

PLAIN_SECONDS = 5.0
"""Between two plain lines."""
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


def size(number: float) -> str:
    """Bytes for people: 12 MB, 1.3 GB (powers of 1000)."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while number >= 999.5 and unit != "TB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if number >= 9.95 or unit == "B" else f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people: 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def reduction(history: History, nodes: int, ranks: int) -> str:
    """Bytes sent so far between nodes (inside the node where there is only one), and how many times less than dense."""
    sent, dense = bytes_sent(history, nodes, ranks)
    if not dense:
        return ""
    if not sent:
        return "nothing sent"
    factor = dense / sent
    # A number below 1.05 either way is "as dense": dense algorithms differ by a few bytes.
    if factor >= 1.05:
        against = f"{factor:.0f}x less than dense" if factor >= 9.95 else f"{factor:.1f}x less than dense"
    else:
        against = "as dense" if factor > 0.95 else f"{1 / factor:.1f}x more than dense"
    return f"{size(sent)}, {against}"


def bytes_sent(history: History, nodes: int, ranks: int) -> tuple[int, int]:
    """Bytes that crossed between nodes, and those that a dense ring over all ranks would have sent there: of a ring's
    `ranks`
    links, `nodes` join two nodes. With one node: bytes inside it, and the whole ring."""
    if nodes == 1:
        return sum(history.sent), sum(history.dense)
    return sum(history.between), sum(history.dense) * nodes // ranks


class ProgressDisplay:
    """Shows `history` as it grows, and the ranks' lines above. Use `with`."""

    def __init__(self, console: Console, history: History, name: str, nodes: int, ranks: int) -> None:
        self.console, self.history, self._nodes, self._ranks = console, history, nodes, ranks
        self._live = console.is_terminal
        self._shown_step, self._shown_at = 0, time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            _Facts(history, nodes, ranks),
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
            self._plain()

    def update(self) -> None:
        """Shows what the history holds now."""
        last = self.history.last
        if self._live:
            if last is not None:
                self._bar.update(self._task, completed=last.step, total=last.total_steps)
        elif time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._plain()

    def line(self, node: int, rank: int, text: str) -> None:
        """One line that a rank printed."""
        prefix = f"[node{node}.rank{rank}] "
        if self._live:
            shown = Text(prefix, style=_COLOURS[rank % len(_COLOURS)])
            self.console.print(shown.append_text(Text.from_ansi(text)), soft_wrap=True)
        else:
            self.note(prefix + text)

    def note(self, text: str) -> None:
        """A line of our own, never wrapped."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def _plain(self) -> None:
        self._shown_at = time.monotonic()
        last = self.history.last
        if last is not None and last.step != self._shown_step:
            self._shown_step = last.step
            self.note(facts(self.history, self._nodes, self._ranks))


def facts(history: History, nodes: int, ranks: int) -> str:
    """step 120/200  loss 1.83  5,120 samples/s  12 MB, 43x less than dense  41 s left"""
    last = history.last
    if last is None:
        return "starting"
    parts = [f"step {last.step}" + (f"/{last.total_steps}" if last.total_steps else "")]
    if last.loss is not None and math.isfinite(last.loss):
        parts.append(f"loss {last.loss:.4g}")
    if last.samples_per_second:
        parts.append(f"{rate(last.samples_per_second)} samples/s")
    parts.append(reduction(history, nodes, ranks))
    if last.skipped_steps:
        parts.append(f"{last.skipped_steps} skipped")
    eta = history.eta_seconds()
    if eta and last.total_steps and last.step < last.total_steps:
        parts.append(f"{duration(eta)} left")
    return "  ".join(part for part in parts if part)


class _Facts(ProgressColumn):
    def __init__(self, history: History, nodes: int, ranks: int) -> None:
        super().__init__()
        self._arguments = (history, nodes, ranks)

    def render(self, task: Task) -> Text:
        return Text(facts(*self._arguments), no_wrap=True)
