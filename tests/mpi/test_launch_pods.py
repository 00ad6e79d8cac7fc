"""A job as pods start it: launcher and workers by rendezvous, real mpiexec, real ranks, and the faults that they
survive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from odd_scripts import LEAVES_A_DAEMON
from pods import MARCHING, PYTHONS, SimulatedJob, read_records, wait_until

from topkube.launch.contract import DOMAINS_HEADER

SHOW = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
total = world.allreduce(world.rank)
names = ("HOME", "TOPKUBE_ATTEMPT", "TOPKUBE_RANKS_PER_NODE", "TOPKUBE_EXPECTED_RANKS", "FROM_THE_POD",
         "MPIR_CVAR_CH4_CMA_ENABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(json.dumps({"rank": world.rank, "size": world.size, "node": node.size, "total": total, "cwd": os.getcwd(),
                  **{name: os.environ.get(name) for name in names}}))
"""


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_ranks_of_all_workers_form_one_world(tmp_path: Path, mpi: str) -> None:
    with SimulatedJob(tmp_path, [str(PYTHONS[mpi]), "-c", SHOW], workers=3, slots=2, mpi=mpi) as job:
        job.environment = {"FROM_THE_POD": "yes", "HOME": "/nowhere"}
        launcher = job.start()
        assert launcher.wait() == 0, job.read_all_output()
        assert launcher.ending.state == "Succeeded"
        for index, worker in job.workers.items():
            assert worker.wait() == 0, worker.output
            assert worker.ending.state == "Succeeded"
            shown = list(read_records(worker.output))
            assert sorted(record["rank"] for record in shown) == [2 * index, 2 * index + 1]
            for record in shown:
                assert (record["size"], record["node"], record["total"]) == (6, 2, 15)
                assert record["cwd"] == str(tmp_path)
                assert record["TOPKUBE_ATTEMPT"] == "1"
                assert record["TOPKUBE_RANKS_PER_NODE"] == "2,2,2"
                assert record["TOPKUBE_EXPECTED_RANKS"] == "6"
                torch = [record[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")]
                assert torch == [str(record["rank"]), str(record["rank"] % 2), "6", "29500"]
                assert record["MASTER_ADDR"] == job.choose_address(0), "the address of rank 0"
                assert record["FROM_THE_POD"] == "yes"
                assert record["MPIR_CVAR_CH4_CMA_ENABLE"] == "0", "a container's seccomp profile ends MPI_Init"
                assert Path(record["HOME"]).is_relative_to(tmp_path)
            assert f'[rank {2 * index}] {{"rank": {2 * index}' in worker.output


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_ranks_follow_the_racks_of_the_workers(tmp_path: Path, mpi: str) -> None:
    command = [str(PYTHONS[mpi]), "-c", SHOW]
    with SimulatedJob(tmp_path, command, workers=3, slots=1, mpi=mpi, domains_seconds=3600) as job:
        launcher = job.start()
        wait_until(lambda: (status := job.ask_status()) is not None and status.joined == 3)
        status = job.ask_status(**{DOMAINS_HEADER: "1,0,1"})
        assert status is not None
        assert launcher.wait() == 0, job.read_all_output()
        ranks = [
            [record["rank"] for record in read_records(worker.output)] for _, worker in sorted(job.workers.items())
        ]
        assert ranks == [[1], [0], [2]]


def build_training_command(mpi: str) -> list[str]:
    """Return the command of a training that does not reach its end during the test. Under Open MPI it makes steps
    without torch (marching.py), because only the start and the end of ranks differ there."""
    if mpi == "MPICH":
        return [str(PYTHONS[mpi]), "-m", "topkube.examples.digits_cnn", "--steps", "100000", "--batch-size", "4"]
    return [str(PYTHONS[mpi]), MARCHING, "1000000", "0.01"]


def build_checkpoint_settings(directory: Path) -> dict[str, str]:
    """Return the settings by which the operator configures checkpoints of ranks."""
    return {
        "TOPKUBE_CHECKPOINT_DIRECTORY": str(directory / "checkpoints"),
        "TOPKUBE_CHECKPOINT_EVERY": "10",
        "TOPKUBE_AGGREGATION": "hitopk",
    }


def read_saved_step(mpi: str, directory: Path) -> int:
    """Return the step of the newest checkpoint."""
    if mpi == "OpenMPI":
        return int((directory / "step").read_text())
    return max(int(path.name[5:13]) for path in directory.glob("step-*"))


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_each_death_costs_one_attempt_and_living_workers_continue_in_place(tmp_path: Path, mpi: str) -> None:
    with SimulatedJob(tmp_path, build_training_command(mpi), workers=2, slots=1, mpi=mpi, lost_seconds=10) as job:
        job.plan_options["environment"] = build_checkpoint_settings(tmp_path)
        (tmp_path / "checkpoints").mkdir()
        launcher = job.start()
        wait_until(lambda: job.read_step(15), what="15 steps")

        # A rank is killed: both workers continue.
        os.kill(job.list_ranks(1)[0], signal.SIGKILL)
        assert launcher.wait() == 137, job.read_all_output()
        failure = launcher.ending.first_failure
        assert failure is not None
        assert (failure.pod, failure.rank, failure.reason, failure.exit_code) == ("j-worker-1-1", 1, "SIGKILL", 137)
        worker = job.workers[1]
        reached_step = launcher.ending.progress.step
        launcher = job.start_launcher()
        resumed_step = wait_until(lambda: job.read_step(1), what="a step of attempt 2")
        assert resumed_step > (reached_step // 10 - 1) * 10, "training began anew"
        assert job.ask_status().attempt == 2

        # A worker's pod vanishes.
        wait_until(lambda: job.read_step(resumed_step + 5), what="5 more steps")
        worker.kill()
        assert launcher.wait() == 1, job.read_all_output()
        failure = launcher.ending.first_failure
        assert (failure.pod, failure.reason, failure.exit_code) == ("j-worker-1-1", "WorkerLost", None), failure
        launcher = job.start_launcher(replaced=(1,))
        job.start_worker(1)
        resumed_step = wait_until(lambda: job.read_step(1), what="a step of attempt 3")

        # The launcher vanishes: the ranks save their state and end, and both workers join the next one.
        wait_until(lambda: job.read_step(resumed_step + 5), what="5 more steps")
        stopped_at = job.ask_status().progress.step
        launcher.kill()
        launcher = job.start_launcher()
        resumed_step = wait_until(lambda: job.read_step(1), what="a step of attempt 4")
        assert resumed_step > stopped_at, "the ranks did not save their state when the launcher vanished"
        assert job.workers[0].output.count("joined attempt") == 4
        launcher.process.terminate()
        assert launcher.wait() == 143, job.read_all_output()
        assert read_saved_step(mpi, tmp_path / "checkpoints") >= resumed_step


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_a_process_in_its_own_session_does_not_keep_a_job_alive(tmp_path: Path, mpi: str) -> None:
    with SimulatedJob(tmp_path, [str(PYTHONS[mpi]), "-c", LEAVES_A_DAEMON], slots=1, mpi=mpi) as job:
        assert job.start().wait(60) == 0, job.read_all_output()
        for worker in job.workers.values():
            assert worker.wait() == 0
            assert "the end" in worker.output
