"""A rank imports the job's source and packages; TopKube's own processes do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from topkube.launch.host.environment import name_digest_file, read_source_digest

PRINTS = "import os, mine, packed; print(mine.__file__, packed.__file__, os.environ['PATH'].split(':')[0])"


def test_a_rank_imports_its_source_and_its_shim_does_not(tmp_path: Path) -> None:
    source, packages, run = (tmp_path / name for name in ("source", "packages", "run"))
    for folder in (source, packages, run):
        folder.mkdir()
    (source / "mine.py").write_text("")
    (source / "signal.py").write_text("raise SystemExit('the shim has imported a module of the job')")
    (packages / "packed.py").write_text("")
    environment = {
        **os.environ,
        "TOPKUBE_SOURCE_DIRECTORY": str(source),
        "TOPKUBE_PACKAGES_DIRECTORY": str(packages),
        "TOPKUBE_RUN_DIRECTORY": str(run),
    }
    command = [sys.executable, "-m", "topkube.launch.rank", "--", sys.executable, "-c", PRINTS]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [f"{source}/mine.py", f"{packages}/packed.py", f"{packages}/bin"]


def test_without_a_digest_file_the_digest_of_the_source_is_empty(tmp_path: Path) -> None:
    assert read_source_digest(tmp_path / "source") == ""
    name_digest_file(tmp_path / "source").write_text("ab" * 32 + "\n")
    assert read_source_digest(tmp_path / "source") == "ab" * 32
