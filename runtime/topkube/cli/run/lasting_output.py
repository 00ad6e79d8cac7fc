"""The output of a run that goes on if the disk of its output is full, or if its terminal has gone."""

from __future__ import annotations

import io
import os
from typing import TextIO


class LastingOutput(io.TextIOBase):
    """A stream to which a write does not fail if the stream takes no data: a full disk (`topkube run … > out.log`) or a
    terminal that has gone must not end hours of training. A closed pipe is an error as before: nobody reads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.problem = ""
        """Why output was lost; empty if none was."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write `text`, or note why it is lost."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = error.strerror or str(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = error.strerror or str(error)

    def give_up(self) -> None:
        """Try to write what is left. If it is still refused, drop it."""
        try:
            self._stream.flush()
        except OSError:
            drop_rest(self._stream)


def drop_rest(stream: TextIO) -> None:
    """Drop what `stream` still holds: Python would try to write it at its exit, and change the exit code."""
    target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, stream.fileno())
    os.close(target)
