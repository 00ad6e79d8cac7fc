"""The time that the ranks of a worker have to save their state when the worker is asked to end. tests/mpi has real
workers."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from topkube.launch import worker as workers
from topkube.launch.connection.credentials import WorkerCredentials
from topkube.launch.connection.messages import End, ProxyParameters, Start, Welcome
from topkube.launch.contract import WorkerPlan
from topkube.launch.mpi.mpi_library import Mpi
from topkube.launch.worker import Worker
from topkube.settings import Settings

PLAN = WorkerPlan(
    name="j",
    namespace="n",
    uid="u",
    index=0,
    attempt=1,
    pod="j-worker-0-1",
    launcher="10.0.0.1:7077",
    grace_seconds=295,
)


class RecordingAttempt:
    """An attempt that records the grace period of each call of `stop`, in seconds."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    def stop(self, grace_seconds: float) -> None:
        self.graces.append(grace_seconds)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    credentials = WorkerCredentials(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "token")
    worker = Worker(PLAN, credentials, ["true"], Settings(), tmp_path)
    worker._attempt = RecordingAttempt()  # type: ignore[assignment]
    return worker


def read_graces(worker: Worker) -> list[float]:
    assert isinstance(worker._attempt, RecordingAttempt)
    return worker._attempt.graces


def test_ranks_that_save_have_the_grace_period_of_the_pod_although_the_launcher_is_gone(worker: Worker) -> None:
    async def ask_to_end() -> None:
        worker._terminate()
        worker._abandon("the launcher has been silent for 20 s")

    asyncio.run(ask_to_end())
    assert read_graces(worker) == [295]


def test_a_launcher_that_is_asked_to_end_too_does_not_shorten_the_time_to_save(worker: Worker) -> None:
    async def ask_to_end() -> None:
        worker._terminate()
        ending = asyncio.create_task(worker._end(End(grace_seconds=25.0)))
        await asyncio.sleep(0)
        ending.cancel()

    asyncio.run(ask_to_end())
    assert read_graces(worker) == [295]


def test_ranks_that_nobody_asked_to_end_save_quickly_when_the_launcher_is_gone(worker: Worker) -> None:
    worker._abandon("the launcher has been silent for 20 s")
    assert read_graces(worker) == [10]


def test_files_of_earlier_attempts_are_removed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and reports of hundreds of attempts would fill the pod's disk."""

    class Tunnel:
        async def listen(self) -> int:
            return 1

    class SilentLink:
        def send(self, message: object) -> None:
            raise AssertionError(message)

    for number in (1, 2, 7):
        (worker.directory / f"attempt-{number}").mkdir()
        (worker.directory / f"attempt-{number}" / "rank-0.log").write_text("x")
    (worker.directory / "kept").mkdir()
    started: list[Path] = []
    monkeypatch.setattr(workers, "Attempt", lambda start, directory, *_: started.append(directory))
    worker._attempt = None
    session = worker._session
    session.welcome = Welcome(run="r", attempt=7, resumed=False)
    session.tunnel, session.link = Tunnel(), SilentLink()  # type: ignore[assignment]
    worker._identity.mpi = Mpi("MPICH", "5.0.2", Path("/x/mpiexec"))
    asyncio.run(worker._start(Start(proxy=ProxyParameters(mpi="MPICH"), ranks=(0,))))
    assert started == [worker.directory / "attempt-7"]
    assert [path.name for path in worker.directory.iterdir()] == ["kept"]
