"""When it is clear which rank failed first: as soon as everybody has told, and no later than needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topkube.launch.contract import ExpectedWorker, LaunchPlan
from topkube.launch.link import Link
from topkube.launch.messages import Hello, Look, Report
from topkube.launch.processes import descendants
from topkube.launch.rank import commands_among
from topkube.launch.verdict import CLOSED_SECONDS, Member, settled

PLAN = LaunchPlan(
    name="j",
    namespace="n",
    uid="u",
    attempt=1,
    workers=tuple(ExpectedWorker(index=index, attempt=1, pod=f"j-worker-{index}-1") for index in range(2)),
    slots=2,
    mpi="MPICH",
    address="10.0.0.1",
    port=7077,
)


class Recorded(Link):
    """A connected link that keeps what was sent."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda *_: None)
        self.connected, self.sent = True, list[object]()

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
def members() -> list[Member]:
    hello = Hello(session="s", received=0, ip="10.0.0.2", slots=2, python="python", mpi="MPICH 5.0.2", time=0.0)
    return [Member(index, hello, Recorded()) for index in range(2)]


def test_ranks_that_are_seen_to_live_are_not_waited_for(members: list[Member]) -> None:
    """They sit in a collective with the dead, and would never report."""
    now = time.monotonic()
    for member in (*members, *members):
        member.ask(PLAN.slots)
    assert [member.link.sent for member in members] == [[Look()], [Look()]]  # type: ignore[attr-defined]
    assert not settled(PLAN, members, now - 1.5, now)
    members[0].looked = True
    assert not settled(PLAN, members, now - 1.5, now), "the other may still have something to tell"
    members[1].looked = True
    assert settled(PLAN, members, now - 1.5, now)


def test_a_worker_that_has_reported_all_ranks_is_not_asked(members: list[Member]) -> None:
    now = time.monotonic()
    for rank in range(2):
        report = {"rank": rank, "host": "", "command": [], "started": 0.0, "ended": 1.0, "exit_code": 1}
        members[0].take(Report(report=report))
    members[0].ask(PLAN.slots)
    members[1].looked = True
    assert settled(PLAN, members, now - 1.5, now)
    assert members[0].link.sent == []  # type: ignore[attr-defined]


def test_the_time_a_closed_connection_had_to_come_back_counts(members: list[Member]) -> None:
    now = time.monotonic()
    members[0].looked = True
    members[1].link.connected, members[1].closed = False, now - CLOSED_SECONDS + 0.1
    assert not settled(PLAN, members, now, now), "it may come back"
    members[1].closed = now - CLOSED_SECONDS - 0.1
    assert settled(PLAN, members, now, now)


def test_a_shims_command_counts_as_living_until_it_has_ended(tmp_path: Path) -> None:
    def until(ranks: int) -> list[int]:
        end = time.monotonic() + 20
        while len(found := commands_among(descendants(shim.pid))) != ranks:
            assert time.monotonic() < end, found
            time.sleep(0.01)
        return found

    words = [sys.executable, "-m", "topkube.launch.rank", "--no-echo", "--", "sleep", "100"]
    outer = [sys.executable, "-c", f"import subprocess; subprocess.run({words!r})"]  # as MPI's proxy stands above it
    with subprocess.Popen(outer, env={**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path)}) as shim:
        (rank,) = until(1)
        assert Path(f"/proc/{rank}/comm").read_text() == "sleep\n"
        os.kill(rank, signal.SIGSTOP)
        assert commands_among(descendants(shim.pid)) == [rank], "one that hangs lives"
        os.kill(rank, signal.SIGKILL)
        until(0)
