"""How long a worker lets its ranks save, when it is asked to end. tests/mpi has real workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from topkube.launch.contract import WorkerPlan
from topkube.launch.credentials import WorkerCredentials
from topkube.launch.messages import End
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


class Ranks:
    """An attempt that notes how long it may take to end."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    def stop(self, grace_seconds: float) -> None:
        self.graces.append(grace_seconds)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = Worker(PLAN, WorkerCredentials.__new__(WorkerCredentials), ["true"], Settings())
    made._attempt = Ranks()  # type: ignore[assignment]
    return made


def graces(worker: Worker) -> list[float]:
    assert isinstance(worker._attempt, Ranks)
    return worker._attempt.graces


def test_ranks_that_save_have_the_pods_own_time_though_the_launcher_is_gone(worker: Worker) -> None:
    async def asked_to_end() -> None:
        worker._terminate()
        worker._abandon("the launcher has been silent for 20 s")

    asyncio.run(asked_to_end())
    assert graces(worker) == [295]


def test_a_launcher_that_is_asked_to_end_too_does_not_shorten_it(worker: Worker) -> None:
    async def asked_to_end() -> None:
        worker._terminate()
        ending = asyncio.create_task(worker._end(End(grace_seconds=25.0)))
        await asyncio.sleep(0)
        ending.cancel()

    asyncio.run(asked_to_end())
    assert graces(worker) == [295]


def test_ranks_that_nobody_asked_to_end_save_quickly_when_the_launcher_is_gone(worker: Worker) -> None:
    worker._abandon("the launcher has been silent for 20 s")
    assert graces(worker) == [10]
