"""`topkube run train.py`: a script becomes a TrainingJob, which also runs on a cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from topkube.cli.entry import run_app
from topkube.cli.script_job import IMAGE, Target, load_job, make_job_name
from topkube.errors import JobError, SettingsError
from topkube.job import TrainingJob

CHAR_GPT = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").write_text("print('trained')\n")


def test_a_dry_run_writes_a_job_that_can_be_applied(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--workers 2 --slots 3 --algorithm hitopk --density 0.05 --wire fp16 --warmup-steps 7"
    words = ["run", "train_it.py", *options.split(), "--checkpoint-every", "50", "--dry-run", "-o", "yaml"]
    assert run_app([*words, "--", "--epochs", "3", "--out", "$(HOME)"]) == 0
    output = capsys.readouterr()
    job = TrainingJob.from_yaml(output.out)
    assert (job.name, job.spec.workers, job.spec.slots_per_worker) == ("train-it", 2, 3)
    assert job.command == ["python", "train_it.py", "--epochs", "3", "--out", "$$(HOME)"], "Kubernetes replaces nothing"
    assert job.container["image"] == IMAGE
    aggregation = job.spec.aggregation
    assert (aggregation.algorithm, aggregation.density, aggregation.wire) == ("hitopk", 0.05, "fp16")
    assert aggregation.warmup_steps == 7
    assert job.spec.checkpoint is not None
    assert (job.spec.checkpoint.claim_name, job.spec.checkpoint.every_steps) == ("checkpoints", 50)
    assert f"the image {IMAGE} must contain train_it.py" in output.err
    assert not Path("runs").exists()


def test_a_dry_run_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", "-m", "package.train", "--image", "mine:1", "--dry-run", "-o", "json"]) == 0
    job = TrainingJob.parse(json.loads(capsys.readouterr().out))
    assert (job.name, job.command, job.container["image"]) == (
        "package-train",
        ["python", "-m", "package.train"],
        "mine:1",
    )


def test_yaml_is_the_format_of_a_job_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", "train_it.py", "-o", "yaml"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


def test_options_replace_the_fields_of_a_file() -> None:
    job = load_job(Target(str(CHAR_GPT), workers=3, aggregation={"algorithm": "dense"}, checkpoint_every=9))
    before = TrainingJob.from_yaml(CHAR_GPT)
    assert (job.spec.workers, job.spec.aggregation.algorithm) == (3, "dense")
    assert job.spec.aggregation.warmup_steps == before.spec.aggregation.warmup_steps
    assert job.spec.checkpoint is not None
    assert job.spec.checkpoint.every_steps == 9


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("nope.py"), "'nope.py' does not exist"),
        (Target(""), "'' does not exist"),
        (Target("n" * 300), "nnn' does not exist"),
        (Target("."), "'.' is a folder"),
        (Target("train_it.py", is_module=True), "Next: pass the script without -m: train_it.py"),
        (Target("train_it.py", root=Path("nope")), "nope is not a folder"),
        (Target("data.txt"), "is neither a Python script, nor the file of a TrainingJob, nor executable"),
        (Target(str(CHAR_GPT), arguments=("--epochs",)), "arguments after -- cannot be used with the file"),
        (Target(str(CHAR_GPT), image="mine:1"), "--image cannot be used with the file"),
        (Target("train_it.py", aggregation={"density": 3.0}), "spec.aggregation.density"),
    ],
)
def test_mistakes_are_explained(target: Target, message: str) -> None:
    Path("data.txt").write_text("1")
    with pytest.raises(JobError) as raised:
        load_job(target)
    assert message in str(raised.value)


def test_an_executable_runs_as_it_is() -> None:
    Path("start").write_text("#!/bin/sh\n")
    os.chmod("start", 0o755)
    assert load_job(Target("start")).command == ["./start"]


@pytest.mark.parametrize(
    ("program", "name"), [("My_Train", "my-train"), ("3d", "train-3d"), ("__", "train"), ("a" * 80, "a" * 63)]
)
def test_a_job_is_named_after_its_script(program: str, name: str) -> None:
    assert make_job_name(program) == name


def test_a_script_runs_with_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    Path("show.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])\n")
    assert run_app(["run", "show.py", "--workers", "2", "--no-plot", "--", "--epochs", "$3"]) == 0
    output = capfd.readouterr().out
    assert "[worker0.rank0] rank 0 ['--epochs', '$3']" in output
    assert "[worker1.rank1] rank 1 ['--epochs', '$3']" in output


def test_a_logger_that_does_not_exist_is_refused_before_the_job_reaches_a_cluster(tmp_path: Path) -> None:
    """Its ranks would fail in their pods, with a report of a setting that the user has never seen."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SettingsError, match=r"'tensorbord' is not a logger. Next: choose among tensorboard"):
        load_job(Target(str(tmp_path / "train.py"), loggers="tensorbord"))
