"""Arguments and variables that Linux would not start are refused before anything starts, with an explanation."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.errors import LaunchError
from topkube.launch.contract import Ending, WorkerPlan
from topkube.launch.host.arguments import STRING_BYTES, check_arguments, shorten_command
from topkube.launch.output.rank_report import RankReport
from topkube.launch.worker import run_worker

MIB = 1 << 20


@given(st.lists(st.integers(0, STRING_BYTES + 2), max_size=18), st.lists(st.integers(0, STRING_BYTES), max_size=4))
@settings(max_examples=25, deadline=None)
def test_accepted_arguments_can_be_started(words: list[int], variables: list[int]) -> None:
    command = ["/bin/true", *("x" * length for length in words)]
    environment = {f"V{number}": "ü" * (length // 2) for number, length in enumerate(variables)}
    longest = max(
        [len(word) for word in command] + [len(name) + len(text.encode()) + 1 for name, text in environment.items()]
    )
    if longest >= STRING_BYTES or sum(words) + sum(variables) > MIB:
        with contextlib.suppress(LaunchError):
            check_arguments(command, environment)
            assert subprocess.run(command, env=environment, check=False).returncode == 0
        return
    check_arguments(command, environment)
    assert subprocess.run(command, env=environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["x" * (STRING_BYTES - 1)], {}, ""),
        (
            ["x" * STRING_BYTES],
            {},
            "argument 1 of the command has 131072 bytes; Linux takes 131071 bytes for an argument",
        ),
        ([], {"LIST": "x" * (STRING_BYTES - 6)}, ""),
        ([], {"LIST": "x" * STRING_BYTES}, "the environment variable LIST has 131077 bytes with its name"),
        (["x" * 100_000] * 30, {}, "the command has 31 arguments with 3000"),
        (["x"] * 500_000, {}, "the command has 500001 arguments with"),
        ([], {f"V{number}": "x" * 100_000 for number in range(30)}, "its environment has 30 variables with 3000"),
    ],
)
def test_arguments_that_are_too_long_are_named_with_their_size(
    words: list[str], environment: dict[str, str], message: str
) -> None:
    if not message:
        check_arguments(["python", *words], environment, most=2 * MIB)
        return
    with pytest.raises(LaunchError) as error:
        check_arguments(["python", *words], environment, most=2 * MIB)
    assert message in str(error.value)


def test_a_worker_with_arguments_that_are_too_long_fails_before_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WorkerPlan(
        name="j", namespace="n", uid="u", index=0, attempt=3, pod="j-worker-0-3", launcher="10.0.0.1:7077"
    )
    for name, value in (
        ("TOPKUBE_WORKER", plan.to_json()),
        ("TOPKUBE_CREDENTIALS", str(tmp_path)),
        ("TOPKUBE_TERMINATION_LOG", str(tmp_path / "termination")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("topkube.launch.worker.WorkerCredentials.load", lambda _: None)
    with pytest.raises(LaunchError, match="Linux takes"):
        run_worker(["python", *["x" * 100_000] * 80])
    ending = Ending.read((tmp_path / "termination").read_text())
    assert ending.first_failure is not None
    assert (ending.first_failure.reason, ending.exit_code, ending.attempt) == ("ArgumentsTooLong", 126, 3)


def test_a_rank_that_linux_does_not_start_reports_the_sizes(tmp_path: Path) -> None:
    """Other programs may add arguments, so that the limit is exceeded after the check."""
    (tmp_path / "command.json").write_text(
        '{"directory": "/", "command": ["true"%s]}' % (', "%s"' % ("x" * 130_000) * 60)
    )
    environment = {**os.environ, "TOPKUBE_RUN_DIRECTORY": str(tmp_path), "PMI_RANK": "0"}
    shim = [sys.executable, "-m", "topkube.launch.rank", "--no-echo"]
    assert subprocess.run(shim, env=environment, check=False, capture_output=True).returncode == 126
    report = RankReport.read(tmp_path / "rank-0.json")
    assert report.not_started is not None
    assert "the command has 61 arguments with 78" in report.not_started
    assert (tmp_path / "rank-0.json").stat().st_size < 256 << 10, "the report fits in one frame to the launcher"


def test_a_command_is_shown_in_short() -> None:
    assert shorten_command(["python", "train.py"]) == ["python", "train.py"]
    assert shorten_command(["x" * 5000, *["y"] * 500]) == ["x" * 1024 + "…", *["y"] * 63, "…"]
