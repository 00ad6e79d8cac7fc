"""The failures that end an attempt, and the launcher's report: it names the first cause, not its consequences."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from odd_scripts import LEAVES_WITH_0
from pods import MARCHING, PYTHONS, SimulatedJob, wait_until

from topkube.job import FirstFailure


def build_marching_command(mpi: str, steps: int, seconds: float, *faults: str) -> list[str]:
    return [str(PYTHONS[mpi]), MARCHING, str(steps), str(seconds), *faults]


def wait_for_failure(job: SimulatedJob, seconds: float = 90) -> FirstFailure:
    """Wait until the launcher ends the attempt. Return its first failure."""
    assert job.launcher is not None
    assert job.launcher.wait(seconds) != 0, job.read_all_output()
    failure = job.launcher.ending.first_failure
    assert failure is not None, job.read_all_output()
    assert job.launcher.ending.exit_code == job.launcher.process.returncode
    return failure


def wait_for_step(job: SimulatedJob, least: int) -> int:
    """Wait until the job has reached step `least`. Return the current step."""
    try:
        return wait_until(lambda: job.read_step(least), what=f"step {least}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.read_all_output()}") from None


@pytest.mark.parametrize(
    ("mpi", "fault", "reason", "code", "message"),
    [
        ("MPICH", "3:3:raise=a bad batch", "Error", 1, "ValueError: a bad batch"),
        ("MPICH", "1:3:crash", "SIGSEGV", 139, "Segmentation fault"),
        ("OpenMPI", "2:3:exit=7", "Error", 7, "about to leave"),
    ],
)
def test_the_first_failing_rank_is_named(
    tmp_path: Path, mpi: str, fault: str, reason: str, code: int, message: str
) -> None:
    with SimulatedJob(tmp_path, build_marching_command(mpi, 1000, 0.01, fault), mpi=mpi) as job:
        job.start()
        failure = wait_for_failure(job)
        rank = int(fault[0])
        assert (failure.rank, failure.pod, failure.reason) == (rank, f"j-worker-{rank // 2}-1", reason), (
            job.read_all_output()
        )
        assert failure.exit_code == code
        assert message in (failure.log_tail or "")
        # A worker that is asked to end ends with the worst exit code of its own ranks.
        worker = job.workers[rank // 2]
        wait_until(lambda: "cannot be reached" in worker.output, what="the worker calls again")
        worker.process.terminate()
        assert worker.wait() >= code
        assert worker.ending.first_failure is not None
        assert worker.ending.first_failure.rank == rank


def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["no-such-program", "--flag"]) as job:
        job.start()
        failure = wait_for_failure(job)
        assert (failure.reason, failure.exit_code) == ("CommandNotFound", 127)
        assert "the program 'no-such-program' does not exist" in (failure.message or "")


def test_missing_workers_are_named(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"], workers=3, rendezvous_seconds=8) as job:
        job.start_launcher()
        job.start_worker(1)
        status = wait_until(lambda: (answer := job.ask_status()) and answer.joined == 1 and answer)
        assert (status.state, status.missing) == ("Waiting", (0, 2))
        failure = wait_for_failure(job)
        assert failure.reason == "RendezvousTimeout"
        assert "2 of 3 workers" in (failure.message or "")
        assert "j-worker-0-1, j-worker-2-1" in (failure.message or "")


def test_a_stalled_step_ends_the_attempt(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, build_marching_command("MPICH", 100, 0.01, "2:7:hang"), stall_seconds=5.0) as job:
        job.start()
        failure = wait_for_failure(job)
        assert failure.reason == "Stalled"
        assert "the last was step 7" in (failure.message or "")
        wait_until(lambda: not job.list_ranks(1), what="the stopped rank is killed")


def test_a_hung_collective_names_its_ranks(tmp_path: Path) -> None:
    script = (
        "import os, signal, numpy, topkube; topkube.init(); world = topkube.world.current()\n"
        "assert world.deadline_seconds == 60; world.agree(True)\n"
        "world.deadline_seconds = 2\n"  # ranks may start more than two seconds apart
        "topkube.rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP); topkube.allreduce_(numpy.ones(8, 'f'))"
    )
    with SimulatedJob(tmp_path, [str(PYTHONS["MPICH"]), "-c", script], slots=1) as job:
        job.environment = {"TOPKUBE_DEADLINE_SECONDS": "60"}
        job.start()
        failure = wait_for_failure(job)
        assert (failure.reason, failure.rank, failure.pod) == ("CollectiveTimeout", 1, "j-worker-1-1")
        assert "rank 1 never arrived" in (failure.message or "")


def test_a_hang_in_a_script_that_reports_no_steps_ends_the_attempt_and_names_the_rank(tmp_path: Path) -> None:
    script = (
        "import os, signal, numpy, topkube; topkube.init(); x = numpy.ones(8, 'f')\n"
        "for step in range(10**6):\n"
        "    if step == 40 and topkube.rank() == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    topkube.allreduce_(x)"
    )
    with SimulatedJob(tmp_path, [str(PYTHONS["MPICH"]), "-c", script], startup_seconds=30.0) as job:
        job.start()
        failure = wait_for_failure(job)
        assert (failure.reason, failure.rank, failure.pod) == ("Stalled", 2, "j-worker-1-1")
        assert "waited for: rank 2" in (failure.message or "")


def test_a_worker_asked_to_end_saves_first_and_is_named(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, build_marching_command("MPICH", 10000, 0.02), slots=1) as job:
        job.plan_options["environment"] = {"TOPKUBE_CHECKPOINT_DIRECTORY": str(tmp_path)}
        job.start()
        wait_for_step(job, 3)
        job.workers[1].process.terminate()
        assert job.workers[1].wait() == 143, job.read_all_output()
        failure = wait_for_failure(job)
        assert (failure.reason, failure.pod) == ("Terminated", "j-worker-1-1")
        saved = int((tmp_path / "step").read_text())
        assert job.workers[0].process.poll() is None
        assert saved == job.launcher.ending.progress.step


def test_a_launcher_asked_to_end_lets_the_ranks_save(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, build_marching_command("MPICH", 10000, 0.02), slots=1) as job:
        job.plan_options["environment"] = {"TOPKUBE_CHECKPOINT_DIRECTORY": str(tmp_path)}
        launcher = job.start()
        wait_for_step(job, 3)
        launcher.process.terminate()
        assert launcher.wait() == 143
        assert launcher.ending.first_failure.reason == "Terminated"
        assert int((tmp_path / "step").read_text()) == launcher.ending.progress.step


def test_a_job_that_is_deleted_ends_at_once_with_its_state_saved(tmp_path: Path) -> None:
    """All its pods are asked to end at the same time."""
    with SimulatedJob(tmp_path, build_marching_command("MPICH", 10000, 0.02), slots=1) as job:
        job.plan_options["environment"] = {"TOPKUBE_CHECKPOINT_DIRECTORY": str(tmp_path)}
        launcher = job.start()
        wait_for_step(job, 3)
        pods = [launcher, *job.workers.values()]
        for pod in pods:
            pod.process.terminate()
        assert [pod.wait() for pod in pods] == [143, 143, 143], job.read_all_output()
        assert int((tmp_path / "step").read_text()) == launcher.ending.progress.step


class TcpProxy:
    """A TCP proxy in front of the launcher. It can reset its connections, or pass nothing on without an error."""

    def __init__(self, target: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        self.silent = threading.Event()
        self.down = False
        self.connections, self.answers = 0, 0
        """The connections that were made, and the pieces of data that the launcher has sent through them."""
        self._target = target
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                if self.down:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the launcher does not listen yet: the worker calls again
                    near.close()
                    continue
                self.connections += 1
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target, source is far), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.answers += is_answer
                while self.silent.is_set():
                    time.sleep(0.01)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self.server.close()
        self.silent.clear()
        self.reset()


def test_a_job_survives_short_interruptions_of_the_network(tmp_path: Path) -> None:
    with SimulatedJob(
        tmp_path, build_marching_command("MPICH", 400, 0.02), slots=1, lost_seconds=30, check_address=False
    ) as job:
        network = TcpProxy(job.port)
        launcher = job.start_launcher()
        job.start_worker(0)
        launcher_port, job.port = job.port, network.port
        job.start_worker(1)  # it calls the launcher through the proxy
        job.port = launcher_port
        wait_for_step(job, 5)
        answers = network.answers
        network.reset()
        wait_until(lambda: network.connections > 1 and network.answers > answers, what="the worker connects again")
        wait_for_step(job, job.read_step(0) + 20)  # the handshake has ended
        network.silent.set()
        time.sleep(5)  # nothing passes, but for less than `lost_seconds`
        network.silent.clear()
        assert launcher.wait() == 0, job.read_all_output()
        assert network.connections == 2, "the silence ended the connection"
        assert [worker.wait() for worker in job.workers.values()] == [0, 0]
        network.close()


def test_a_worker_cut_off_for_good_is_named(tmp_path: Path) -> None:
    with SimulatedJob(
        tmp_path, build_marching_command("MPICH", 100000, 0.02), slots=1, lost_seconds=8, check_address=False
    ) as job:
        network = TcpProxy(job.port)
        job.start_launcher()
        job.start_worker(0)
        launcher_port, job.port = job.port, network.port
        job.start_worker(1)  # it calls the launcher through the proxy
        job.port = launcher_port
        wait_for_step(job, 5)
        network.silent.set()
        network.down = True
        failure = wait_for_failure(job)
        assert (failure.reason, failure.pod) == ("WorkerLost", "j-worker-1-1")
        assert "it has been silent for" in (failure.message or "")
        wait_until(lambda: not job.list_ranks(1), what="the worker that is cut off ends its ranks by itself")
        network.close()


def test_a_worker_without_its_mpi_is_unfit(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"], slots=1) as job:
        job.start_launcher()
        job.start_worker(0)
        job.mpi = "OpenMPI"  # of another image
        job.start_worker(1)
        failure = wait_for_failure(job)
        assert (failure.reason, failure.pod) == ("WorkerUnfit", "j-worker-1-1")
        assert "OpenMPI 5" in (failure.message or "")


def test_a_launcher_without_the_mpi_of_the_plan_reports_it(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"]) as job:
        launcher = job.start_launcher(mpi="OpenMPI")
        assert launcher.wait() == 127
        failure = launcher.ending.first_failure
        assert failure is not None
        assert "the job asks for OpenMPI, and the launcher's image has MPICH" in (failure.message or "")


def test_shared_memory_of_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    leak = (
        "import os, signal, sys; from mpi4py import MPI\n"
        "open('/dev/shm/' + sys.argv[1] + '_' + os.environ['TOPKUBE_ATTEMPT'], 'wb').write(b'x' * 4096)\n"
        "if os.environ['TOPKUBE_ATTEMPT'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "print(sorted(name for name in os.listdir('/dev/shm') if name.startswith(sys.argv[1])))\n"
    )
    name = f"mpich_shm_test{os.getpid()}"
    with SimulatedJob(tmp_path, [str(PYTHONS["MPICH"]), "-c", leak, name], slots=1, workers=1) as job:
        job.start()
        assert wait_for_failure(job).reason == "SIGKILL"
        launcher = job.start_launcher()
        try:
            assert launcher.wait() == 0, job.read_all_output()
            # Another worker of this user on this machine may remove the segment first.
            assert f"['{name}_2']" in job.workers[0].output
        finally:
            for segment in Path("/dev/shm").glob(f"{name}*"):
                segment.unlink()


def test_a_killed_worker_is_named_and_not_the_ranks_that_fail_because_of_it(tmp_path: Path) -> None:
    """A worker's process is killed, and its shims end with it. The other worker's ranks fail as a consequence."""
    with SimulatedJob(tmp_path, build_marching_command("MPICH", 100000, 0.005)) as job:
        job.start()
        wait_for_step(job, 3)
        os.kill(job.workers[1].process.pid, signal.SIGKILL)
        failure = wait_for_failure(job)
        assert (failure.reason, failure.pod) == ("WorkerLost", "j-worker-1-1"), job.read_all_output()


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_a_rank_that_leaves_with_0_is_named(tmp_path: Path, mpi: str) -> None:
    """Open MPI ends the others. With MPICH they wait, because its proxy takes an end with 0 as it is."""
    with SimulatedJob(
        tmp_path, [str(PYTHONS[mpi]), "-c", LEAVES_WITH_0], workers=3, slots=1, mpi=mpi, startup_seconds=15.0
    ) as job:
        job.start()
        failure = wait_for_failure(job)
        if mpi == "MPICH":
            assert failure.reason == "Stalled"
            assert "rank 1 (j-worker-1-1) has ended with exit code 0, and 2 other ranks" in (failure.message or "")
        else:
            assert (failure.rank, failure.pod, failure.reason) == (1, "j-worker-1-1", "Error"), failure
            assert "ended with exit code 0" in (failure.message or "")
