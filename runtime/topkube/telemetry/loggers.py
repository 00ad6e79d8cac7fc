"""Loggers of the libraries that people already use: TensorBoard, MLflow and Weights & Biases get the numbers of each
step from rank 0. docs/loggers.md explains them.

A logger never ends training: if it fails, a message is printed once, and training continues without it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from topkube.environment import choose_wandb_mode
from topkube.errors import SettingsError
from topkube.installation import build_install_command
from topkube.settings import Settings
from topkube.telemetry.progress import ProgressWriter, StepRecord

_FOLDER = "logs"
"""Name of the folder of all loggers, in the folder of the checkpoints or in the run's directory."""


class Logger(Protocol):
    """Takes the step records of a run."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def list_values(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each number that loggers get from a step."""
    if record.loss is not None:
        yield "train/loss", record.loss
    yield "train/epoch", float(record.epoch)
    yield "train/samples_per_second", record.samples_per_second
    yield "train/skipped_steps", float(record.skipped_steps)
    yield "exchange/density", record.density
    yield "exchange/bytes_within_nodes", float(record.intra_bytes)
    yield "exchange/bytes_between_nodes", float(record.inter_bytes)
    for phase, seconds in record.seconds.items():
        yield f"seconds/{phase}", seconds


class TensorBoard:
    """Event files in `folder`/tensorboard."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(folder / "tensorboard"))

    def write(self, record: StepRecord) -> None:
        for name, value in list_values(record):
            self._writer.add_scalar(name, value, record.step, wall_time=record.time)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment that has the job's name: on the server that MLFLOW_TRACKING_URI names, or in an SQLite
    file in `folder`. A restart continues the run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        if not mlflow.environment_variables.MLFLOW_TRACKING_URI.get():
            mlflow.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        self._client: Any = MlflowClient()
        stored = folder / "mlflow-run"
        if stored.exists():
            self._run = stored.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, "RUNNING")
            return
        name = settings.job_name or "topkube"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment_id).info.run_id
        stored.write_text(self._run, encoding="utf-8")
        for key in ("algorithm", "density", "wire", "ranks_per_node"):
            self._client.log_param(self._run, key, getattr(settings, key))

    def write(self, record: StepRecord) -> None:
        from mlflow.entities import Metric

        time = round(record.time * 1000)
        metrics = [Metric(name, value, time, record.step) for name, value in list_values(record)]
        self._client.log_batch(self._run, metrics, synchronous=False)

    def close(self) -> None:
        import mlflow

        mlflow.flush_async_logging()
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of Weights & Biases: offline in `folder`/wandb, unless WANDB_MODE or WANDB_API_KEY is set. A restart
    continues the run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        import wandb

        name = settings.job_name or "topkube"
        mode: Any = choose_wandb_mode()
        self._run: Any = wandb.init(
            dir=str(folder),
            project=name,
            id=settings.job_uid or None,
            resume="allow" if settings.job_uid else None,
            mode=mode,
            config={"algorithm": settings.algorithm, "density": settings.density, "wire": settings.wire},
        )

    def write(self, record: StepRecord) -> None:
        self._run.log(dict(list_values(record)), step=record.step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, tuple[str, Callable[[Settings, Path], Logger]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
}
"""The library and the class of each logger."""


def parse_loggers(names: str) -> tuple[str, ...]:
    """Return the names of loggers in a list with commas. Raises SettingsError for an unknown name."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in LOGGERS:
            raise SettingsError(f"{name!r} is not a logger", next_step=f"choose among {', '.join(LOGGERS)}")
    return chosen


def check_loggers(names: str) -> tuple[str, ...]:
    """Return the names of loggers in a list with commas. Raises SettingsError for an unknown name, and if a logger's
    library is not installed."""
    chosen = parse_loggers(names)
    for name in chosen:
        library = LOGGERS[name][0]
        if importlib.util.find_spec(library) is None:
            raise SettingsError(
                f"the logger {name} cannot be used: {library} is not installed",
                next_step=f"{build_install_command(name)}, in the image of the job too",
            )
    return chosen


def find_log_folder(settings: Settings, run_path: Path) -> Path:
    """Return the folder of the loggers: TOPKUBE_LOG_DIRECTORY, or `logs` beside the checkpoints, which outlive the pods
    of a job, or `logs` in the run's directory."""
    if settings.log_directory:
        return Path(settings.log_directory)
    return (Path(settings.checkpoint_directory) if settings.checkpoint_directory else run_path) / _FOLDER


class StepWriter:
    """Writes the records of steps to the progress file of `run_path` and to the loggers in TOPKUBE_LOG."""

    def __init__(self, settings: Settings, run_path: Path) -> None:
        """Raises SettingsError as `check_loggers` does."""
        chosen = check_loggers(settings.log)
        self._progress = ProgressWriter(run_path)
        self._has_failed = False
        """True if the progress file could not be written."""
        self._loggers: dict[str, Logger] = {}
        for name in chosen:
            folder = find_log_folder(settings, run_path)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._loggers[name] = LOGGERS[name][1](settings, folder)
            except Exception as error:  # of another library: a full disk, a server that does not answer
                _report(name, error)

    def write(self, record: StepRecord) -> None:
        try:
            self._progress.write(record)
        except OSError as error:
            if not self._has_failed:
                print(
                    f"topkube: warning: steps are missing from the progress file: {error}", file=sys.stderr, flush=True
                )
            self._has_failed = True
        for name in list(self._loggers):
            self._try(name, lambda logger: logger.write(record))

    def close(self) -> None:
        self._progress.close()
        for name in list(self._loggers):
            self._try(name, lambda logger: logger.close())
        self._loggers.clear()

    def _try(self, name: str, action: Callable[[Logger], None]) -> None:
        try:
            action(self._loggers[name])
        except Exception as error:
            del self._loggers[name]
            _report(name, error)


def _report(name: str, error: Exception) -> None:
    print(
        f"topkube: warning: training continues without the logger {name}: {type(error).__name__}: {error}",
        file=sys.stderr,
        flush=True,
    )
