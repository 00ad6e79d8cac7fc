"""`topkube run` when something goes wrong: every process ends, and the report names the first failing rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_runs import SCRIPT, build_command, finish_run, list_living_processes, run_job, start_run, write_job

from topkube.cli.entry import run_app
from topkube.job import TrainingJob
from topkube.launch.run_directory import open_fresh_directory


def read_output(directory: Path) -> str:
    return "".join(path.read_text() for path in sorted(directory.glob("rank-*.log")))


def wait_for(condition: Callable[[], bool], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)


def test_the_first_failing_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    ended = run_job(write_job(tmp_path, ["python", str(SCRIPT), "20", "raise", "3"]), tmp_path)
    assert ended.returncode == 1
    assert re.match(r"error: rank 3 \(node 1\) failed first, .* exit code 1, ValueError: boom", ended.stderr)
    assert "    Traceback (most recent call last)" in ended.stderr
    assert "next: read rank-3.log in " in ended.stderr
    assert "failed" in ended.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["firstFailure"]["rank"] == 3
    assert list_living_processes(tmp_path) == []


@pytest.mark.parametrize("name", ["plot.pgn", "plot"])
def test_a_plot_without_a_format_is_refused_before_the_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert run_app(["run", "train.py", "--plot", name]) == 2
    assert f"--plot {name}: the ending names no format" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["--plot", "--trace"])
@pytest.mark.parametrize(
    ("name", "problem"), [("file/a/result.png", "file is not a directory"), ("folder.png", "it is a directory")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_training(
    option: str, name: str, problem: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    assert run_app(["run", "train.py", option, name]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{option} {name}: no file can be written there:" in error
    assert problem in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("buffers", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_under_the_output_does_not_end_the_run(buffers: str, tmp_path: Path) -> None:
    """Also if nobody sees the end: `nohup topkube run … > out.log &`. A container often sets PYTHONUNBUFFERED."""
    job = write_job(tmp_path, ["python", "-c", "print('x' * 100_000); open('finished', 'a').write('yes,')"], workers=1)
    with Path("/dev/full").open("w") as full:
        command = build_command(job, tmp_path, "--no-plot")
        ended = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": buffers},
            timeout=280,
        )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "finished").read_text().startswith("yes,")
    assert "warning: a part of this command's output is lost: No space left on device" in ended.stderr
    assert "rank-*.log" in ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "succeeded"


@pytest.mark.parametrize(
    ("mode", "code", "expected"),
    [
        ("exit", 7, ["exit code 7", "next: read rank-1.log in "]),
        ("sys-exit", 7, ["exit code 7", "next: read rank-1.log in "]),
        ("kill", 137, ["killed by SIGKILL", "counted no out-of-memory kill"]),
        ("crash", 139, ["killed by SIGSEGV", "in string_at", "crash inside native code"]),
    ],
)
def test_ways_to_end_are_distinguished(tmp_path: Path, mode: str, code: int, expected: list[str]) -> None:
    ended = run_job(write_job(tmp_path, ["python", str(SCRIPT), "20", mode, "1"], workers=1), tmp_path, "--no-plot")
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith("error: rank 1 (node 0) failed first")
    for text in expected:
        assert text in ended.stderr
    assert list_living_processes(tmp_path) == []


def test_samples_of_a_killed_rank_do_not_stay_in_memory(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/{number}.bin").write_bytes(bytes(1000))
    script = (
        "import os, signal, time, topkube; from pathlib import Path; from topkube.data import CachedDataset\n"
        "topkube.init()\n"
        "dataset = CachedDataset('data', fingerprint='raw', memory_limit=1 << 20)\n"
        "assert len(dataset.__getitems__(range(4))) == 4\n"
        "assert dataset.statistics()['memory_used_bytes'] == 4000\n"
        "Path('filled').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL) if topkube.rank() == 1 else time.sleep(1000)"
    )
    folders = {"TOPKUBE_CACHE_MEMORY_DIRECTORY": "memory", "TOPKUBE_CACHE_DIRECTORY": "cache"}
    environment = {**os.environ, **{name: str(tmp_path / folder) for name, folder in folders.items()}}
    ended = run_job(
        write_job(tmp_path, ["python", "-c", script], workers=1), tmp_path, "--no-plot", environment=environment
    )
    assert ended.returncode == 137, ended.stderr
    assert (tmp_path / "filled").exists()
    assert list((tmp_path / f"memory/topkube-{os.geteuid()}").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        (["no-such-program"], 127, "the program 'no-such-program' does not exist"),
        (["./job.yaml"], 126, "cannot be run: Permission denied"),
        (["python", "-m", "no_such_module"], 1, "No module named no_such_module"),
        (["python", "-c", "import not_there"], 1, "ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_command_that_cannot_start_is_reported(tmp_path: Path, command: list[str], code: int, expected: str) -> None:
    ended = run_job(write_job(tmp_path, command, workers=1), tmp_path)
    assert ended.returncode == code
    assert expected in ended.stderr
    assert "next: " in ended.stderr


def test_a_rank_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    job = write_job(tmp_path, ["python", str(SCRIPT), "20", "hang", "1"], workers=1)
    ended = run_job(job, tmp_path, "--collective-deadline", "30")
    assert ended.returncode == 1
    assert "CollectiveTimeout" in ended.stderr
    assert "rank 1 never arrived" in ended.stderr
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["firstFailure"]
    assert (failure["rank"], failure["missing"]) == (0, [1])
    assert not [key for key in failure if "_" in key], "one case style, in every part of the summary"
    assert "next: read that rank's output" in ended.stderr
    assert list_living_processes(tmp_path) == []


def test_a_run_ends_at_its_deadline(tmp_path: Path) -> None:
    ended = run_job(write_job(tmp_path, ["sleep", "1000"]), tmp_path, "--deadline", "0.5")
    assert ended.returncode == 124
    assert "did not finish within its deadline of 0.5 s" in ended.stderr
    assert list_living_processes(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    running = start_run(write_job(tmp_path, ["python", str(SCRIPT), "100000", "none", "0"]), tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 4)
    assert len(list_living_processes(tmp_path)) >= 9  # topkube run, and a front and a script per rank
    running.send_signal(number)
    ended = finish_run(running)
    assert ended.returncode == code
    assert "interrupted" in ended.stdout
    assert "steps" in ended.stdout  # the summary of what was done so far
    assert "error" not in ended.stderr
    assert list_living_processes(tmp_path) == []


def test_ranks_can_save_their_state_on_a_signal(tmp_path: Path) -> None:
    handler = "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0)))"
    script = f"import signal, sys, time; {handler}; print('up'); time.sleep(999)"
    running = start_run(write_job(tmp_path, ["python", "-c", script], workers=1), tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 2)
    running.send_signal(signal.SIGTERM)
    assert finish_run(running).returncode == 143
    assert read_output(tmp_path / "run").count("saved") == 2


def test_a_rank_that_ignores_signals_is_killed_by_the_second_signal(tmp_path: Path) -> None:
    script = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('up'); time.sleep(999)"
    running = start_run(write_job(tmp_path, ["python", "-c", script], workers=1), tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 2)
    running.send_signal(signal.SIGINT)
    assert running.stdout is not None
    assert any("press Ctrl-C again to kill them" in line for line in running.stdout)
    assert len(list_living_processes(tmp_path)) >= 3  # topkube run and two ranks
    running.send_signal(signal.SIGINT)
    assert finish_run(running, 8).returncode == 130  # well before the grace of 10 s is over
    assert list_living_processes(tmp_path) == []


def test_nothing_is_left_when_topkube_run_itself_is_killed(tmp_path: Path) -> None:
    running = start_run(write_job(tmp_path, ["python", str(SCRIPT), "100000", "none", "0"]), tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 4)
    running.kill()
    running.communicate()
    wait_for(lambda: list_living_processes(tmp_path) == [])


def test_children_of_ranks_end_too(tmp_path: Path) -> None:
    """Data loaders and all other processes that a rank starts end, even in a separate session."""
    children = "[subprocess.Popen(['sleep', '1000'], start_new_session=own) for own in (True, False)]"
    script = f"import subprocess, os; {children}; os._exit(9)"
    ended = run_job(write_job(tmp_path, ["python", "-c", script], workers=1), tmp_path)
    assert ended.returncode == 9
    assert list_living_processes(tmp_path) == []


def test_without_matplotlib_a_run_draws_no_plot(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    job = write_job(tmp_path, ["python", str(SCRIPT), "5", "none", "0"], workers=1)
    ended = run_job(job, tmp_path, environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "matplotlib is not installed" in ended.stdout


def test_an_unusable_variable_is_named_before_anything_starts(tmp_path: Path) -> None:
    environment = {**os.environ, "TOPKUBE_DEADLINE_SECONDS": "soon"}
    ended = run_job(write_job(tmp_path, ["true"]), tmp_path, environment=environment)
    assert ended.returncode == 2
    assert "TOPKUBE_DEADLINE_SECONDS='soon' is not a number" in ended.stderr


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    """nohup lets a run go on when its terminal is closed."""
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    go = tmp_path / "go"
    script = f"import os, time\nprint('up')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    job = write_job(tmp_path, ["python", "-c", script], workers=1)
    command = [sys.executable, "-c", code, *build_command(job, tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 2)
    running.send_signal(signal.SIGHUP)
    go.touch()
    ended = finish_run(running)
    assert ended.returncode == 0, ended.stderr
    assert "succeeded" in ended.stdout


def test_a_signal_after_the_end_of_the_ranks_ends_only_the_printing(tmp_path: Path) -> None:
    """Nobody reads the output of `topkube run` until the ranks have ended."""
    running = start_run(
        write_job(tmp_path, ["python", "-c", "print(('x' * 99 + '\\n') * 200_000)"], workers=1), tmp_path
    )
    wait_for(lambda: len(list((tmp_path / "run").glob("rank-?.json"))) == 2)
    wait_for(lambda: len(list_living_processes(tmp_path)) == 1)  # topkube run
    running.send_signal(signal.SIGINT)
    ended = finish_run(running)
    assert ended.returncode == 0, ended.stderr
    assert "tiny succeeded" in ended.stdout
    assert f"the rest of the output is in {tmp_path}/run/rank-*.log" in ended.stdout
    assert ended.stdout.count("x" * 99) < 200_000
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "succeeded"


def test_two_runs_cannot_use_one_directory(tmp_path: Path) -> None:
    running = start_run(write_job(tmp_path, ["python", str(SCRIPT), "100000", "none", "0"]), tmp_path)
    wait_for(lambda: read_output(tmp_path / "run").count("up") == 4)
    logs = {path: path.read_text() for path in (tmp_path / "run").glob("rank-*.log")}
    second = run_job(write_job(tmp_path, ["true"]), tmp_path)
    assert second.returncode == 2
    assert "another run uses" in second.stderr
    for path, log in logs.items():
        assert path.read_text().startswith(log)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert finish_run(running).returncode == 130


def test_a_run_that_failed_before_its_ranks_started_can_be_repeated(tmp_path: Path) -> None:
    environment = {**os.environ, "TOPKUBE_DEADLINE_SECONDS": "soon"}
    job = write_job(tmp_path, ["true"], workers=1)
    assert run_job(job, tmp_path, environment=environment).returncode == 2
    ended = run_job(job, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = TrainingJob.from_yaml(write_job(tmp_path, ["true"]))
    now = time.localtime()
    with open_fresh_directory(None, job, now) as first, open_fresh_directory(None, job, now) as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()


def test_the_failure_of_a_rank_is_reported_although_the_summary_cannot_be_written(tmp_path: Path) -> None:
    script = (
        "import os; os.mkdir(os.environ['TOPKUBE_RUN_DIRECTORY'] + '/summary.json'); raise ValueError('the real error')"
    )
    ended = run_job(write_job(tmp_path, ["python", "-c", script], workers=1, slotsPerWorker=1), tmp_path)
    assert ended.returncode == 1
    assert "the real error" in ended.stderr
    assert "the summary cannot be written" in ended.stdout


def test_files_that_a_script_writes_into_the_run_directory_do_not_end_the_run(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, time\n"
        "folder = pathlib.Path(os.environ['TOPKUBE_RUN_DIRECTORY'])\n"
        "(folder / 'rank-0.json').write_text('{')\n"
        "(folder / 'progress.jsonl').write_text('[1]\\n')\n"
        "time.sleep(1)  # the run reads its directory several times\n"
        "print('the end')\n"
    )
    ended = run_job(write_job(tmp_path, ["python", "-c", script], workers=1, slotsPerWorker=1), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the end" in ended.stdout
    assert "progress can no longer be read: this is not the record of a step" in ended.stdout


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    ended = run_job(write_job(tmp_path, ["true"]), tmp_path)
    assert ended.returncode == 2
    assert "cannot be written" in ended.stderr


def test_a_directory_with_a_persons_own_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("mine")
    ended = run_job(write_job(tmp_path, ["true"]), tmp_path)
    assert ended.returncode == 2
    assert "is not empty, and it is not the directory of an earlier run" in ended.stderr
    assert (tmp_path / "run" / "job.yaml").read_text() == "mine"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "topkube.cli", "run", str(tmp_path / "none.yaml")]
    plain = subprocess.run(command, capture_output=True, text=True)
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True)
    assert plain.returncode == 2
    assert plain.stderr.startswith("error: ")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_modules_of_the_working_directory_are_not_imported_by_topkube(tmp_path: Path) -> None:
    """Anybody may be able to write there, as in /tmp. The script sees the same sys.path as with `python script.py`."""
    for name in ("selectors", "signal", "json", "mpi4py", "topkube"):
        (tmp_path / f"{name}.py").write_text("import sys; sys.exit(f'imported by {sys.orig_argv}')")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.py").write_text("import sys; print(sys.path)")
    plain = subprocess.run([sys.executable, "own/train.py"], capture_output=True, text=True, cwd=tmp_path, check=True)
    command = [sys.executable, "-P", "-m", "topkube.cli", "run", "--run-directory", "run", "own/train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert read_output(tmp_path / "run") == plain.stdout


def test_a_module_of_the_working_directory_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("import sys; print(sys.path[0])")
    command = [sys.executable, "-P", "-m", "topkube.cli", "run", "--run-directory", "run", "-m", "own_module"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert read_output(tmp_path / "run") == f"{tmp_path}\n"
