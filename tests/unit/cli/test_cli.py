"""The command line around its commands: help, version, errors, settings, doctor, and pages that must not go stale."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from topkube import __version__, installation
from topkube.cli.doctor import command as doctor
from topkube.cli.doctor import mpi as mpi_checks
from topkube.cli.doctor import software
from topkube.cli.doctor.check import Check
from topkube.cli.doctor.mpi import start_two_ranks
from topkube.cli.doctor.software import check_python
from topkube.cli.entry import run_app
from topkube.cli.settings import build_settings_page
from topkube.job.reference import build_markdown
from topkube.launch.mpi.mpi_library import Mpi
from topkube.settings import Settings
from topkube.telemetry.loggers import LOGGERS

DOCS = Path(__file__).parents[3] / "docs"
THREE_MISTAKES = """
apiVersion: topkube.dev/v1alpha1
kind: TrainingJob
metadata: {name: three}
spec:
  workers: two
  template: {spec: {containers: [{name: worker, image: i, command: [python, train.py]}]}}
  aggregation: {densty: 0.01, wire: bf8}
"""


def run_topkube(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "topkube.cli", *arguments], capture_output=True, text=True, timeout=280
    )


def test_a_file_with_three_mistakes_names_all_three(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(THREE_MISTAKES)
    ended = run_topkube("run", str(path))
    assert ended.returncode == 2
    assert "has 3 mistakes" in ended.stderr
    assert "spec.workers (line 6): 'two' is not a whole number of at least 1" in ended.stderr
    assert "spec.aggregation.densty (line 8): unknown field; did you mean density?" in ended.stderr
    assert "spec.aggregation.wire (line 8): 'bf8' is not one of fp32, bf16, fp16; did you mean bf16?" in ended.stderr
    assert "\nnext: correct the values; docs/trainingjob.md explains every field" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_the_version_is_printed() -> None:
    assert run_topkube("--version").stdout == f"topkube {__version__}\n"


def test_help_loads_no_heavy_module() -> None:
    """This keeps --help fast."""
    code = """
import sys
from topkube.cli.entry import run_app
run_app(["--help"])
heavy = {"torch", "numpy", "mpi4py", "pydantic", "yaml", "matplotlib", "rich.progress"}
print("loaded:", sorted(heavy & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert ended.stdout.splitlines()[-1] == "loaded: []"
    for command in ("run", "doctor", "bench", "rank", "settings"):
        assert command in ended.stdout


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["run"], ["run", "a.yaml", "--wrokers", "2"], ["run", "none.yaml"]]
)
def test_mistakes_on_the_command_line_end_with_2(arguments: list[str]) -> None:
    assert run_app(arguments) == 2


@pytest.mark.parametrize("command", ["run", "submit"])
def test_the_error_of_an_unknown_option_shows_where_those_of_a_script_go(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torchrun, options that follow the script belong to the script."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run_app([command, "train.py", "--epochs", "3"]) == 2
    assert f"topkube {command} PROGRAM -- OPTION" in capfd.readouterr().err


def test_bench_lists_its_measurements_without_loading_them() -> None:
    ended = run_topkube("bench", "no-such-measurement")
    assert ended.returncode == 2
    assert "No such command" in ended.stderr


def test_every_option_is_in_the_docs() -> None:
    import typer

    from topkube.cli.app import app

    page = (DOCS / "cli.md").read_text()
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, command in group.commands.items():
        assert f"## topkube {name}" in page, name
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert option in page, f"{name} {option}"


@pytest.mark.parametrize(
    ("page", "build_page", "command"),
    [
        ("trainingjob.md", build_markdown, "python -m topkube.job.reference > docs/trainingjob.md"),
        ("settings.md", build_settings_page, "topkube settings --markdown > docs/settings.md"),
    ],
)
def test_generated_pages_are_fresh(page: str, build_page: object, command: str) -> None:
    assert callable(build_page)
    assert (DOCS / page).read_text() == build_page(), f"stale: {command}"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [["run", "--help"], ["bench", "select", "--elements", "1000", "--repeats", "1"]])
def test_an_encoding_without_some_characters_does_not_end_a_command(encoding: str, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "topkube.cli", *words]
    ended = subprocess.run(command, capture_output=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert b"?" in ended.stdout


@pytest.mark.parametrize("buffers", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [["crd"], ["settings"], ["plan", "-o", "json"]])
def test_a_full_disk_under_the_output_is_an_error_without_a_traceback(words: list[str], buffers: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": buffers}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "topkube.cli", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_closed_output_is_no_error() -> None:
    command = ["sh", "-c", f"{sys.executable} -m topkube.cli crd >&-"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_settings_command_shows_set_variables() -> None:
    environment = {**os.environ, "TOPKUBE_DENSITY": "0.125", "COLUMNS": "200"}
    command = [sys.executable, "-m", "topkube.cli", "settings"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    assert re.search(r"TOPKUBE_DENSITY +0\.01 +0\.125 ", shown)
    for entry in dataclasses.fields(Settings):
        assert entry.metadata["variable"] in shown


def test_settings_without_a_terminal_are_a_line_each_with_the_values_as_they_are() -> None:
    address = "s3://bucket/" + "long-name/" * 9 + "[/x][bold]"
    environment = {**os.environ, "TOPKUBE_DATASET_URI": address, "COLUMNS": "40"}
    command = [sys.executable, "-m", "topkube.cli", "settings"]
    lines = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    assert len(lines) == 1 + len(dataclasses.fields(Settings))
    (line,) = [line for line in lines if line.startswith("TOPKUBE_DATASET_URI ")]
    assert line.split()[1] == address


def test_settings_as_json_have_the_default_and_the_present_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPKUBE_DENSITY", "0.125")
    monkeypatch.delenv("TOPKUBE_SIMD", raising=False)
    assert run_app(["settings", "-o", "json"]) == 0
    entries = {entry["variable"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert len(entries) == len(dataclasses.fields(Settings))
    density, simd = entries["TOPKUBE_DENSITY"], entries["TOPKUBE_SIMD"]
    assert (density["default"], density["now"]) == (0.01, "0.125")
    assert (simd["default"], simd["now"]) == ("auto", None)


def test_doctor_accepts_this_machine() -> None:
    ended = run_topkube("doctor", "-o", "json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, report
    assert report["ok"] is True
    checks = {check["name"]: check for check in report["checks"]}
    essential = (
        "python",
        "topkube",
        "kernels",
        "algorithms",
        "processor",
        "mpiexec",
        "mpi library",
        "two ranks",
        "memory",
        "/dev/shm",
        "disk",
    )
    assert set(essential) <= set(checks)
    assert checks["two ranks"]["message"] == "started, and added 1 + 1"
    assert all(check["next_step"] for check in checks.values() if check["state"] != "ok")


def test_doctor_prints_missing_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.run_doctor(json_output=False) == 1
    shown = capsys.readouterr().out
    assert re.search(r"fail +mpiexec +there is no mpiexec, neither in the folder of this Python nor on PATH", shown)
    assert re.search(r"next: .*pip install .*\[mpich\]'", shown)


def test_doctor_reports_a_check_that_raises_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_disk() -> Iterator[Check]:
        raise OSError("stale file handle")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (check_disk, check_python))
    assert doctor.run_doctor(json_output=True) == 1
    disk, python, *_ = json.loads(capsys.readouterr().out)["checks"]
    assert (disk["name"], disk["state"]) == ("disk", "fail")
    assert "OSError: stale file handle" in disk["message"]
    assert (python["name"], python["state"]) == ("python", "ok")


def test_doctor_notices_ranks_that_do_not_meet() -> None:
    class Alone(Mpi):
        def build_command(self, ranks: int, program: list[str]) -> list[str]:
            return ["sh", "-c", "echo hello 1 1; echo hello 1 1"]

    check = start_two_ranks(Alone("MPICH", "1", Path("mpiexec")))
    assert check.state == "fail"
    assert "did not form one world" in check.message
    assert "one MPI" in check.next_step


def test_the_doctor_does_not_wait_for_an_mpiexec_that_ignores_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Mpi):
        def build_command(self, ranks: int, program: list[str]) -> list[str]:
            return ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]

    monkeypatch.setattr(mpi_checks, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(mpi_checks, "_END_SECONDS", 0.5)
    check = start_two_ranks(Deaf("MPICH", "1", Path("mpiexec")))
    assert (check.state, check.message) == ("fail", "no answer within 0.5 s")


def test_the_doctor_does_not_wait_for_a_torch_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float | None = None, **_: object) -> None:
        assert timeout is not None, "it waits without end"
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(software.subprocess, "run", hang)
    [check] = software.check_torch()
    assert (check.name, check.state) == ("torch", "fail")
    assert "does not load within" in check.message


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'topkube[train]'"),
        (
            '{"url": "file://FOLDER/my%20checkout", "dir_info": {"editable": true}}',
            "pip install -e 'FOLDER/my checkout[train]'",
        ),
        ('{"url": "file://FOLDER/my%20checkout", "dir_info": {}}', "pip install 'FOLDER/my checkout[train]'"),
        ('{"url": "file://FOLDER/removed.whl", "archive_info": {}}', "pip install 'topkube[train]'"),
        ('{"url": "https://files.example/topkube.whl", "archive_info": {}}', "pip install 'topkube[train]'"),
        ("damaged", "pip install 'topkube[train]'"),
    ],
)
def test_next_steps_fit_how_topkube_was_installed(tmp_path: Path, origin: str | None, command: str) -> None:
    (tmp_path / "my checkout").mkdir()
    stored = origin.replace("FOLDER", str(tmp_path)) if origin else None
    assert installation._build_pip_command("train", stored) == command.replace("FOLDER", str(tmp_path))
    assert installation._build_pip_command("", stored) == command.replace("FOLDER", str(tmp_path)).replace(
        "[train]", ""
    )


def test_commands_that_install_topkube_are_defined_once() -> None:
    """Messages that name a fixed command would be wrong in a checkout, or without the package index."""
    root = Path(__file__).parents[3] / "runtime/topkube"
    for path in root.rglob("*.py"):
        if path.name != "installation.py":
            assert not re.search(r"pip install[^\n\"']*'?topkube", path.read_text()), path
    assert installation.build_reinstall_command().startswith("pip install --force-reinstall --no-deps ")


def test_errors_name_extras_that_exist() -> None:
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "".join(path.read_text() for path in (root / "runtime").rglob("*.py"))
    extras_in_errors = set(re.findall(r"build_install_command\(['\"]([a-z0-9]+)['\"]\)", source))
    schemes = {"s3", "gs", "gcs", "az", "abfs", "hf"}  # data/remote/object_store.py names the extra after the scheme
    assert extras_in_errors | schemes | set(LOGGERS) <= set(extras)
    assert len(extras_in_errors) >= 4


@pytest.mark.parametrize(
    ("words", "expected"), [("topkube su", {"submit", "suspend"}), ("topkube bench s", {"select"})]
)
def test_the_shell_completes_commands(words: str, expected: set[str]) -> None:
    script = Path(sys.executable).parent / "topkube"
    environment = {
        **os.environ,
        "_TOPKUBE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    ended = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60)
    assert set(ended.stdout.split()) == expected


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_other_systems_are_refused_when_the_package_is_built(system: str, tmp_path: Path) -> None:
    command = ["cmake", "-S", str(DOCS.parent / "csrc"), "-B", str(tmp_path), f"-DCMAKE_SYSTEM_NAME={system}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    sentence = f"TopKube runs on Linux only; on {system}, install it in a Linux container or in a virtual machine."
    assert sentence in " ".join(ended.stderr.split())
