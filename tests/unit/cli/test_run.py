"""`topkube run` from end to end: four real ranks, two nodes, without torch."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from local_runs import SCRIPT, build_command, list_living_processes, run_job, write_job


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Return a finished run, whose output is its summary as JSON, and the directory of the run."""
    directory = tmp_path_factory.mktemp("finished")
    job = write_job(directory, ["python", str(SCRIPT), "50", "$(MODE)", "0"])
    job.write_text(
        job.read_text().replace(
            "- args:", "- env: [{name: LEVEL, value: '3'}, {name: MODE, value: none}]\n        args:"
        )
    )
    environment = {**os.environ, "TOPKUBE_DENSITY": "0.7"}
    environment.pop("OMP_NUM_THREADS", None)
    return run_job(job, directory, "-o", "json", environment=environment), directory / "run"


def test_the_summary_of_a_run_is_printed(finished_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, directory = finished_run
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["outcome"] == "succeeded"
    assert (summary["steps"], summary["totalSteps"]) == (50, 50)
    assert summary["firstLoss"] > 1 > summary["finalLoss"]
    assert summary["samplesPerSecond"] > 0
    assert summary["secondsPerStep"] == pytest.approx(
        {"waitForData": 0.001, "compute": 0.006, "select": 0.001, "insideNode": 0.001, "betweenNodes": 0.002}
    )
    # 50 steps x 100 bytes. A ring of 4 ranks has 2 of its 4 links between nodes, so dense is half of 50 x 10,000 bytes.
    assert (summary["bytesBetweenNodes"], summary["bytesDense"]) == (5_000, 250_000)
    assert summary["lossSteps"] == 10
    assert summary["firstFailure"] is None
    assert json.loads((directory / "summary.json").read_text()) == summary


def test_ranks_get_their_place_and_their_environment(
    finished_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, directory = finished_run
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    for rank in range(4):
        lines = (directory / f"rank-{rank}.log").read_text().splitlines()
        assert lines == [f"up {rank} {rank // 2} {threads} 3", "done"]
    record = json.loads((directory / "progress.jsonl").read_text().splitlines()[0])
    assert record["density"] == 0.01  # the density of the job, not that of the shell


def test_output_carries_node_and_rank(finished_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, _ = finished_run
    lines = ended.stderr.splitlines()
    for rank in range(4):
        assert f"[worker{rank // 2}.rank{rank}] done" in lines


def test_without_a_terminal_there_is_no_colour_and_no_bar(
    finished_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    ended, _ = finished_run
    assert "\x1b" not in ended.stderr + ended.stdout
    assert "━" not in ended.stderr
    assert re.search(r"^step 50/50  loss 0\.08  6,400 samples/s  5\.0 kB, 50x less than dense$", ended.stderr, re.M)


def test_the_plot_is_a_picture(finished_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    from matplotlib import image

    pixels = image.imread(finished_run[1] / "plot.png")
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 900
    colours = (255 * pixels[..., :3]).round().astype(int)
    for colour in ((0xC3, 0xCF, 0xDB), (0xE9, 0xA2, 0x3B), (0x4A, 0xA3, 0x7C), (0xCF, 0x4F, 0x4F), (0x2F, 0x6F, 0xB7)):
        assert (np.abs(colours - colour).max(axis=2) <= 1).sum() > 100, f"no area of colour {colour}"


def test_the_summary_is_a_table_and_options_replace_fields_of_the_job(tmp_path: Path) -> None:
    job = write_job(tmp_path, ["python", str(SCRIPT), "20", "none", "0"], mpiImplementation="OpenMPI")
    ended = run_job(job, tmp_path, "--workers", "1", "--slots", "3", "--no-plot")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("tiny: 1 x 3 ranks, hitopk at density 0.01, ")
    assert re.search(r"^steps +20 of 20$", ended.stdout, re.M)
    assert re.search(r"^sent inside the node +22 kB, 9.1x less than dense", ended.stdout, re.M)
    assert "tiny succeeded" in ended.stdout
    assert ended.stderr == ""
    assert not (tmp_path / "run" / "plot.png").exists()
    assert list_living_processes(tmp_path) == []


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    job = write_job(tmp_path, ["python", str(SCRIPT), "40", "none", "0"], workers=1)
    terminal, end_of_run = pty.openpty()
    command = build_command(job, tmp_path, "--no-plot")
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    running = subprocess.Popen(command, stdout=end_of_run, stderr=end_of_run, env=environment, cwd=tmp_path)
    os.close(end_of_run)
    seen = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        seen += data
    os.close(terminal)
    assert running.wait(280) == 0
    text = seen.decode()
    assert "━" in text
    assert "\x1b[" in text
    assert "step 40/40" in text
    assert "[worker0.rank1] " in text


def test_a_second_run_in_a_directory_starts_clean_but_keeps_checkpoints(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / "step-10").write_text("state")
    (directory / "mpiexec.log").write_text("")
    (directory / "rank-7.json").write_text('{"exit_code": 1}')
    (directory / "progress.jsonl").write_text('{"step": 999, "total_steps": 1000}\n')
    job = write_job(
        tmp_path, ["sh", "-c", "echo $TOPKUBE_CHECKPOINT_DIRECTORY"], workers=1, checkpoint={"claimName": "c"}
    )
    ended = run_job(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (directory / "checkpoints" / "step-10").read_text() == "state"
    assert (directory / "rank-0.log").read_text().strip() == str(directory / "checkpoints")
    assert not (directory / "rank-7.json").exists()
    assert "no steps were reported" in ended.stdout


def test_a_source_for_pods_has_no_effect_here_and_is_reported(tmp_path: Path) -> None:
    code = {"source": {"configMap": {"name": "code"}}, "setup": {"requirements": ["einops"]}}
    job = write_job(tmp_path, ["true"], workers=1, **code)
    ended = run_job(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "note: spec.source has no effect without a cluster; the ranks run in " in ended.stdout
    assert "note: spec.setup has no effect without a cluster" in ended.stdout


def test_a_run_without_run_progress_says_what_is_unknown(tmp_path: Path) -> None:
    """Rank 0 reports its steps as the optimizer does in a loop of its own."""
    lines = [
        "import os, pathlib, topkube",
        "from topkube.telemetry.progress import ProgressWriter, StepRecord",
        "topkube.init()",
        "if topkube.rank() == 0:",
        "    writer = ProgressWriter(pathlib.Path(os.environ['TOPKUBE_RUN_DIRECTORY']))",
        "    writer.write(StepRecord(1, None, time=1.0))",
        "    writer.write(StepRecord(2, None, time=2.0))",
    ]
    job = write_job(tmp_path, ["python", "-c", "\n".join(lines)])
    ended = run_job(job, tmp_path, "--no-plot")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^loss, times and bytes are unknown: use .* run\.progress", ended.stdout, re.M)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["samplesPerSecond"], summary["bytesSent"]) == (2, None, None)
    assert set(summary["secondsPerStep"].values()) == {None}
