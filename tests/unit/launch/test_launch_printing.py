"""The output of ranks reaches the pod's output, however slowly a reader reads. A loss is reported with its size."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.launch.output import pod_output
from topkube.launch.output.pod_output import OutputHandler, PodOutput, RankLog


class Reader:
    """The other end of a pipe: reads nothing before `start`."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.data = bytearray()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self.read_end, 1 << 16):
            self.data += data

    def read_all(self) -> bytes:
        os.close(self.write_end)
        assert self._thread is not None
        self._thread.join(20)
        return bytes(self.data)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    os.close(reader.read_end)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.005)


def take_whole_log(log: RankLog, backlog: int = 1 << 40) -> bytes:
    """Return all bytes of a finished log."""
    text = b""
    while not log.is_done:
        text += log.take(backlog)[0]
    return text


@given(st.binary(max_size=300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=5))
@settings(max_examples=60)
def test_every_byte_of_a_log_is_copied_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, piece: int, cuts: list[int]
) -> None:
    """The log may grow in any way and hold any bytes and lines of any length. A line that is too long is broken."""
    path = tmp_path_factory.mktemp("log") / "rank-3.log"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pod_output, "_PIECE_BYTES", piece)
        log, text, written = RankLog(path, 3), b"", 0
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            with path.open("ab") as file:
                file.write(data[written:cut])
            written = cut
            text += log.take(1 << 40)[0]
        log.finish(len(data))
        text += take_whole_log(log)
    lines = re.findall(rb"\[rank 3\] [^\n]*\n", text)
    assert b"".join(lines) == text, "each line begins with the rank and ends with a newline"
    bare = b"".join(line.removeprefix(b"[rank 3] ") for line in lines)
    assert bare.replace(b"\n", b"") == data.replace(b"\n", b"")
    assert log.lost_bytes == 0
    if all(len(line) < piece for line in data.split(b"\n")):
        assert bare == (data if data.endswith(b"\n") or not data else data + b"\n"), "no line was broken"


def test_many_megabytes_before_the_end_arrive_with_the_last_line(tmp_path: Path, reader: Reader) -> None:
    text = b"".join(b"line %d %s\n" % (number, b"x" * 90) for number in range(200_000)) + b"the last, without its end"
    (tmp_path / "log").write_bytes(text)
    printing = PodOutput(reader.write_end)
    log = printing.follow(tmp_path / "log", 0)
    log.finish(len(text))
    reader.start()
    wait_until(lambda: printing.is_idle)
    assert printing.close(5, 5) == 0
    received = reader.read_all()
    assert received.count(b"\n") == 200_001
    assert received.replace(b"[rank 0] ", b"") == text + b"\n"


def test_a_reader_that_does_not_read_blocks_no_thread(tmp_path: Path, reader: Reader) -> None:
    """The lines of the process itself wait in bounded memory, those of the ranks on the disk."""
    (tmp_path / "log").write_bytes(b"x" * 99 + b"\n")
    with (tmp_path / "log").open("ab") as file:
        file.write((b"x" * 99 + b"\n") * 20_000)
    printing = PodOutput(reader.write_end)
    log = printing.follow(tmp_path / "log", 0)
    before = time.monotonic()
    for _ in range(50_000):
        printing.say("y" * 99)
    log.finish(2_000_100)
    assert time.monotonic() - before < 60
    assert printing._lines_bytes <= pod_output._LINES_BYTES
    assert not printing.is_idle
    wait_until(lambda: printing.count_stalled_seconds(0) > 0.2)
    reader.start()
    wait_until(lambda: printing.is_idle)
    assert printing.close(5, 5) == 0
    received = reader.read_all()
    assert received.count(b"[rank 0] ") == 20_001, "nothing of the rank is lost"
    left_out = re.findall(rb"topkube: (\d+) bytes of output are missing here: nobody reads this output", received)
    line = len("topkube: \n") + 99
    assert received.count(b"topkube: yyy") * line + sum(map(int, left_out)) == 50_000 * line


def test_output_that_nobody_reads_is_counted_at_the_end(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "log").write_bytes((b"x" * 99 + b"\n") * 20_000)
    printing = PodOutput(reader.write_end)
    printing.follow(tmp_path / "log", 0).finish(2_000_000)
    before = time.monotonic()
    lost = printing.close(stall_seconds=0.3, most_seconds=1000)
    assert time.monotonic() - before < 60
    assert 1_900_000 <= lost <= 2_000_000, "all but what the pipe holds"
    reader.start()
    printing._thread.join(20)  # the thread must not write into a descriptor that the next test gets
    reader.read_all()


def test_bytes_that_an_output_refuses_are_counted_and_reported(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "log").write_bytes(b"x" * 99 + b"\n")
    with open("/dev/full", "wb", buffering=0) as full_device:
        printing = PodOutput(full_device.fileno())
        printing.follow(tmp_path / "log", 0).finish(100)
        wait_until(lambda: printing.is_idle)
        assert printing.lost_bytes == 100
        os.dup2(reader.write_end, full_device.fileno())  # the disk has room again
        printing.say("after")
        wait_until(lambda: printing.is_idle)
        assert printing.close(5, 5) == 100
    reader.start()
    assert (
        reader.read_all() == b"topkube: 109 bytes of output are missing here: No space left on device\ntopkube: after\n"
    )


def test_a_log_that_grows_faster_than_it_is_read_loses_its_oldest_lines_and_reports_how_many(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(10_000)))
    log = RankLog(path, 1)
    log.finish(70_000)
    text = take_whole_log(log, backlog=7_000)
    first, *rest = text.splitlines()
    (left_out,) = re.findall(rb"(\d+) bytes of output are missing here: the ranks print faster", first)
    kept = [int(line.removeprefix(b"[rank 1] ")) for line in rest]
    assert kept == list(range(kept[0], 10_000)), "the last lines, each of them whole"
    assert int(left_out) == 7 * kept[0] == log.lost_bytes
    assert 66_000 <= log.lost_bytes <= 67_000


def test_bytes_of_a_log_that_was_truncated_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    log = RankLog(path, 0)
    assert log.take(1 << 20)[0] == b"[rank 0] one\n[rank 0] two\n"
    path.write_bytes(b"x\n")
    log.take(1 << 20)
    with path.open("ab") as file:
        file.write(b"three\n")
    log.finish(14)
    text = take_whole_log(log)
    assert b"[rank 0] three\n" in text
    assert b"6 bytes of output are missing here: the log file was truncated" in text, (
        "14 bytes were written, 8 bytes are there"
    )
    assert log.lost_bytes == 6


def test_copied_output_frees_its_disk_space(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "log"
    path.write_bytes((b"x" * 99 + b"\n") * 100_000)
    blocks_before = path.stat().st_blocks
    reader.start()
    printing = PodOutput(reader.write_end)
    log = printing.follow(path, 0)
    wait_until(lambda: log.waiting_bytes == 0)
    if not blocks_before:
        pytest.skip("this file system counts no blocks")
    wait_until(lambda: path.stat().st_blocks < blocks_before // 2)
    assert path.stat().st_size == 10_000_000
    with path.open("rb") as file:
        file.seek(-100, 2)
        assert file.read() == b"x" * 99 + b"\n", "the end stays, for the report"
    log.finish(10_000_000)
    assert printing.close(5, 5) == 0
    reader.read_all()


def test_warnings_of_libraries_go_to_the_pods_output_too(reader: Reader) -> None:
    """aiohttp logs every bad request. If these messages went to stderr, the launcher would wait for the reader of
    stderr."""
    printing = PodOutput(reader.write_end, "topkube launch")
    logger = logging.getLogger("topkube.test")
    handler = OutputHandler(printing)
    logger.addHandler(handler)
    logger.info("nothing")
    logger.warning("a bad %s", "request")
    logger.removeHandler(handler)
    reader.start()
    wait_until(lambda: printing.is_idle)
    assert printing.close(5, 5) == 0
    assert reader.read_all() == b"topkube launch: a bad request\n"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """A rank may put any file in place of its log. If a pipe were opened, all output would stop."""
    path = tmp_path / "log"
    if kind == "link":
        (tmp_path / "other").write_text("another's words\n")
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    log = RankLog(path, 0)
    assert log.take(1 << 20) == (b"", 0)
    log.finish(7)
    assert b"7 bytes of output are missing here: the log file does not exist" in take_whole_log(log)
