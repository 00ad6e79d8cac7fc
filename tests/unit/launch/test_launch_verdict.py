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
from topkube.launch.ending import describe
from topkube.launch.link import Link
from topkube.launch.messages import Hello, Look, Report
from topkube.launch.processes import descendants
from topkube.launch.rank import commands_among
from topkube.launch.verdict import CLOSED_SECONDS, Member, settled, unfit

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


@pytest.mark.parametrize(
    ("line", "kills", "told", "out_of_memory"),
    [
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 1, False, True),
        ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated", 1, False, True),
        ("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.", 1, False, True),
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 0, False, False),
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 1, True, False),
        ("ValueError: a bad batch", 1, False, False),
    ],
)
def test_a_data_loader_killed_for_memory_is_the_ranks_cause(
    members: list[Member], line: str, kills: int, told: bool, out_of_memory: bool
) -> None:
    """The rank itself ends with a traceback and exit code 1."""
    report = {"rank": 0, "host": "", "command": [], "started": 0.0, "ended": 1.0, "exit_code": 1, "tail": [line]}
    taken = members[0].take(Report(report={**report, "told_to_end": told}, oom_kills=kills))
    assert taken.out_of_memory == out_of_memory
    failure = describe(taken, lambda rank: "j-worker-0-1", 0)
    assert (failure.reason == "OOMKilled") == out_of_memory
    assert failure.exit_code == 1
    if out_of_memory:
        assert "the kernel killed a process of it for memory" in (failure.message or "")


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_pods_with_ipv6_addresses_alone_are_refused_with_words(members: list[Member], mpi: str) -> None:
    """Both mpiexecs cut such an address at its first colon."""
    hello = members[1].hello.model_copy(update={"ip": "fd00::2", "mpi": f"{mpi} 5.0.2"})
    member = Member(1, hello, Recorded())
    failure = unfit(PLAN.model_copy(update={"mpi": mpi}), member, member, f"{mpi} 5.0.2")
    assert failure is not None
    assert failure.reason == "WorkerUnfit"
    assert "use IPv4 or dual-stack pods" in (failure.message or "")


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
