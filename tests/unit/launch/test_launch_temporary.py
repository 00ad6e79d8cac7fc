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


def create_folder(parent: Path, name: str, mode: int = 0o700) -> Path:
    path = parent / f"{PREFIX}{name}"
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "file").write_text("x")
    return path


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_process_stays(
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
        assert remove_dead_folders(tmp_path, PREFIX) == [], "the folder is new: its process may not have locked it yet"
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
    create_folder(parent, "open", 0o777)
    (parent / "other").mkdir()
    locked = create_folder(parent, "locked")
    (locked / ".lock").symlink_to(elsewhere / "precious")  # it is not known if a process holds this lock
    dead = create_folder(parent, "dead")
    (dead / "link").symlink_to(elsewhere)
    for entry in parent.iterdir():
        os.utime(entry, (0, 0), follow_symlinks=False)
    before = sorted(path.name for path in parent.iterdir())
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: 12345)
        assert remove_dead_folders(parent, PREFIX) == []
    assert remove_dead_folders(parent, PREFIX) == [dead.name]
    assert sorted(path.name for path in parent.iterdir()) == [name for name in before if name != dead.name]
    assert (elsewhere / "precious").exists()


@pytest.mark.parametrize(("mode", "is_removed"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_no_folder_is_removed_from_a_parent_in_which_others_may_rename_it(
    tmp_path: Path, mode: int, is_removed: bool
) -> None:
    dead = create_folder(tmp_path, "dead")
    os.utime(dead, (0, 0))
    tmp_path.chmod(mode)
    assert bool(remove_dead_folders(tmp_path, PREFIX)) == is_removed


def test_a_parent_folder_that_does_not_exist_is_ignored(tmp_path: Path) -> None:
    assert remove_dead_folders(tmp_path / "none", PREFIX) == []
