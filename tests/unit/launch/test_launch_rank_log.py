"""The shim around a rank: everything that the command prints is in its log, whatever the command does with
its output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from topkube.launch.output import rank_log
from topkube.launch.output.rank_log import Echo, RankLogWriter
from topkube.launch.output.rank_report import RankReport, find_report_path, reserve_report
from topkube.launch.rank import write_command

SHIM = [sys.executable, "-m", "topkube.launch.rank", "--no-echo", "--"]
PATIENT = (
    "import sys; from topkube.launch import rank; "
    "rank._REST_SECONDS = rank._QUIET_SECONDS = 30.0; rank.main(sys.argv[1:])"
)
PATIENT_SHIM = [sys.executable, "-c", PATIENT, "--no-echo", "--"]
"""A shim for output that comes late on a busy machine: it waits for processes that a command left behind."""

PAGE = 4096
"""The bytes that a pipe of one page holds at most."""
PIPE_HOLDS = 30_000
"""The bytes that a pipe of 16 pages holds at least. A write that does not fit into the rest of a page begins a new
page."""


def run_rank(
    directory: Path, *command: str, most_bytes: int | None = None, shim: list[str] = SHIM
) -> tuple[int, bytes, RankReport]:
    """Run a rank under the shim. Return its exit code, its log and its report."""

    def limit_file_size() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(directory), "PMI_RANK": "0"}
    ended = subprocess.run([*shim, *command], env=environment, timeout=200, preexec_fn=limit_file_size, check=False)
    report = RankReport.read(directory / "rank-0.json")
    return ended.returncode, (directory / "rank-0.log").read_bytes(), report


def is_running(pid: Path) -> bool:
    """Return True if the process whose id is in a file runs. One that has ended may still be in the table."""
    try:
        return Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("echo one; echo two > /dev/stdout; echo three", b"one\ntwo\nthree\n"),
        ("echo one; echo two | tee /dev/stderr; echo three", b"one\ntwo\ntwo\nthree\n"),
        ("echo one; echo two > /dev/stderr; echo three >> /dev/stdout", b"one\ntwo\nthree\n"),
        ("printf '\\377\\376\\000 no text'", b"\xff\xfe\x00 no text"),
        ("exec > >(sleep 0.1; tee /dev/null); for i in $(seq 3); do echo $i; done", b"1\n2\n3\n"),
    ],
)
def test_a_script_may_open_its_output_again(tmp_path: Path, script: str, printed: bytes) -> None:
    code, log, report = run_rank(tmp_path, "bash", "-c", script, shim=PATIENT_SHIM)
    assert (code, log) == (0, printed)
    assert (report.log_bytes, report.lost_bytes) == (len(printed), 0)


def test_the_last_of_many_megabytes_is_in_the_log(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.write('x' * 20_000_000); sys.stdout.flush(); import os; os.kill(os.getpid(), 9)"
    code, log, report = run_rank(tmp_path, sys.executable, "-c", script)
    assert (code, len(log), report.log_bytes) == (137, 20_000_000, 20_000_000)


def test_a_rank_ends_although_a_process_that_it_left_behind_prints_for_ever(tmp_path: Path) -> None:
    """The process has its own session. It ends with the shim."""
    script = "echo start; setsid sh -c 'echo $$ > pid; while true; do echo more; done' & while [ ! -s pid ]; do :; done"
    code, log, report = run_rank(tmp_path, "sh", "-c", f"cd {tmp_path}; {script}; echo end")
    assert code == 0
    assert b"end\n" in log
    assert report.exit_code == 0
    assert not is_running(tmp_path / "pid")


def test_a_process_in_its_own_session_ends_with_its_rank(tmp_path: Path) -> None:
    """It has MPI's sockets, so MPI would wait for it."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 1000' & while [ ! -s {pid} ]; do sleep 0.01; done; exit 3"
    code, _, report = run_rank(tmp_path, "sh", "-c", script)
    assert (code, report.exit_code, report.told_to_end) == (3, 3, False)
    assert not is_running(pid)


def test_processes_that_end_before_their_rank_leave_no_zombies(tmp_path: Path) -> None:
    """The shim adopts them when their parents end."""
    script = (
        "import os, time\n"
        "keeper = os.getppid()\n"
        "if (pid := os.fork()) == 0: os.fork() or time.sleep(0.1); os._exit(0)\n"
        "os.waitpid(pid, 0); end = time.monotonic() + 100\n"
        "while len(open(f'/proc/{keeper}/task/{keeper}/children').read().split()) > 1:\n"
        "    assert time.monotonic() < end; time.sleep(0.01)\n"
    )
    code, output, _ = run_rank(tmp_path, sys.executable, "-c", script)
    assert (code, output) == (0, b"")


def test_a_rank_that_handles_signals_is_killed_after_the_grace_period_if_its_run_was_killed(tmp_path: Path) -> None:
    """`topkube run` kills ranks after their grace period. If it was killed itself, the shim does that."""
    script = "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up')\nwhile True: time.sleep(1)"
    with subprocess.Popen(["sleep", "1000"]) as run:
        write_command(tmp_path, [sys.executable, "-u", "-c", script], str(tmp_path), run.pid)
        shim = "from topkube.launch import rank; rank._GRACE_SECONDS = 0.5; rank.main(['--no-echo'])"
        environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path), "PMI_RANK": "0"}
        with subprocess.Popen([sys.executable, "-c", shim], env=environment) as front:
            log, end = tmp_path / "rank-0.log", time.monotonic() + 100
            while not (log.exists() and log.read_text()):
                assert time.monotonic() < end
                time.sleep(0.01)
            run.kill()
            assert front.wait(100) == 137
    assert log.read_text() == "up\nasked\n"
    assert RankReport.read(tmp_path / "rank-0.json").told_to_end


def test_a_full_disk_loses_output_with_its_size_and_ends_nothing(tmp_path: Path) -> None:
    code, log, report = run_rank(tmp_path, sys.executable, "-c", "print('x' * 2_999_999)", most_bytes=1_000_000)
    assert code == 0
    assert len(log) == 1_000_000
    assert (report.lost_bytes, report.log_bytes) == (2_000_000, 1_000_000)
    assert report.lost_why == "File too large"


def test_the_log_shows_where_output_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RankLogWriter(tmp_path, 0)
    log.write(b"one\n")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        log.write(b"two\n")
        log.write(b"three\n")
    log.write(b"four\n")
    text = (tmp_path / "rank-0.log").read_text()
    assert text == "one\n\ntopkube: 10 bytes of output are lost here: No space left on device\nfour\n"
    assert (log.lost_bytes, log.written_bytes) == (10, len(text))


def test_a_report_is_written_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written into space that was reserved. Without a report, a rank that ended well would count as
    killed."""
    reserve_report(tmp_path, 0)
    write = os.write

    def write_until_full(file: int, data: bytes) -> int:
        if os.lseek(file, 0, os.SEEK_CUR) + len(data) > os.fstat(file).st_size:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", write_until_full)
    report = RankReport(
        rank=0, host="h", command=["x"], started=1.0, ended=2.0, exit_code=1, tail=["y" * 60_000, "the end"]
    )
    report.write(tmp_path)
    stored = RankReport.read(find_report_path(tmp_path, 0))
    assert stored.exit_code == 1
    assert stored.tail[-1] == "the end"
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_an_output_that_nobody_reads_delays_a_rank_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "_PATIENCE_SECONDS", 0.5)
    read_end, write_end = os.pipe()
    echo = Echo(write_end, lambda: False)
    before = time.monotonic()
    for _ in range(100):
        echo.write(b"x" * 10_000)
    assert time.monotonic() - before < 45, "a hundred waits would take 50 s"
    held_by_pipe = os.read(read_end, 1 << 20)
    assert 32 << 10 < len(held_by_pipe) <= 64 << 10
    received = bytearray(held_by_pipe)
    reading = threading.Thread(target=lambda: _drain(read_end, received), daemon=True)
    reading.start()
    echo.write(b"y")
    os.close(write_end)
    reading.join(120)
    left_out = 1_000_000 - len(held_by_pipe)
    note = f"\ntopkube rank: {left_out} bytes of output are missing here; the rank's log contains them\ny".encode()
    assert received[len(held_by_pipe) :] == note
    os.close(read_end)


def _drain(read_end: int, received: bytearray) -> None:
    while data := os.read(read_end, 1 << 16):
        received += data


def test_a_signal_takes_effect_while_nobody_reads_the_output(tmp_path: Path) -> None:
    environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path), "PMI_RANK": "0"}
    script = "trap 'exit 4' TERM; while true; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"
    patient = "import sys; from topkube.launch import rank; from topkube.launch.output import rank_log; "
    patient += "rank_log._PATIENCE_SECONDS = 1000.0; rank.main(sys.argv[1:])"
    shim = [sys.executable, "-c", patient, "--", "sh", "-c", script]
    read_end, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, PAGE)
    os.write(full, bytes(PAGE))
    with subprocess.Popen(shim, env=environment, stdout=full, start_new_session=True) as running:
        try:
            end = time.monotonic() + 120
            while not (tmp_path / "rank-0.log").exists() or not (tmp_path / "rank-0.log").stat().st_size:
                assert time.monotonic() < end
                time.sleep(0.01)
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 4, "the shim waits 1000 s for a reader, but a signal ends this wait"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # else the script prints until the disk is full
    os.close(read_end)
    os.close(full)


def test_a_reader_that_is_slow_at_the_end_gets_all_output(tmp_path: Path) -> None:
    """The end of the command (SIGCHLD) does not end the wait for the reader."""
    environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path), "PMI_RANK": "0"}
    shim = [sys.executable, "-m", "topkube.launch.rank", "--", sys.executable, "-c", "print('x' * 199_999)"]
    with subprocess.Popen(shim, env=environment, stdout=subprocess.PIPE) as running:
        end = time.monotonic() + 120
        while not (tmp_path / "rank-0.log").exists() or (tmp_path / "rank-0.log").stat().st_size < PIPE_HOLDS:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.3)  # the reader is slow, and the command ends meanwhile
        assert running.stdout is not None
        assert len(running.stdout.read()) == 200_000
        assert running.wait(120) == 0
