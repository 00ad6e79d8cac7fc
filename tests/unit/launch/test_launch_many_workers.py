"""The launcher's work for thousands of workers: no step takes noticeable time per worker. These tests need no MPI and
no network."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mounted_credentials import write_credentials

from topkube.errors import LaunchError
from topkube.launch import launcher as launchers
from topkube.launch.connection.credentials import LauncherCredentials
from topkube.launch.connection.link import Link
from topkube.launch.connection.messages import End, Ended, Hello, Report
from topkube.launch.connection.rendezvous import _raise_file_limit
from topkube.launch.contract import MOST_REFUSALS, LauncherStatus, LaunchPlan
from topkube.launch.launcher import JobLauncher
from topkube.launch.members import Member
from topkube.launch.mpi.mpi_library import Mpi
from topkube.launch.output.rank_report import RankReport
from topkube.launch.steps import Steps, parse_record
from topkube.launch.verdict import describe_missing_workers


def build_launcher(tmp_path: Path, workers: int) -> JobLauncher:
    data = {"name": "j", "namespace": "n", "uid": "u", "attempt": 1, "made": [1] * workers}
    credentials = LauncherCredentials.load(write_credentials(tmp_path / "c"))
    lines: list[str] = []
    output: Any = SimpleNamespace(say=lines.append, lines=lines)
    launcher = JobLauncher(
        LaunchPlan.model_validate(data), credentials, Mpi("MPICH", "5.0.2", Path("/x")), "10.0.0.1", output
    )
    launcher.lines = lines  # type: ignore[attr-defined]
    return launcher


def join_worker(launcher: JobLauncher, index: int) -> Member:
    """Return a worker whose link is connected and keeps the sent messages."""
    address = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
    hello = Hello(session="s", ip=address, slots=1, python="p", mpi="MPICH 5.0.2", time=time.time())
    link = Link(lambda message: launcher.members.receive(member, message), lambda *_: None)
    link.is_connected = True
    member = Member(index, hello, link)
    launcher.members.by_index[index] = member
    return member


def list_sent_frames(member: Member) -> list[str]:
    return [str(frame) for frame in member.link._unconfirmed]


def test_silent_workers_are_dropped_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a host that is gone takes a second to close, so 128 links one after the other would take minutes. Here,
    no link closes before all links have begun to close."""
    monkeypatch.setattr(launchers, "ENDED_SECONDS", 0.1)
    dropped = list[Link]()
    all_dropped = asyncio.Event()

    async def drop(link: Link) -> None:
        dropped.append(link)
        if len(dropped) == 128:
            all_dropped.set()
        await all_dropped.wait()

    monkeypatch.setattr(Link, "drop", drop)
    launcher = build_launcher(tmp_path, 128)
    for index in range(128):
        join_worker(launcher, index)
    asyncio.run(asyncio.wait_for(launcher._end_workers(), 60))


def test_four_thousand_workers_are_gathered_and_their_status_is_answered_at_once(tmp_path: Path) -> None:
    launcher = build_launcher(tmp_path, 4096)
    for index in range(4096):
        join_worker(launcher, index)
    launcher._rendezvous.refused = dict.fromkeys(range(4096), "why " * 200)
    before = time.process_time()
    asyncio.run(launcher._wait_for_workers())
    for _ in range(10):
        status = launcher.build_status()
    assert time.process_time() - before < 20
    assert (status.joined, status.missing, status.refused) == (4096, (), ())
    for member in launcher.members.by_index.values():
        member.closed = time.monotonic()
    status = launcher.build_status()
    assert len(status.refused) == MOST_REFUSALS
    assert LauncherStatus.read(status.to_json()) == status
    failure = describe_missing_workers(launcher.plan, [], launcher._rendezvous.refused)
    assert "4096 of 4096 workers did not join" in (failure.message or "")
    assert "the launcher rejects them: worker 0: why" in (failure.message or "")
    assert len(failure.message or "") < 2048


def test_a_rank_that_has_ended_long_before_the_others_is_printed_once_and_ends_nothing(tmp_path: Path) -> None:
    launcher = build_launcher(tmp_path, 3)
    members = [join_worker(launcher, index) for index in range(3)]
    now = time.monotonic()
    launcher._note_early_end(now)
    report = RankReport(rank=1, host="h", command=["python"], started=1.0, ended=2.0, exit_code=0)
    launcher.members.receive(members[1], Report(report=dataclasses.asdict(report), oom_kills=0))
    launcher._note_early_end(now)
    launcher._note_early_end(now + launchers._EARLY_SECONDS - 1)
    lines = launcher.lines  # type: ignore[attr-defined]
    assert lines == []
    for seconds in (0, 1, 2):
        launcher._note_early_end(now + launchers._EARLY_SECONDS + seconds)
    (line,) = lines
    assert line.startswith("rank 1 (j-worker-1-1-u) has ended with exit code 0, and 2 other ranks still run.")
    assert launcher.members.first_failure_at is None


def test_success_waits_until_all_output_is_printed(tmp_path: Path) -> None:
    """A job that has succeeded may be cleaned up at once, with the pods that still print."""
    launcher = build_launcher(tmp_path, 3)
    members = [join_worker(launcher, index) for index in range(3)]

    async def wait_for_endings() -> None:
        out = asyncio.create_task(launcher._wait_for_output())
        await asyncio.sleep(0)
        assert all(list_sent_frames(member) == [End(grace_seconds=0.0, over=True).to_json()] for member in members)
        launcher.members.receive(members[0], Ended())
        launcher.members.receive(members[1], Ended(lost_output_bytes=1234))
        done, _ = await asyncio.wait([out], timeout=0.3)
        assert not done, "worker 2 still prints"
        members[2].link.is_connected, members[2].closed = False, time.monotonic() - 5
        await asyncio.wait_for(out, 30)

    asyncio.run(wait_for_endings())
    output = "\n".join(launcher.lines)  # type: ignore[attr-defined]
    assert "1234 bytes of the output of worker 1's ranks are lost" in output
    assert "workers 2 have not confirmed that all output is printed" in output


def test_a_limit_of_descriptors_that_is_too_low_is_reported_before_it_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 8192))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    _raise_file_limit(2)
    _raise_file_limit(1024)
    _raise_file_limit(2000)
    assert limits == [(2056, 8192), (6144, 8192), (8192, 8192)]
    with pytest.raises(LaunchError, match=r"4096 workers need 16512 open files .* may open 8192"):
        _raise_file_limit(4096)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"step": "7", "total_steps": None},
        {"step": True, "total_steps": None, "loss": "nan"},
        {"step": -1, "total_steps": None},
        {"step": 10**30, "total_steps": None},
        {"step": 1, "total_steps": [1]},
        {"step": 1, "total_steps": 2, "time": 1e300},
        {"step": 1, "total_steps": 2, "time": "now"},
        {"step": 1, "total_steps": 2, "samples_per_second": float("inf")},
        {"step": 1, "total_steps": 2, "loss": float("nan")},
    ],
)
def test_malformed_step_records_are_ignored(record: dict[str, Any]) -> None:
    """A malformed record would end the session, or the answer to the operator."""
    assert parse_record(record) is None


def test_a_step_record_with_an_unknown_field_is_read() -> None:
    record = parse_record({"step": 3, "total_steps": 10, "loss": 0.5, "time": 1e9, "later": "field"})
    assert record is not None
    steps = Steps()
    steps.add(record)
    progress = steps.build_progress()
    assert progress is not None
    assert (progress.step, progress.percent) == (3, 30)
