"""Folders that killed launchers and workers leave are removed, and nothing else, in a /tmp that others use too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from topkube.launch.host.temporary import TemporaryFolder, remove_dead_folders

PREFIX = "topkube-launch-"


def make_folder(parent: Path, name: str, mode: int = 0o700) -> Path:
    path = parent / f"{PREFIX}{name}"
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "file").write_text("x")
    return path


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import signal, sys; from topkube.launch.host.temporary import TemporaryFolder\n"
        f"with TemporaryFolder('{PREFIX}') as path:\n    (path / 'agent').touch(); print(path, flush=True)\n"
        "    signal.pause()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        dead, living = (Path(process.stdout.readline().strip()) for process in started if process.stdout)
        started[0].kill()
        started[0].wait()
        assert remove_dead_folders(tmp_path, PREFIX) == [], "it is young: its lock may not have been taken yet"
        os.utime(dead, (0, 0))
        os.utime(living, (0, 0))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        with TemporaryFolder(PREFIX) as own:
            assert not dead.exists()
            assert living.exists()
            assert own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_only_folders_of_our_own_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    parent = tmp_path / "tmp"
    parent.mkdir(mode=0o700)
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").write_text("x")
    make_folder(parent, "open", 0o777)
    (parent / "other").mkdir()
    held = make_folder(parent, "held")
    (held / ".lock").symlink_to(elsewhere / "precious")  # nobody can know whether a process holds it
    dead = make_folder(parent, "dead")
    (dead / "link").symlink_to(elsewhere)
    for entry in parent.iterdir():
        os.utime(entry, (0, 0), follow_symlinks=False)
    before = sorted(path.name for path in parent.iterdir())
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 12345)
        assert remove_dead_folders(parent, PREFIX) == []
    assert remove_dead_folders(parent, PREFIX) == [dead.name]
    assert sorted(path.name for path in parent.iterdir()) == [name for name in before if name != dead.name]
    assert (elsewhere / "precious").exists()


@pytest.mark.parametrize(("mode", "swept"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_nothing_is_swept_where_others_may_rename(tmp_path: Path, mode: int, swept: bool) -> None:
    dead = make_folder(tmp_path, "dead")
    os.utime(dead, (0, 0))
    tmp_path.chmod(mode)
    assert bool(remove_dead_folders(tmp_path, PREFIX)) == swept


def test_a_parent_that_is_not_there_is_nothing_to_sweep(tmp_path: Path) -> None:
    assert remove_dead_folders(tmp_path / "none", PREFIX) == []
