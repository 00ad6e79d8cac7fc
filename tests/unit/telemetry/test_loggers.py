"""Loggers get the numbers of each step. Training continues if a logger fails."""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from topkube.cli.script_job import Target, load_job
from topkube.environment import choose_wandb_mode
from topkube.errors import SettingsError
from topkube.launch.local import build_rank_environment
from topkube.launch.mpi import mpi_library
from topkube.settings import Settings
from topkube.telemetry import loggers
from topkube.telemetry.loggers import StepWriter, check_loggers, find_log_folder
from topkube.telemetry.progress import StepRecord, read_records

RECORDS = [
    StepRecord(
        step=step, total_steps=3, loss=loss, samples=8, samples_per_second=16.0, inter_bytes=100, time=1e9 + step
    )
    for step, loss in [(1, 2.5), (2, None), (3, 1.5)]
]


def write_all(run_path: Path, **settings: Any) -> None:
    writer = StepWriter(Settings(job_name="tiny", **settings), run_path)
    for record in RECORDS:
        writer.write(record)
    writer.close()


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs topkube[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_all(tmp_path, log="tensorboard")
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    losses = [(event.wall_time, event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("train/loss")]
    assert losses == [(1e9 + 1, 1, 2.5), (1e9 + 3, 3, 1.5)], "a step without a loss has no value"
    assert len(events.Tensors("exchange/bytes_between_nodes")) == 3


def test_mlflow_has_every_step_and_a_restart_continues_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs topkube[mlflow]")
    from mlflow.tracking import MlflowClient

    write_all(tmp_path, log="mlflow")
    write_all(tmp_path, log="mlflow", attempt=2)
    client = MlflowClient(f"sqlite:///{tmp_path / 'logs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "auto"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {(metric.step, metric.value) for metric in history} == {(1, 2.5), (3, 1.5)}


def test_weights_and_biases_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs topkube[wandb]")
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    write_all(tmp_path, log="wandb", job_uid="uid-1")
    (stored,) = (tmp_path / "logs" / "wandb").glob("offline-run-*-uid-1/*.wandb")
    end = time.monotonic() + 120
    while b"train/loss" not in stored.read_bytes():  # a process of the library writes the file
        assert time.monotonic() < end, "the run has no loss"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("environment", "mode"), [({}, "offline"), ({"WANDB_API_KEY": "key"}, None), ({"WANDB_MODE": "online"}, None)]
)
def test_weights_and_biases_is_offline_without_a_key(environment: dict[str, str], mode: str | None) -> None:
    assert choose_wandb_mode(environment) == mode


class FailingLogger:
    """A logger whose server ends after the first step."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.steps = 0

    def write(self, record: StepRecord) -> None:
        self.steps += 1
        if self.steps > 1:
            raise ConnectionError("no answer")

    def close(self) -> None:
        raise AssertionError("a logger that failed is not used again")


def test_a_logger_that_fails_is_reported_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", ("json", FailingLogger))
    write_all(tmp_path, log="tensorboard")
    output = capsys.readouterr().err
    assert output.count("continues without the logger tensorboard: ConnectionError: no answer") == 1
    assert len((tmp_path / "progress.jsonl").read_text().splitlines()) == 3


def test_training_continues_if_the_folder_of_a_logger_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    write_all(tmp_path, log="tensorboard", log_directory=str(tmp_path / "file" / "logs"))
    assert "continues without the logger tensorboard" in capsys.readouterr().err
    assert len((tmp_path / "progress.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_ends_no_training_and_steps_are_written_again_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = StepWriter(Settings(), tmp_path)
    records = [StepRecord(step, 9, choice="x" * 100) for step in range(1, 5)]
    writer.write(records[0])
    size = (tmp_path / "progress.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))  # a part of the next line fits
    try:
        writer.write(records[1])
        writer.write(records[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    writer.write(records[3])
    writer.close()
    assert capsys.readouterr().err.count("steps are missing from the progress file") == 1
    assert [record.step for record, _ in read_records(tmp_path / "progress.jsonl")] == [1, 4]


def test_mistakes_are_reported_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_loggers("") == ()
    with pytest.raises(SettingsError, match=r"'tensorbord' is not a logger.*tensorboard, mlflow, wandb"):
        check_loggers("tensorbord")
    monkeypatch.setitem(loggers.LOGGERS, "wandb", ("no_such_library", FailingLogger))
    with pytest.raises(SettingsError, match=r"no_such_library is not installed.*pip install .*\[wandb\]'"):
        check_loggers("wandb")


def test_logs_are_next_to_the_checkpoints(tmp_path: Path) -> None:
    """On a cluster, they are on the volume of the checkpoints."""
    assert find_log_folder(Settings(), tmp_path) == tmp_path / "logs"
    assert find_log_folder(Settings(checkpoint_directory="/claim/gpt"), tmp_path) == Path("/claim/gpt/logs")
    assert find_log_folder(Settings(log_directory="/mine", checkpoint_directory="/claim"), tmp_path) == Path("/mine")


def test_the_option_reaches_the_ranks_and_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    job = load_job(Target("train.py", loggers="tensorboard,mlflow"))
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    changed_job = load_job(Target("job.yaml", loggers="wandb"))
    for written, names in ((job, "tensorboard,mlflow"), (changed_job, "wandb")):
        assert json.dumps(written.to_dict()).count("TOPKUBE_LOG") == 1
        environment = build_rank_environment(written, mpi_library.find_mpi(), tmp_path / "run", {})
        assert Settings.from_environment(environment).log == names
