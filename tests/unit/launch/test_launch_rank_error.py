"""The reasons of errors that another attempt does not repair. They are found in the output of Python itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from topkube.job.fields.failure_policy import USUAL_REASONS
from topkube.launch.output.rank_report import RankReport, read_tail
from topkube.launch.termination_message import find_reason

ARGUMENTS = "import argparse; parser = argparse.ArgumentParser(); parser.parse_args()"
SCRIPTS = {
    "a script that cannot be compiled": ("def train(:\n", ["train.py"], "SyntaxError"),
    "a wrong indentation": ("if 1:\nprint(1)\n", ["train.py"], "SyntaxError"),
    "an imported module that cannot be compiled": ("import broken", ["train.py"], "SyntaxError"),
    "a package that is not installed": ("import no_such_package", ["train.py"], "ImportError"),
    "a name that a package lacks": ("from json import no_such_name", ["train.py"], "ImportError"),
    "an argument that argparse does not have": (ARGUMENTS, ["train.py", "--stpes", "3"], "UsageError"),
    "a script that does not exist": ("", ["trian.py"], "ScriptNotFound"),
    "a module that does not exist": ("", ["-m", "no_such_package.train"], "ScriptNotFound"),
    "an error of the training": ("raise ValueError('boom')", ["train.py"], "Error"),
    "an exit code without a message": ("raise SystemExit(2)", ["train.py"], "Error"),
    "an import error that the script prints": (
        "print('ImportError: optional'); raise ValueError(1)",
        ["train.py"],
        "Error",
    ),
    "a broken GPU": (
        "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
        ["train.py"],
        "HardwareFault",
    ),
}


@pytest.mark.parametrize(("script", "arguments", "reason"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_reason_of_an_error_comes_from_the_output_of_python(
    tmp_path: Path, script: str, arguments: list[str], reason: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "broken.py").write_text("def train(:\n")
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        ended = subprocess.run(
            [sys.executable, "-E", *arguments], cwd=tmp_path, stdout=file, stderr=file, check=False, timeout=60
        )
    lines, traceback = read_tail(log)
    report = RankReport(
        0, "host", ["python"], started=1.0, ended=2.0, exit_code=ended.returncode, traceback=traceback, tail=lines
    )
    assert find_reason(report) == reason
    assert reason in USUAL_REASONS
