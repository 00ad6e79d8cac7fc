"""scripts/pytest.sh: in CI a test that fails gets a second try, and is named if it passes then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "pytest.sh"
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("case", ["a case", "another"])
def test_by_chance(case):
    mark = Path(__file__).with_name(case)
    tried = mark.exists()
    mark.touch()
    assert tried
"""


def run_tests(folder: Path, source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    command = [SCRIPT, sys.executable, "-n", "1", "test_it.py"]
    outer_environment = {
        name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")
    }
    return subprocess.run(
        command, cwd=folder, env={**outer_environment, **environment}, capture_output=True, text=True, timeout=240
    )


def test_a_test_that_fails_once_passes_in_ci_and_is_named(tmp_path: Path) -> None:
    ended = run_tests(tmp_path, FAILS_ONCE, CI="true")
    assert ended.returncode == 0, ended.stdout
    assert "passed only at the second try" in ended.stdout.splitlines()[-1]
    assert "test_it.py::test_by_chance[a case]" in ended.stdout.splitlines()[-1]


def test_outside_ci_there_is_one_try(tmp_path: Path) -> None:
    assert run_tests(tmp_path, FAILS_ONCE, CI="").returncode == 1


def test_a_test_that_fails_twice_fails_in_ci(tmp_path: Path) -> None:
    assert run_tests(tmp_path, "def test_wrong():\n    assert 1 == 2\n", CI="true").returncode == 1


def test_many_failures_get_no_second_try(tmp_path: Path) -> None:
    ended = run_tests(tmp_path, FAILS_ONCE.replace('["a case", "another"]', "list('abcdefg')"), CI="true")
    assert ended.returncode == 1
    assert "7 tests failed: too many for a second try" in ended.stdout
