"""The progress of `topkube plan`: a bar on stderr, if it is a terminal and the predictions take long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

T = TypeVar("T")

_QUIET_SECONDS = 1.0
"""The bar appears if the predictions take longer."""


class PlanProgress:
    """The progress of `total` steps of work. Use it in a `with` statement; the bar disappears at the end."""

    def __init__(self, console: Console, total: int) -> None:
        self._is_shown, self._begin = console.is_terminal, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("predicting steps", total=total)

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. Each of them is a step of work, which ends before the next item."""
        for item in items:
            yield item
            self._bar.advance(self._task)
            if self._is_shown and time.monotonic() - self._begin >= _QUIET_SECONDS:
                self._bar.start()

    def __enter__(self) -> PlanProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:  # otherwise it would print an empty line
            self._bar.stop()
