"""The printers of `topkube logs`: for a person, as JSON, and for a program that takes the lines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from topkube.cli.cluster.jobs import show_control_characters
from topkube.cli.cluster.log_options import LogOptions
from topkube.cli.cluster.log_streams import LogSource

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
_RANK = re.compile(r"\[rank (\d+)\] ")


class Printer:
    """Prints lines after the name of the rank or pod that printed them, in colour on a terminal, and notes on
    stderr."""

    def __init__(self, options: LogOptions) -> None:
        from rich.console import Console

        self.options = options
        self._out = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False)

    def print_line(self, source: LogSource, stamp: str, raw: bytes) -> None:
        index = source.index
        rank, text = _split_rank(index, raw)
        if self.options.json:
            print(
                json.dumps(
                    {
                        "pod": source.pod["metadata"]["name"],
                        "worker": index if index >= 0 else None,
                        "rank": rank,
                        "time": stamp,
                        "text": text,
                    }
                ),
                flush=True,
            )
            return
        prefix = _build_prefix(index, rank)
        text = f"{stamp} {text}" if self.options.timestamps else text
        if self._out.is_terminal:
            from rich.text import Text

            colour = _COLOURS[(index if rank is None else rank) % len(_COLOURS)] if index >= 0 else "dim"
            self._out.print(Text(prefix, style=colour).append_text(Text.from_ansi(text)), soft_wrap=True)
        else:
            print(prefix + text, flush=True)

    def print_note(self, text: str) -> None:
        self._notes.print(show_control_characters(text), style="dim", soft_wrap=True, markup=False, emoji=False)

    def print_kept_failure(self, note: str, failure: dict[str, Any]) -> None:
        """Show what the status keeps of a failure, if there are no pods."""
        print(show_control_characters(note), file=sys.stderr)
        if failure.get("logTail") and self._out.is_terminal:
            from rich.text import Text

            self._out.print(Text.from_ansi(failure["logTail"]), soft_wrap=True)
        elif failure.get("logTail"):
            print(failure["logTail"], flush=True)


class Collector(Printer):
    """Passes lines to a function instead of printing them, and leaves notes out."""

    def __init__(self, options: LogOptions, put: Callable[[str], None]) -> None:
        self.options, self._put = options, put

    def print_line(self, source: LogSource, stamp: str, raw: bytes) -> None:
        rank, text = _split_rank(source.index, raw)
        self._put(_build_prefix(source.index, rank) + text)

    def print_note(self, text: str) -> None:
        pass

    def print_kept_failure(self, note: str, failure: dict[str, Any]) -> None:
        for line in str(failure.get("logTail") or "").splitlines():
            self._put(line)


def _split_rank(index: int, raw: bytes) -> tuple[int | None, str]:
    """Return the rank that a worker puts before what its ranks print, and the rest of the line."""
    text = raw.decode(errors="replace").rstrip("\r")
    match = _RANK.match(text) if index >= 0 else None
    return (int(match[1]), text[match.end() :]) if match else (None, text)


def _build_prefix(index: int, rank: int | None) -> str:
    name = f"worker{index}" if index >= 0 else "launcher"
    return f"[{name}] " if rank is None else f"[{name}.rank{rank}] "
