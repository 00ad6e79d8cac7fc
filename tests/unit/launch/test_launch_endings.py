"""Memory counters, stale shared memory, and the reasons and messages of the status."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from topkube import heartbeat
from topkube.errors import LaunchError
from topkube.launch import steps
from topkube.launch.connection.credentials import LauncherCredentials, WorkerCredentials
from topkube.launch.connection.messages import parse_message
from topkube.launch.contract import Ending
from topkube.launch.host import shared_memory
from topkube.launch.host.environment import set_home
from topkube.launch.host.memory_kills import count_memory_kills
from topkube.launch.launcher import run_launcher
from topkube.launch.members import find_clock_offset
from topkube.launch.output.rank_report import RankReport
from topkube.launch.steps import Steps
from topkube.launch.termination_message import describe_failure, find_reason, join_last_lines, write_ending
from topkube.launch.worker import run_worker
from topkube.processors import count_cores
from topkube.telemetry.progress import StepRecord


def write_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_kills_for_memory_are_counted_in_both_versions_of_cgroups(tmp_path: Path) -> None:
    machine = write_file(tmp_path / "vmstat", "nr_free_pages 5\noom_kill 9\n")
    none = write_file(tmp_path / "none", "")
    version_2, version_1 = tmp_path / "two", tmp_path / "one"
    cgroup_2 = write_file(tmp_path / "own2", "0::/kubepods/pod1/c\n")
    cgroup_1 = write_file(tmp_path / "own1", "11:cpu,cpuacct:/x\n7:memory:/kubepods/pod1/c\n0::/\n")
    assert count_memory_kills(version_2, cgroup_2, machine) == 9, (
        "without a counter of the container, that of the machine counts"
    )
    write_file(version_2 / "memory.events", "low 0\noom 3\noom_kill 2\n")  # as inside a container
    assert count_memory_kills(version_2, cgroup_2, machine) == 2
    write_file(version_2 / "kubepods/pod1/c/memory.events", "oom_kill 4\n")  # as on the host
    assert count_memory_kills(version_2, cgroup_2, machine) == 4
    write_file(version_1 / "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert count_memory_kills(version_1, cgroup_1, machine) == 5
    write_file(version_1 / "memory/kubepods/pod1/c/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert count_memory_kills(version_1, cgroup_1, machine) == 6
    assert count_memory_kills(tmp_path / "gone", none, none) == 0
    assert count_memory_kills() >= 0


def test_processors_are_counted_in_both_versions_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    version_2, version_1 = tmp_path / "two", tmp_path / "one"
    for quota, counted in (("max 100000", 64), ("400000 100000", 4), ("20000 100000", 1), ("9900000 100000", 64)):
        write_file(version_2 / "cpu.max", f"{quota}\n")
        assert count_cores(version_2) == counted
    for quota, counted in (("-1", 64), ("400000", 4), ("50000", 1)):
        write_file(version_1 / "cpu/cpu.cfs_quota_us", f"{quota}\n")
        write_file(version_1 / "cpu/cpu.cfs_period_us", "100000\n")
        assert count_cores(version_1) == counted
    assert count_cores(tmp_path / "gone") == 64


def test_only_dead_segments_of_our_own_are_removed(tmp_path: Path) -> None:
    kept = write_file(tmp_path / "mpich_shm_before", "x")
    keep = shared_memory.list_segments(tmp_path)
    dead, mapped, opened = (
        write_file(tmp_path / f"mpich_shm_{name}_0", "x" * 4096) for name in ("dead", "mapped", "opened")
    )
    others = [write_file(tmp_path / name, "x") for name in ("data", "psm_1a2b3c4d", "my_mpich_shm_1_0", "torch_model")]
    (tmp_path / "nccl-folder").mkdir()
    (tmp_path / "nccl-link").symlink_to(kept)
    script = f"import sys; f = open({str(opened)!r}); print('ready', flush=True); sys.stdin.read()"
    with (
        mapped.open("r+b") as file,
        mmap.mmap(file.fileno(), 4096),
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        assert other.stdout is not None
        other.stdout.readline()
        file.close()
        assert shared_memory.remove_dead_segments(keep, tmp_path) == ["mpich_shm_dead_0"]
        assert not dead.exists()
        assert all(path.exists() for path in (kept, mapped, opened, *others))
        assert {"nccl-folder", "nccl-link"} <= {path.name for path in tmp_path.iterdir()}
        other.communicate()
    names = ["vader_segment.h.0.1.0", "sm_segment.h.0.1.0", "osc_sm.h.1.0", "nccl-AbC123", "torch_12_345_0"]
    for name in names:
        write_file(tmp_path / name, "x")
    assert shared_memory.remove_dead_segments(keep, tmp_path) == sorted([mapped.name, opened.name, *names])
    assert shared_memory.remove_dead_segments(frozenset(), tmp_path / "none") == []


def build_report(**fields: object) -> RankReport:
    return RankReport.parse(
        {"rank": 5, "host": "h", "command": ["x"], "started": 1.0, "ended": 2.0, "exit_code": 1, **fields}
    )


def test_each_way_to_end_has_its_reason() -> None:
    assert find_reason(build_report(exit_code=127, not_started="the program 'x' is not there")) == "CommandNotFound"
    assert find_reason(build_report(exit_code=126, not_started="the program 'x' cannot be run")) == "CommandNotRunnable"
    assert find_reason(build_report(signal="SIGKILL", exit_code=137, out_of_memory=True)) == "OOMKilled"
    assert find_reason(build_report(signal="SIGSEGV", exit_code=139)) == "SIGSEGV"
    assert find_reason(build_report(traceback="Traceback (most recent call last)\n  x\nValueError: no")) == "Error"
    assert find_reason(build_report(missing=[3])) == "CollectiveTimeout"
    assert find_reason(build_report(aborted=True)) == "MpiAbort"


def test_a_hang_is_attributed_to_the_missing_rank() -> None:
    failure = describe_failure(
        build_report(missing=[3, 7], tail=["last words"]), lambda rank: f"pod-{rank // 2}", "worker 2"
    )
    assert (failure.rank, failure.pod, failure.log_tail) == (3, "pod-1", "last words")
    failure = describe_failure(build_report(missing=[5]), lambda rank: f"pod-{rank // 2}", "worker 2")
    assert (failure.rank, failure.pod) == (5, "pod-2")


def test_tails_fit_the_status() -> None:
    assert join_last_lines([]) is None
    assert join_last_lines(["a", "b"]) == "a\nb"
    long = join_last_lines(["ü" * 9000, "the end"])
    assert long is not None
    assert len(long.encode()) <= 4096
    assert long.endswith("the end")


def test_a_termination_message_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = Ending(attempt=1, state="Succeeded", exit_code=0)
    write_ending(tmp_path / "log", ending)
    assert Ending.read((tmp_path / "log").read_text()) == ending
    write_ending(tmp_path / "no" / "log", ending)
    assert '"Succeeded"' in capsys.readouterr().err


class Clock:
    """A fake `time` for the count of steps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    return clock


def test_progress_has_the_newest_checkpoint_and_the_time_of_its_first_report() -> None:
    counted = Steps()
    for step, saved, failed in ((1, None, 0), (2, 2, 0), (3, 2, 0), (4, 2, 1)):
        counted.add(StepRecord(step, 10, checkpoint_step=saved, failed_checkpoints=failed, time=60.0 * step))
    progress = counted.build_progress()
    assert progress is not None
    assert (progress.checkpoint_step, progress.checkpoint_at) == (2, "1970-01-01T00:02:00Z")
    assert progress.failed_checkpoints == 1


@pytest.mark.parametrize(("written", "reported"), [("auto is x", "auto is x"), ("x" * 9999, "x" * 256), (7, None)])
def test_the_choice_of_auto_is_reported_and_cut_to_its_length(written: Any, reported: str | None) -> None:
    counted = Steps()
    counted.add(StepRecord(1, 10, choice=written, time=60.0))
    progress = counted.build_progress()
    assert progress is not None
    assert progress.choice == reported


def test_progress_has_an_eta_and_stalls_are_detected(clock: Clock) -> None:
    counted = Steps()
    assert counted.build_progress() is None
    counted.start()
    assert counted.describe_stall(0, 0) == ""
    for step in range(1, 11):
        counted.add(StepRecord(step=step, total_steps=110, loss=1.5, samples_per_second=2.0, time=100.0 + 2 * step))
    progress = counted.build_progress()
    assert progress is not None
    assert (progress.step, progress.total_steps, progress.percent, progress.eta_seconds) == (10, 110, 9, 200)
    assert (progress.loss, progress.updated_at) == ("1.5", "1970-01-01T00:02:00Z")
    assert (progress.checkpoint_step, progress.checkpoint_at, progress.failed_checkpoints) == (None, None, None)
    assert counted.describe_stall(1000, 0) == ""
    clock.now += 20
    assert "the last was step 10" in counted.describe_stall(10, 0)
    counted.add(StepRecord(step=11, total_steps=None))
    assert counted.build_progress().eta_seconds is None
    restarted = Steps()
    restarted.start()
    clock.now += 20
    assert "first step" in restarted.describe_stall(0, 10)


def test_without_steps_collectives_are_the_sign_of_life_and_the_ranks_that_are_behind_are_named(clock: Clock) -> None:
    counted = Steps()
    counted.start()
    clock.now += 20
    counted.note_activity({0: 7, 1: 5, 2: 7, 3: 5}, False)
    assert counted.describe_stall(10, 1000) == "", "no step yet: the time for the first one counts"
    assert counted.describe_stall(1000, 10) == ""
    clock.now += 20
    counted.note_activity({}, True)  # a thread that prints is no sign of life if collectives are counted
    counted.note_activity({0: 7}, False)  # and neither is the same count
    stall = counted.describe_stall(1000, 10)
    assert "waited for: rank 1, 3 (collective 5 of 7)" in stall
    assert counted.find_ranks_behind() == [1, 3]
    counted.note_activity({1: 7, 3: 7}, False)
    assert counted.describe_stall(1000, 10) == ""
    assert counted.find_ranks_behind() == []


def test_output_is_the_sign_of_life_of_a_program_that_does_not_use_topkube(clock: Clock) -> None:
    counted = Steps()
    counted.start()
    clock.now += 20
    counted.note_activity({}, True)
    assert counted.describe_stall(1, 10) == ""
    clock.now += 20
    assert "another sign of life" in counted.describe_stall(1, 10)


def test_a_heartbeat_is_read_by_other_processes_and_a_failed_write_ends_nothing(tmp_path: Path) -> None:
    own = heartbeat.Heartbeat(tmp_path / "run", 3)
    assert heartbeat.read(tmp_path / "run", 3) == 0
    for _ in range(300):
        own.beat()
    assert heartbeat.read(tmp_path / "run", 3) == 300
    assert heartbeat.read(tmp_path / "run", 2) == 0
    write_file(tmp_path / "file", "x")
    heartbeat.Heartbeat(tmp_path / "file", 0).beat()


def test_bad_plans_and_credentials_become_the_termination_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    termination_log = tmp_path / "termination"
    monkeypatch.setenv("TOPKUBE_TERMINATION_LOG", str(termination_log))
    monkeypatch.setenv("TOPKUBE_CREDENTIALS", str(tmp_path))
    for plan in ("", "{", '{"name": "a"}'):
        monkeypatch.setenv("TOPKUBE_LAUNCH", plan)
        monkeypatch.setenv("TOPKUBE_WORKER", plan)
        for run in (run_launcher, lambda: run_worker(["true"])):
            with pytest.raises(LaunchError, match="is invalid"):
                run()
            ending = Ending.read(termination_log.read_text())
            assert ending.exit_code == 2
            assert ending.first_failure is not None
            assert ending.first_failure.reason == "BadPlan"
    plan = {
        "name": "a",
        "namespace": "b",
        "uid": "c",
        "attempt": 4,
        "workers": [{"index": 0, "attempt": 1, "pod": "p"}],
    }
    monkeypatch.setenv("TOPKUBE_LAUNCH", json.dumps(plan))
    with pytest.raises(LaunchError, match=r"tls\.crt is invalid: No such file"):
        run_launcher()
    assert Ending.read(termination_log.read_text()).attempt == 4
    for name in ("tls.crt", "tls.key", "token"):
        (tmp_path / name).write_text("nonsense")
    for load in (LauncherCredentials.load, WorkerCredentials.load):
        with pytest.raises(LaunchError, match=r"the credentials file .* is invalid"):
            load(tmp_path)
    (tmp_path / "tls.crt").write_text("")
    with pytest.raises(LaunchError, match="it is empty"):
        WorkerCredentials.load(tmp_path)


def test_any_user_gets_a_home_folder_that_exists(tmp_path: Path) -> None:
    for shell in ({}, {"HOME": "/nowhere"}, {"HOME": "/proc/1/fdinfo/none"}, {"HOME": ""}):
        environment = dict(shell)
        set_home(environment, str(tmp_path))
        assert environment["HOME"] == str(tmp_path)
    environment = {"HOME": str(tmp_path / "own")}
    os.mkdir(environment["HOME"])
    set_home(environment, str(tmp_path))
    assert environment["HOME"] == str(tmp_path / "own")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"kind": "format-disk"}', '{"kind": "open", "stream": 70000}', "\x00"]
)
def test_invalid_messages_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="sent an invalid"):
        parse_message(text)


def test_a_slow_call_does_not_count_as_a_different_clock() -> None:
    assert find_clock_offset(100.0, 101.5) == 0.0
    assert find_clock_offset(100.0, 160.0) == 60.0
    assert find_clock_offset(160.0, 100.0) == -60.0
