"""A low limit of open files does not disable the cache."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openers import Opener, check_samples
from remotes import write_files

from topkube.data import ArrayOf
from topkube.data.fill.disk_filler import DiskFiller
from topkube.errors import StoreError

RECORD = ArrayOf("uint8", (3072,))


def run_script(script: str, tmp_path: Path, memory_limit: int = 0) -> tuple[str, str]:
    """Run a function of few_files.py; return its output."""
    command = [sys.executable, str(Path(__file__).parents[1] / "few_files.py"), script]
    command += [str(tmp_path / "source"), str(tmp_path / "cache"), str(memory_limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("memory_limit", [0, 1 << 24])
def test_400_shards_are_read_with_256_open_files(tmp_path: Path, memory_limit: int) -> None:
    write_files(tmp_path / "source", 400)
    assert run_script("read_many_shards", tmp_path, memory_limit) == ("", "")


def test_files_that_other_code_opens_do_not_disable_the_cache(tmp_path: Path) -> None:
    write_files(tmp_path / "source", 400)
    output, warned = run_script("read_beside_other_files", tmp_path)
    assert "too many open files. Likely cause: the limit is 256 (`ulimit -n`)" in output
    assert not warned


def test_a_local_folder_that_cannot_be_read_is_an_error_not_a_smaller_dataset(
    tmp_path: Path, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "source", 20)
    scan_folder = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("source/b/"):
            raise OSError(errno.EMFILE, "Too many open files")
        return scan_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="Too many open files"):
        open_dataset(tmp_path / "source")


def test_a_fault_in_a_filling_thread_is_named_and_leaves_nobody_waiting(
    tmp_path: Path, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_files(tmp_path / "source", 20)

    def raise_fault(self: DiskFiller, number: int) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(DiskFiller, "_choose_source", raise_fault)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, wait_seconds=60)
    check_samples(dataset, data)
    assert dataset.node_state.filler_count == 0
    assert "RuntimeError: oops" in capfd.readouterr().err
