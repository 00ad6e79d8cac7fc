"""`topkube run` with each MPI, in the environments and situations of real machines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from local_runs import list_living_processes
from odd_scripts import LEAVES_A_DAEMON, LEAVES_WITH_0
from pods import PYTHONS, wait_until

from topkube.launch.host.processes import list_descendants
from topkube.launch.mpi.mpiexec import find_listening_addresses

SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOBID": "5",
    "SLURM_NODELIST": "n1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
}
"""The variables of a script that `sbatch --ntasks=1` has started."""
PBS = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1", "PBS_NODEFILE": "/no/such/file"}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"}
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI41": "x;tcp4://127.0.0.1:9"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_UNIVERSE_SIZE": "1"}


def build_command(directory: Path, mpi: str, script: str, ranks: int = 2) -> list[str]:
    """Write `script`. Return the command of `topkube run` for it, with the run directory inside `directory`."""
    path = directory / "train.py"
    path.write_text(script)
    command = [str(PYTHONS[mpi]), "-m", "topkube.cli", "run", "--workers", str(ranks), "--no-plot"]
    return [*command, "--run-directory", str(directory / "run"), str(path)]


def run_script(
    directory: Path, mpi: str, script: str, *, ranks: int = 2, seconds: float = 200, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `ranks` ranks under `topkube run` of an MPI, with `variables` in the environment, for at most
    `seconds`."""
    return subprocess.run(
        build_command(directory, mpi, script, ranks),
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, **variables},
        timeout=seconds,
        check=False,
    )


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
@pytest.mark.parametrize(
    "variables", [PMI, PMIX, OPEN_MPI, SLURM | PMI, PBS], ids=["PMI", "PMIx", "Open MPI", "Slurm", "PBS"]
)
def test_ranks_do_not_take_the_place_of_the_shell_that_started_them(
    tmp_path: Path, mpi: str, variables: dict[str, str]
) -> None:
    script = (
        "from os import environ; from mpi4py.MPI import COMM_WORLD as world\n"
        "print(world.rank, world.size, environ['RANK'], environ.get('SLURM_JOB_ID'), 'SLURM_PROCID' in environ)"
    )
    ended = run_script(tmp_path, mpi, script, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        job = variables.get("SLURM_JOB_ID")
        assert (tmp_path / f"run/rank-{rank}.log").read_text() == f"{rank} 2 {rank} {job} False\n"
        assert (tmp_path / f"run/rank-{rank}.json").exists()


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_a_process_in_its_own_session_does_not_keep_a_run_alive(tmp_path: Path, mpi: str) -> None:
    ended = run_script(tmp_path, mpi, LEAVES_A_DAEMON, seconds=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("the end") == 2
    assert list_living_processes(tmp_path) == []


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_ranks_that_handle_signals_end_after_topkube_run_was_killed(tmp_path: Path, mpi: str) -> None:
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)"
    )

    def read_logs() -> list[str]:
        return [path.read_text() for path in (tmp_path / "run").glob("rank-*.log")]

    with subprocess.Popen(build_command(tmp_path, mpi, script), cwd=tmp_path, stdout=subprocess.DEVNULL) as running:
        wait_until(lambda: read_logs() == ["up\n"] * 2)
        running.kill()
    wait_until(lambda: list_living_processes(tmp_path) == [], 60)
    assert read_logs() == ["up\nasked\n"] * 2, "the ranks were asked once, and had time to save"


@pytest.mark.parametrize("preloaded", ["", "libm.so.6"])
@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_mpiexec_listens_on_loopback_and_the_script_does_not_notice(tmp_path: Path, mpi: str, preloaded: str) -> None:
    """The ports of mpiexec have no authentication. A script may listen where it wants."""
    script = (
        "import os, socket, time; from mpi4py.MPI import COMM_WORLD as world\n"
        "listener = socket.create_server(('', 0))\n"
        "print(world.size, repr(os.environ.get('LD_PRELOAD', '')), listener.getsockname()[0], flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)"
    )
    environment = {**os.environ, **({"LD_PRELOAD": preloaded} if preloaded else {})}
    with subprocess.Popen(
        build_command(tmp_path, mpi, script), cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    ) as running:
        logs = [tmp_path / f"run/rank-{rank}.log" for rank in range(2)]
        try:
            wait_until(lambda: all(log.exists() and log.read_text() for log in logs))
            pids = [pid for pid in list_descendants(running.pid) if b"train.py" not in read_command_line(pid)]
            addresses = find_listening_addresses(pids)
        finally:
            (tmp_path / "go").touch()
        assert addresses, "mpiexec waits for its proxies and ranks"
        assert all(address.startswith(("127.0.0.1:", "[::1]:")) for address in addresses), addresses
    assert running.returncode == 0
    assert [log.read_text() for log in logs] == [f"2 {preloaded!r} 0.0.0.0\n"] * 2


def read_command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_a_rank_that_leaves_with_0_is_named(tmp_path: Path, mpi: str) -> None:
    ended = run_script(tmp_path, mpi, LEAVES_WITH_0, ranks=3)
    assert ended.returncode == 1, ended.stderr
    assert "rank 1 (node 1) ended with exit code 0" in ended.stderr
    assert "while 2 other ranks still ran" in ended.stderr
    assert "without MPI_Finalize" in ended.stderr
