"""`topkube run` with many arguments, with more arguments than Linux accepts, with a full disk, and with ranks that MPI
has ended."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest
from local_runs import build_command, run_job, write_job

from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch.local import LocalRun
from topkube.launch.mpi.mpi_library import find_mpi
from topkube.launch.output.rank_report import RankReport, reserve_report


def test_ranks_get_many_and_long_arguments_as_they_are(tmp_path: Path) -> None:
    words = [*["y" * 100_000] * 2, *map(str, range(1500)), "", "$HOME", "a b", "ü"]
    script = "import sys; print(len(sys.argv), sum(map(len, sys.argv)), sys.argv[-4:])"
    ended = run_job(write_job(tmp_path, ["python", "-c", script, *words], workers=1), tmp_path)
    assert ended.returncode == 0, ended.stderr
    total = sum(map(len, words)) + 2
    for rank in range(2):
        log = (tmp_path / f"run/rank-{rank}.log").read_text()
        assert log == f"1507 {total} ['', '$HOME', 'a b', 'ü']\n"


def test_arguments_that_linux_refuses_are_refused_before_the_start(tmp_path: Path) -> None:
    container = {"name": "worker", "image": "none", "command": ["python"], "args": ["y" * 100_000] * 80}
    job = TrainingJob.parse(
        {
            "apiVersion": "topkube.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "tiny"},
            "spec": {"workers": 1, "template": {"spec": {"containers": [container]}}},
        }
    )
    with pytest.raises(
        LaunchError, match=r"81 arguments with 80\d+ bytes.*Linux takes .* Next: write the list to a file"
    ):
        LocalRun(job, find_mpi(), tmp_path, dict(os.environ))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("left_at", "message"),
    [
        (5.0, "rank 1 (node 1) ended with exit code 0, 5.0 s after its start, while 2 other ranks still ran"),
        (1.0, "MPI ended rank 0 (node 0), and no rank reports why"),
    ],
)
def test_a_run_whose_ranks_mpi_has_ended_is_no_success_if_mpiexec_ends_with_0(
    tmp_path: Path, left_at: float, message: str
) -> None:
    job = TrainingJob.from_yaml(write_job(tmp_path, ["python"], workers=3, slotsPerWorker=1))
    run = LocalRun(job, find_mpi(), tmp_path, dict(os.environ))
    with subprocess.Popen(["true"]) as run._mpiexec:
        pass
    assert run.mpiexec_code == 0
    for rank, (ended, code) in enumerate([(5.02, 143), (left_at, 0), (5.03, 143)]):
        report = RankReport(rank, "host", ["python"], 0.0, ended, code, told_to_end=code != 0)
        reserve_report(tmp_path, rank)
        report.write(tmp_path)
    failure = run.find_failure()
    assert failure is not None
    assert str(failure).startswith(message)
    assert failure.exit_code != 0


def test_shared_memory_of_killed_ranks_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, re, signal, numpy, topkube\n"
        "topkube.init()\n"
        "topkube.allreduce_(numpy.ones(9, 'f'), algorithm='dense')\n"
        "print(*set(re.findall('/dev/shm/[^ \\\\n]+', open('/proc/self/maps').read())), flush=True)\n"
        "topkube.barrier()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = run_job(write_job(tmp_path, ["python", "-c", script], workers=1), tmp_path)
    assert ended.returncode != 0
    segments = {word for rank in range(2) for word in (tmp_path / f"run/rank-{rank}.log").read_text().split()}
    assert segments, "the ranks share no memory"
    assert not [segment for segment in segments if Path(segment).exists()]


def test_output_that_a_full_disk_refuses_is_reported(tmp_path: Path) -> None:
    """A limit on the size of files has the same effect as a full disk."""
    job = write_job(tmp_path, ["python", "-c", "print('x' * 2_999_999)"], workers=1)

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    ended = subprocess.run(
        build_command(job, tmp_path),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=limit_file_size,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"2000000 bytes of rank {rank}'s output are lost: File too large" in ended.stdout + ended.stderr
