"""The output of ranks through real workers is complete, whatever its size and however the ranks end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from pods import MARCHING, PYTHONS, SimulatedJob, wait_until

PYTHON = str(PYTHONS["MPICH"])

PRINTS = """
import os, subprocess, sys
line = "x" * 99 + chr(10)
if os.environ["PMI_RANK"] == "0":
    sys.stdout.write(line * 200_000)
    sys.stdout.flush()
    subprocess.run("echo again > /dev/stdout; echo twice | tee /dev/stderr", shell=True)
    print("the last line of", len(sys.argv), "words")
else:
    sys.stdout.buffer.write(bytes([255, 254]) + b" not text, without an end of line")
"""


def test_all_that_ranks_print_is_in_the_pods_log(tmp_path: Path) -> None:
    """Ranks print 20 MB, open their output again, and print bytes that are not text. Their command has 1.3 MB."""
    command = [PYTHON, "-c", PRINTS, *["y" * 120_000] * 11]
    with SimulatedJob(tmp_path, command, workers=1) as job:
        launcher = job.start()
        assert launcher.wait() == 0, job.read_all_output()
        worker = job.workers[0]
        assert worker.wait() == 0
        printed = worker.output_file.read_bytes().splitlines()
        assert printed.count(b"[rank 0] " + b"x" * 99) == 200_000
        assert printed.count(b"[rank 0] again") == 1
        assert printed.count(b"[rank 0] twice") == 2
        assert printed.count(b"[rank 0] the last line of 12 words") == 1
        assert printed.count(b"[rank 1] \xff\xfe not text, without an end of line") == 1
        assert worker.ending.lost_output_bytes == launcher.ending.lost_output_bytes == 0


def test_a_worker_whose_output_nobody_reads_is_not_lost(tmp_path: Path) -> None:
    """Heartbeats and training continue; the output waits for the reader."""
    flood = "import runpy, sys; print(('z' * 99 + '\\n') * 20_000, end='', flush=True)\n"
    flood += f"sys.argv = ['marching.py', '400', '0.02']; runpy.run_path({MARCHING!r}, run_name='__main__')"
    read_end, write_end = os.pipe()
    received = bytearray()
    with SimulatedJob(tmp_path, [PYTHON, "-c", flood], workers=2, slots=1, lost_seconds=6.0) as job:
        launcher = job.start_launcher()
        job.start_worker(0)
        job.start_worker(1, descriptor=write_end)
        os.close(write_end)
        wait_until(
            lambda: (answer := job.ask_status()) and answer.progress and answer.progress.step == 400, what="all steps"
        )
        assert job.workers[1].process.poll() is None, "it waits for its reader"
        reading = threading.Thread(target=lambda: drain(read_end, received), daemon=True)
        reading.start()
        assert launcher.wait() == 0, job.read_all_output()
        assert launcher.ending.lost_output_bytes == 0
        assert job.workers[1].wait() == 0
        reading.join(200)
    os.close(read_end)
    assert received.count(b"z" * 99) == 20_000
    assert b"done at step 400" in received


def drain(read_end: int, into: bytearray) -> None:
    while data := os.read(read_end, 1 << 16):
        into += data


def test_the_end_of_the_output_of_a_rank_that_is_ended_with_the_attempt_is_printed(tmp_path: Path) -> None:
    """The shim outlives the rank for a moment, so the rest of the output in the pipe is printed."""
    script = (
        "import itertools, os, signal, time; from mpi4py import MPI; world = MPI.COMM_WORLD\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "side = os.open('written', os.O_RDWR | os.O_CREAT)\n"
        "world.Barrier()\n"
        "while world.rank == 1:\n"
        "    if os.path.getsize('written'): time.sleep(0.5); os._exit(9)\n"
        "for number in itertools.count():\n"
        "    os.write(1, b'%09d\\n' % number); os.pwrite(side, b'%09d' % number, 0)"
    )
    with SimulatedJob(tmp_path, [PYTHON, "-c", script], workers=2, slots=1) as job:
        launcher = job.start()
        assert launcher.wait() == 9, job.read_all_output()
        failure = launcher.ending.first_failure
        assert failure is not None
        assert (failure.rank, failure.exit_code) == (1, 9)
        written = int((tmp_path / "written").read_text())
        wait_until(lambda: f"[rank 0] {written:09d}\n" in job.workers[0].output, what="the last line that was written")


def test_a_preempted_worker_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """The ranks of a preempted worker may save during its grace period, but not after its pod is killed."""
    script = (
        "import signal, time; from mpi4py import MPI\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('saving', flush=True))\n"
        "print('up', flush=True); [time.sleep(0.1) for _ in range(10**6)]"
    )
    with SimulatedJob(tmp_path, [PYTHON, "-c", script], workers=2, slots=1, grace_seconds=600.0) as job:
        launcher = job.start()
        lost_worker = job.workers[1]
        wait_until(lambda: "[rank 1] up" in lost_worker.output)
        lost_worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "[rank 1] saving" in lost_worker.output)
        lost_worker.kill()
        assert launcher.wait(200) == 143, job.read_all_output()  # the grace period is longer
        failure = launcher.ending.first_failure
        assert failure is not None
        assert (failure.reason, failure.pod) == ("Terminated", "j-worker-1-1")
