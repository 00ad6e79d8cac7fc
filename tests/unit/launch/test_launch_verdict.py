"""The time at which the launcher decides which rank failed first, and the failure that it reports."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topkube.launch.connection.link import Link
from topkube.launch.connection.messages import CheckRanks, Hello, Report
from topkube.launch.contract import ExpectedWorker, LaunchPlan
from topkube.launch.host.processes import list_descendants
from topkube.launch.members import CLOSED_SECONDS, Member
from topkube.launch.output.rank_report import RankReport, select_first_failure
from topkube.launch.rank import find_commands
from topkube.launch.termination_message import describe_failure
from topkube.launch.verdict import describe_unfit_worker, is_settled

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


class RecordingLink(Link):
    """A connected link that keeps what was sent."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda *_: None)
        self.is_connected, self.sent = True, list[object]()

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
def members() -> list[Member]:
    hello = Hello(session="s", received=0, ip="10.0.0.2", slots=2, python="python", mpi="MPICH 5.0.2", time=0.0)
    return [Member(index, hello, RecordingLink()) for index in range(2)]


def test_the_launcher_does_not_wait_for_reports_of_ranks_that_were_checked(members: list[Member]) -> None:
    """These ranks wait in a collective for the dead ranks, and would never report."""
    now = time.monotonic()
    for member in (*members, *members):
        member.request_check(PLAN.slots)
    assert [member.link.sent for member in members] == [[CheckRanks()], [CheckRanks()]]  # type: ignore[attr-defined]
    assert not is_settled(PLAN, members, now - 1.5, now)
    members[0].has_checked = True
    assert not is_settled(PLAN, members, now - 1.5, now), "the other worker may still report a failure"
    members[1].has_checked = True
    assert is_settled(PLAN, members, now - 1.5, now)


def test_a_worker_that_has_reported_all_ranks_is_not_asked(members: list[Member]) -> None:
    now = time.monotonic()
    for rank in range(2):
        report = {"rank": rank, "host": "", "command": [], "started": 0.0, "ended": 1.0, "exit_code": 1}
        members[0].add_report(Report(report=report))
    members[0].request_check(PLAN.slots)
    members[1].has_checked = True
    assert is_settled(PLAN, members, now - 1.5, now)
    assert members[0].link.sent == []  # type: ignore[attr-defined]


def test_a_closed_connection_may_come_back_for_some_seconds(members: list[Member]) -> None:
    now = time.monotonic()
    members[0].has_checked = True
    members[1].link.is_connected, members[1].closed = False, now - CLOSED_SECONDS + 0.1
    assert not is_settled(PLAN, members, now, now), "the connection may come back"
    members[1].closed = now - CLOSED_SECONDS - 0.1
    assert is_settled(PLAN, members, now, now)


def test_the_launcher_waits_for_a_worker_that_was_asked_to_end_only_while_it_may_still_report(
    members: list[Member],
) -> None:
    """A preempted pod that is killed, or whose node is lost, sends no further message, and the grace period may be an
    hour."""
    now = time.monotonic()
    plan = PLAN.model_copy(update={"grace_seconds": 3600.0})
    members[0].has_checked = True
    members[1].terminating = time.time()
    members[1].has_checked = True
    assert not is_settled(plan, members, now - 10, now), "the ranks of the worker save their state"
    members[1].link.is_connected, members[1].closed = False, now - CLOSED_SECONDS + 0.1
    assert not is_settled(plan, members, now - 10, now), "the connection may come back"
    members[1].closed = now - CLOSED_SECONDS - 0.1
    assert is_settled(plan, members, now - 10, now), "the connection is gone"
    members[1].link.is_connected, members[1].closed = True, None
    members[1].link.last_heard = now - plan.lost_seconds - 1
    assert is_settled(plan, members, now - 10, now), "the node is gone"
    members[1].link.last_heard = now
    members[1].has_ended = True
    assert is_settled(plan, members, now - 10, now)


def test_the_first_of_50000_failures_is_the_rank_that_aborted() -> None:
    """If one of 4,096 ranks aborts, all others end silently at the same moment."""
    fallen = [
        RankReport(rank=rank, host="", command=[], started=0.0, ended=5.0 + rank * 1e-6, exit_code=1)
        for rank in range(50_000)
    ]
    aborted = RankReport(rank=50_000, host="", command=[], started=0.0, ended=5.9, exit_code=1, aborted=True)
    before = time.process_time()
    assert select_first_failure([*fallen, aborted]) is aborted
    assert time.process_time() - before < 30, "if each report is compared with every other, this takes an hour"


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"rank": [0]},
        {"started": None},
        {"ended": float("nan")},
        {"exit_code": 1.5},
        {"exit_code": 10**30},
        {"traceback": ["x"]},
        {"tail": "x"},
        {"tail": [1]},
        {"missing": {"1": 2}},
        {"command": None},
    ],
)
def test_a_malformed_report_of_a_rank_is_refused(members: list[Member], change: dict[str, object]) -> None:
    """A script may write anything into the run's directory. If the report raised another error, the worker would be
    lost."""
    valid = {"rank": 0, "host": "", "command": [], "started": 0.0, "ended": 1.0, "exit_code": 1}
    assert members[0].add_report(Report(report=valid)).exit_code == 1
    with pytest.raises(ValueError, match="not a report of a rank"):
        members[0].add_report(Report(report={**valid, **change}))
    with pytest.raises(ValueError, match="not a report of a rank"):
        members[0].add_report(Report(report={}))


def test_a_report_is_short_on_its_way_to_the_launcher() -> None:
    """The launcher of 4,096 ranks may get the reports of all ranks at once, and keeps them all."""
    lines = ["\0" * 60_000, *["x" * 100] * 18, "the end"]
    trace = "Traceback (most recent call last)\n" + "  File x\n" * 50_000 + "ValueError: why"
    report = RankReport(
        rank=1, host="", command=[], started=0, ended=1, exit_code=1, traceback=trace, tail=lines
    ).shorten(8192)
    assert report.tail[-19:] == lines[-19:]
    assert report.error == "ValueError: why"
    assert len(json.dumps(dataclasses.asdict(report))) < 64 << 10


@pytest.mark.parametrize(
    ("line", "kills", "told_to_end", "out_of_memory"),
    [
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 1, False, True),
        ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated", 1, False, True),
        ("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.", 1, False, True),
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 0, False, False),
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ", 1, True, False),
        ("ValueError: a bad batch", 1, False, False),
    ],
)
def test_a_data_loader_that_was_killed_for_memory_is_the_cause_of_its_ranks_failure(
    members: list[Member], line: str, kills: int, told_to_end: bool, out_of_memory: bool
) -> None:
    """The rank itself ends with a traceback and exit code 1."""
    report = {"rank": 0, "host": "", "command": [], "started": 0.0, "ended": 1.0, "exit_code": 1, "tail": [line]}
    rank_report = members[0].add_report(Report(report={**report, "told_to_end": told_to_end}, oom_kills=kills))
    assert rank_report.out_of_memory == out_of_memory
    failure = describe_failure(rank_report, lambda rank: "j-worker-0-1", "worker 0")
    assert (failure.reason == "OOMKilled") == out_of_memory
    assert failure.exit_code == 1
    if out_of_memory:
        assert "the kernel killed a process of the rank for memory" in (failure.message or "")


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_pods_that_have_only_ipv6_addresses_are_refused_with_the_next_step(members: list[Member], mpi: str) -> None:
    """Both mpiexecs cut such an address at its first colon."""
    hello = members[1].hello.model_copy(update={"ip": "fd00::2", "mpi": f"{mpi} 5.0.2"})
    member = Member(1, hello, RecordingLink())
    failure = describe_unfit_worker(PLAN.model_copy(update={"mpi": mpi}), member, member, f"{mpi} 5.0.2")
    assert failure is not None
    assert failure.reason == "WorkerUnfit"
    assert "use IPv4 or dual-stack pods" in (failure.message or "")


def test_workers_with_different_sources_do_not_train_together(members: list[Member]) -> None:
    hellos = [
        member.hello.model_copy(update={"mpi": "MPICH 5.0.2", "source": text})
        for member, text in zip(members, "ab", strict=True)
    ]
    first, second = (Member(index, hello, RecordingLink()) for index, hello in enumerate(hellos))
    assert describe_unfit_worker(PLAN, first, first, "MPICH 5.0.2") is None
    failure = describe_unfit_worker(PLAN, second, first, "MPICH 5.0.2")
    assert failure is not None
    assert failure.reason == "WorkerUnfit"
    assert "the source was changed after worker 0 had fetched it" in (failure.message or "")


def test_the_command_of_a_shim_is_found_until_it_has_ended(tmp_path: Path) -> None:
    def wait_for_ranks(ranks: int) -> list[int]:
        end = time.monotonic() + 120
        while len(commands := find_commands(list_descendants(shim.pid))) != ranks:
            assert time.monotonic() < end, commands
            time.sleep(0.01)
        return commands

    shim_command = [sys.executable, "-m", "topkube.launch.rank", "--no-echo", "--", "sleep", "100"]
    parent_command = [
        sys.executable,
        "-c",
        f"import subprocess; subprocess.run({shim_command!r})",
    ]  # the parent of the shim, in place of MPI's proxy
    with subprocess.Popen(parent_command, env={**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path)}) as shim:
        (rank,) = wait_for_ranks(1)
        assert Path(f"/proc/{rank}/comm").read_text() == "sleep\n"
        os.kill(rank, signal.SIGSTOP)
        assert find_commands(list_descendants(shim.pid)) == [rank], "a stopped process still lives"
        os.kill(rank, signal.SIGKILL)
        wait_for_ranks(0)
