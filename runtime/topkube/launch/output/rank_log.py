"""The path of a rank's output: from the command's pipe to the rank's log and the output of the shim."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from topkube.launch.output.rank_report import find_log_path

_READ_BYTES = 64 << 10
_READS = 16
"""The most reads of a pipe before other pipes are read."""
_PIECE_BYTES = 4096
"""PIPE_BUF: a pipe that is ready accepts this many bytes without waiting."""
_CHECK_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
"""The time that a rank waits for the reader of the shim's output."""


class RankLogWriter:
    """A writer that appends to rank-N.log. A full disk does not end the rank: lost bytes are counted, and reported in
    the log as soon as there is space again. Raises OSError if the log cannot be opened."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.written_bytes = self.lost_bytes = 0
        self.lost_why = ""
        self._unreported = 0
        self._file = os.open(
            find_log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, data: bytes) -> None:
        """Append `data`. Never raises an error."""
        remaining = memoryview(data)
        try:
            if missing := self._unreported:
                self._append(
                    memoryview(f"\ntopkube: {missing} bytes of output are lost here: {self.lost_why}\n".encode())
                )
                self._unreported -= missing
            while remaining:
                remaining = remaining[self._append(remaining) :]
        except OSError as error:
            self.lost_why = error.strerror or str(error)
            self.lost_bytes += len(remaining)
            self._unreported += len(remaining)

    def _append(self, data: memoryview) -> int:
        written = os.write(self._file, data)
        self.written_bytes += written
        return written


class Echo:
    """A copy of the output on a descriptor of the shim. If its reader reads nothing for `_PATIENCE_SECONDS`, or if
    `is_asked_to_end` returns True, output is left out; the log contains it."""

    def __init__(self, descriptor: int, is_asked_to_end: Callable[[], bool]) -> None:
        self._descriptor, self._is_asked_to_end = descriptor, is_asked_to_end
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._left_out = 0
        self._reader_gone = False

    def write(self, data: bytes) -> None:
        """Write `data`, or leave it out. Never raises an error."""
        if self._left_out and self._wait_for_room(0.0):
            note = f"\ntopkube rank: {self._left_out} bytes of output are missing here; the rank's log contains them\n"
            self._left_out = 0
            self._write_pieces(note.encode(), 0.0)
        self._write_pieces(data, 0.0 if self._left_out else _PATIENCE_SECONDS)

    def _write_pieces(self, data: bytes, patience: float) -> None:
        remaining = memoryview(data)
        while remaining and not self._reader_gone and self._wait_for_room(patience):
            try:
                remaining = remaining[os.write(self._descriptor, remaining[:_PIECE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError:  # closed, or the disk is full
                self._reader_gone = True
        self._left_out += len(remaining)

    def _wait_for_room(self, patience: float) -> bool:
        end = time.monotonic() + patience
        while True:
            seconds_left = end - time.monotonic()
            if self._poll.poll(max(0.0, min(seconds_left, _CHECK_SECONDS)) * 1000):
                return True
            if seconds_left <= 0 or self._is_asked_to_end():
                return False


class OutputCopier:
    """A copier from a pipe of the command to the log and to `echo`."""

    def __init__(self, pipe: int, log: RankLogWriter, echo: Echo | None) -> None:
        self._pipe, self._log, self._echo = pipe, log, echo

    def copy_some(self) -> bool:
        """Copy what the pipe contains, up to a limit. Return False at the end of the pipe."""
        for _ in range(_READS):
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._write(data)
            if len(data) < _PIECE_BYTES:
                return True
        return True

    def copy_last(self) -> None:
        """Copy what the pipe contains now, but not what processes that escaped print later."""
        bytes_left = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
        while bytes_left > 0:
            try:
                data = os.read(self._pipe, min(bytes_left, _READ_BYTES))
            except BlockingIOError:
                return
            if not data:
                return
            bytes_left -= len(data)
            self._write(data)

    def _write(self, data: bytes) -> None:
        self._log.write(data)
        if self._echo is not None:
            self._echo.write(data)
