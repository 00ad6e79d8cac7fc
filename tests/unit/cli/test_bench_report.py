"""The report of a benchmark: its table in a pipe, and the file of its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from topkube.bench.report import BenchReport, check_path
from topkube.cli.entry import run_app
from topkube.errors import ArgumentError


def test_a_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {str(index): f"a-rather-long-heading-{index}" for index in range(8)}
    report = BenchReport("title", columns)
    report.add(**{key: 123_456 for key in columns})
    report.show()
    shown = capsys.readouterr().out
    assert all(heading in shown for heading in columns.values())
    assert shown.count("123,456") == len(columns)


def test_a_file_that_cannot_be_written_is_reported_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from topkube.bench import select

    monkeypatch.setattr(select, "measure", pytest.fail)
    for path, reason in ((tmp_path, "it is a directory"), (tmp_path / "absent" / "a.json", "folder does not exist")):
        assert run_app(["bench", "select", "--json", str(path)]) == 2
        assert reason in capsys.readouterr().err


def test_a_full_disk_is_an_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.json"
    check_path(file)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ArgumentError, match=r"a\.json: No space left on device"):
        BenchReport("title", {}).write(file)
