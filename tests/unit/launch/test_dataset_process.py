"""launch/dataset_process.py: the last report of the process that fills a pod's cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from topkube.launch import dataset_process
from topkube.launch.dataset_process import DatasetProcess
from topkube.settings import Settings

COMPANION = """
import json, pathlib, sys, time
folder, release = map(pathlib.Path, sys.argv[1:])
while not release.exists():
    time.sleep(0.01)
while True:
    asked = folder / "dataset.asked"
    report = {"cachedBytes": 7, "asked": asked.read_text() if asked.exists() else ""}
    (folder / "part").write_text(json.dumps(report))
    (folder / "part").replace(folder / "dataset.json")
    time.sleep(0.01)
"""


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetProcess]:
    """A process that writes no report before the file `release` exists. Nobody waits for later reports."""
    monkeypatch.setattr(dataset_process, "_ANSWER_SECONDS", 0.0)
    settings = Settings(dataset_uri="file:///data", dataset_view=str(tmp_path))
    process = DatasetProcess(settings, (0, 1), tmp_path, print)
    process._command = [sys.executable, "-c", COMPANION, str(tmp_path), str(tmp_path / "release")]
    process.start_if_needed()
    yield process
    process.end()


def test_the_process_has_the_uid_of_the_job(tmp_path: Path) -> None:
    """It names what the cache has of objects without a version. Only the launcher sends it to ranks."""
    settings = Settings(dataset_uri="file:///data", dataset_view=str(tmp_path), job_uid="0a-1b")
    process = DatasetProcess(settings, (0, 1), tmp_path, print)
    script = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['TOPKUBE_JOB_UID'])"
    process._command = [sys.executable, "-c", script, str(tmp_path / "uid")]
    process.start_if_needed()
    wait_until(lambda: (tmp_path / "uid").exists() and (tmp_path / "uid").read_text() == "0a-1b")
    process.end()


def test_a_short_attempt_waits_for_the_first_report(process: DatasetProcess, tmp_path: Path) -> None:
    assert not process.has_final_report(), "the process may still start"
    (tmp_path / "release").touch()
    wait_until(process.has_final_report)
    assert process.read_report()["cachedBytes"] == 7


def test_a_process_that_never_reports_does_not_hold_up_the_end(
    process: DatasetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_process, "_FIRST_ANSWER_SECONDS", 0.0)
    wait_until(process.has_final_report)
    assert process.read_report() == {}


def test_a_process_that_has_reported_is_not_waited_for_as_long(process: DatasetProcess, tmp_path: Path) -> None:
    (tmp_path / "release").touch()
    wait_until(lambda: bool(process.read_report()))
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.has_final_report()
