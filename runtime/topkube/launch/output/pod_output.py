"""The output of a pod: the lines of its process and of its ranks, written by a separate thread.

The reader of a pod's output may stop for minutes (a full disk on the node, a container runtime that restarts). Then
only this thread waits. The logs of the ranks are the buffer: the thread copies whole lines from them, and frees their
space on the disk. Memory is limited to a piece of a log and `_LINES_BYTES` of the process's own lines. Output that is
lost is counted in `lost_bytes` and reported in a line of the output.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from pathlib import Path

from topkube.launch.output.rank_report import TAIL_BYTES

_CHECK_SECONDS = 0.05
_PIECE_BYTES = 1 << 20
"""The most that is read from a log at a time. A longer line is broken."""
_WRITE_BYTES = 16 << 10
"""The most that is written at a time, so that progress is visible with a slow reader."""
_LINES_BYTES = 1 << 20
"""The most bytes of the process's own lines that wait for the reader."""
BACKLOG_BYTES = 1 << 30
"""The most bytes that wait for the reader in all logs. A log that exceeds its part loses its oldest lines."""
_LEAST_BACKLOG_BYTES = 64 << 20
"""The least part of a log."""
_RECORD_CHARACTERS = 2000
"""The longest warning of a library that is printed."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PUNCH_BYTES = 4 << 20
"""The disk space of copied output is freed in pieces of at least this size."""
_libc = ctypes.CDLL(None, use_errno=True)


class RankLog:
    """The log of a rank, copied line by line with the rank at the start of each line."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.lost_bytes = 0
        """Bytes that the rank printed and that are not in the output."""
        self.is_done = False
        """True if everything has been copied and the rank prints nothing more."""
        self._prefix = b"[rank %d] " % rank
        self._file: int | None = None
        self._position = self._punched = 0
        self._size_without_line = -1
        """The size of the file when it last contained no whole line."""
        self._finished = False
        self._expected: int | None = None

    @property
    def size(self) -> int:
        """The number of bytes that the rank has printed."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes that were printed and not copied yet."""
        return 0 if self.is_done else max(0, self.size - self._position)

    def finish(self, expected: int | None) -> None:
        """Note that the rank prints nothing more. The file should contain `expected` bytes (None: not
        known)."""
        self._expected, self._finished = expected, True

    def take(self, backlog: int) -> tuple[bytes, int]:
        """Return the next whole lines for the output, and the number of bytes of the log in them; empty if there are
        none now. A log that has more than `backlog` bytes left loses its oldest lines, and a line in the output
        reports the loss."""
        if self._file is None and not self._open():
            self.is_done = self._finished
            is_lost = self.is_done and self._expected
            return self._report_loss(self._expected or 0, "the log file does not exist") if is_lost else b"", 0
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size == self._size_without_line and not self._finished:
            return b"", 0
        note = b""
        if size < self._position:  # the file was truncated: the rest is gone
            note = self._report_loss(0, "the log file was truncated")
            self._position, self._punched = size, min(self._punched, size)
        if size - self._position > backlog:
            note += self._skip(size - backlog // 2)
        data = os.pread(self._file, _PIECE_BYTES, self._position)
        taken = data.rfind(b"\n") + 1
        ended = self._finished and self._position + len(data) >= size
        if ended or (not taken and len(data) >= _PIECE_BYTES):
            taken = len(data)
        if not taken and not note and not ended:
            self._size_without_line = size
            return b"", 0
        self._position += taken
        self._size_without_line = -1
        text = note + self._prefix_lines(data[:taken])
        if ended:
            text += self._end(size)
        self._free_copied_space()
        return text, taken

    def _open(self) -> bool:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return False
        self._file = file
        return True

    def _prefix_lines(self, data: bytes) -> bytes:
        if not data:
            return b""
        body = data.removesuffix(b"\n")
        return self._prefix + body.replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _skip(self, target: int) -> bytes:
        """Continue after the first line end after `target`."""
        assert self._file is not None
        data = os.pread(self._file, _PIECE_BYTES, target)
        target += data.find(b"\n") + 1
        skipped, self._position = target - self._position, target
        return self._report_loss(skipped, "the ranks print faster than the reader of this output reads")

    def _end(self, size: int) -> bytes:
        assert self._file is not None
        os.close(self._file)
        self._file, self.is_done = None, True
        missing = max(0, self._expected - size) if self._expected is not None else 0
        return self._report_loss(missing, "the log file was truncated") if missing else b""

    def _report_loss(self, count: int, why: str) -> bytes:
        self.lost_bytes += count
        size = f"{count} bytes" if count else "some bytes"
        return self._prefix + f"topkube: {size} of output are missing here: {why}\n".encode()

    def _free_copied_space(self) -> None:
        """Free the disk space of what has been copied, except the end, so that a long run does not fill the disk."""
        keep = max(0, self._position - TAIL_BYTES)
        if self._file is not None and keep - self._punched > _PUNCH_BYTES:
            offset, length = ctypes.c_longlong(self._punched), ctypes.c_longlong(keep - self._punched)
            _libc.fallocate(self._file, _PUNCH_HOLE, offset, length)
            self._punched = keep


class PodOutput:
    """An output on `descriptor`, written by a separate thread, which ends with `close` or with the process."""

    def __init__(self, descriptor: int = 1, name: str = "topkube") -> None:
        self._descriptor, self._name = descriptor, name
        self._lines: deque[bytes] = deque()
        self._lines_bytes = 0
        self._logs: list[RankLog] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._lost = 0
        self._unreported, self._why = 0, ""
        """Lost bytes that no line of the output has reported yet, and why they are lost."""
        self._progress_time = time.monotonic()
        self._writing = False
        self._bytes_in_write = 0
        """Bytes of a log that are being written now."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line of this process, without waiting. If too many lines wait already, the line is dropped and
        counted."""
        line = (f"{self._name}: {text}\n" if self._name else f"{text}\n").encode(errors="replace")
        with self._lock:
            if self._lines_bytes + len(line) > _LINES_BYTES:
                self._unreported, self._why = self._unreported + len(line), "nobody reads this output"
                return
            self._lines.append(line)
            self._lines_bytes += len(line)
        self._wake.set()

    def follow(self, path: Path, rank: int) -> RankLog:
        """Copy the rank's log from now on, until the log is finished and its end is reached."""
        log = RankLog(path, rank)
        with self._lock:
            self._logs.append(log)
        return log

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be written and no log is open."""
        with self._lock:
            return not (self._lines or self._logs or self._writing)

    @property
    def lost_bytes(self) -> int:
        """Bytes of the ranks' output that are lost."""
        return self._lost

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the ranks' output that wait to be printed."""
        with self._lock:
            return self._bytes_in_write + sum(log.waiting_bytes for log in self._logs)

    def count_stalled_seconds(self, since: float) -> float:
        """Return the seconds for which the reader has read nothing, counted from `since` (monotonic) at the
        earliest."""
        return time.monotonic() - max(self._progress_time, since)

    def close(self, stall_seconds: float, most_seconds: float) -> int:
        """Wait until everything is written, but not longer than `stall_seconds` without progress and `most_seconds` in
        total. Return the number of bytes of the ranks' output that were not printed."""
        start = time.monotonic()
        self._closing = True
        self._wake.set()
        while self._thread.is_alive() and time.monotonic() - start < most_seconds:
            self._thread.join(_CHECK_SECONDS)
            if self.count_stalled_seconds(start) > stall_seconds:
                break
        return self._lost + (self.waiting_bytes if self._thread.is_alive() else 0)

    # ---- the thread

    def _run(self) -> None:
        while True:
            closing = self._closing
            moved = self._write_lines()
            with self._lock:
                logs = list(self._logs)
            backlog = max(_LEAST_BACKLOG_BYTES, BACKLOG_BYTES // max(1, len(logs)))
            for log in logs:
                moved = self._copy(log, backlog) or moved
            if not moved:
                if closing:
                    return
                self._wake.wait(_CHECK_SECONDS)
                self._wake.clear()

    def _write_lines(self) -> bool:
        with self._lock:
            text = b"".join(self._lines)
            self._lines.clear()
            self._lines_bytes = 0
            self._writing = bool(text)
        if text:
            self._write(text, 0)
        self._writing = False
        return bool(text)

    def _copy(self, log: RankLog, backlog: int) -> bool:
        before = log.lost_bytes
        try:
            text, self._bytes_in_write = log.take(backlog)
        except OSError as error:
            text, log.lost_bytes = b"", log.lost_bytes + log.waiting_bytes
            self._unreported, self._why = self._unreported + log.waiting_bytes, error.strerror or str(error)
            log.is_done = True
        self._lost += log.lost_bytes - before
        if text:
            self._write(text, self._bytes_in_write)
        with self._lock:
            self._bytes_in_write = 0
            if log.is_done:
                self._logs.remove(log)
        return bool(text)

    def _write(self, text: bytes, used: int) -> None:
        """Write `text`, which contains `used` bytes of a rank. If the write fails, count them as lost."""
        try:
            if missing := self._unreported:
                note = f"topkube: {missing} bytes of output are missing here: {self._why}\n"
                self._write_all(note.encode())
                self._unreported -= missing
            self._write_all(text)
        except OSError as error:
            self._lost += used
            self._unreported, self._why = self._unreported + len(text), error.strerror or str(error)

    def _write_all(self, text: bytes) -> None:
        remaining = memoryview(text)
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining[:_WRITE_BYTES]) :]
            except BlockingIOError:  # another process that shares the descriptor has made it non-blocking
                select.select([], [self._descriptor], [], 1.0)
                continue
            self._progress_time = time.monotonic()


class OutputHandler(logging.Handler):
    """A logging handler that passes the warnings of libraries on to a PodOutput, so that they do not wait for its
    reader."""

    def __init__(self, output: PodOutput) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.say(self.format(record)[:_RECORD_CHARACTERS])
