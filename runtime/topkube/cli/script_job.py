"""The job of `topkube run` and `topkube submit`: a TrainingJob from a file, or from a script and options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkube import __version__
from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.template import find_worker_container
from topkube.job.training_job import API_VERSION, KIND
from topkube.settings import Settings
from topkube.telemetry.loggers import parse_loggers

IMAGE = f"topkube/runtime:{__version__}"
"""The image of a script's job on a cluster, unless --image names another."""
_JOB_FILES = (".yaml", ".yml", ".json")
_LONGEST_NAME = 63
LOG_VARIABLE = Settings.__dataclass_fields__["log"].metadata["variable"]


@dataclass(frozen=True)
class Target:
    """The program that a command runs: `program` is a TrainingJob's file, a script, or a module if `is_module`.
    `arguments` follow `--`. `aggregation` holds the fields of spec.aggregation that options set."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    workers: int | None = None
    slots: int | None = None
    name: str | None = None
    image: str | None = None
    checkpoint_every: int | None = None
    loggers: str | None = None
    aggregation: Mapping[str, Any] = field(default_factory=dict)
    root: Path | None = None
    """The folder that is sent to the pods: a script's path is relative to it. None: paths stay as they are."""

    @classmethod
    def from_command_line(
        cls,
        program: str,
        arguments: Sequence[str] | None,
        *,
        module: bool,
        workers: int | None,
        slots: int | None,
        algorithm: str | None,
        density: float | None,
        wire: str | None,
        warmup_steps: int | None,
        checkpoint_every: int | None,
        log: str | None,
        name: str | None,
        image: str | None,
        root: Path | None = None,
    ) -> Target:
        """Return the target of the options that `topkube run` and `topkube submit` share."""
        chosen = {"algorithm": algorithm, "density": density, "wire": wire, "warmupSteps": warmup_steps}
        return cls(
            program=program,
            arguments=tuple(arguments or ()),
            is_module=module,
            workers=workers,
            slots=slots,
            name=name,
            image=image,
            checkpoint_every=checkpoint_every,
            loggers=log,
            aggregation={field: value for field, value in chosen.items() if value is not None},
            root=root,
        )

    @property
    def is_job_file(self) -> bool:
        return not self.is_module and self.program.endswith(_JOB_FILES)


def load_job(target: Target) -> TrainingJob:
    """Return the job that `target` describes. Options replace the fields of a file.

    Raises JobError if the file has mistakes, if the script does not exist, or if options do not fit a file.
    """
    if not target.is_job_file:
        return _build_script_job(target)
    for option, value in (("arguments after --", target.arguments), ("--name", target.name), ("--image", target.image)):
        if value:
            raise JobError(
                f"{option} cannot be used with the file of a TrainingJob",
                next_step=f"change {target.program}; these options are for scripts, such as train.py",
            )
    job = TrainingJob.from_yaml(Path(target.program))
    if target.workers is not None or target.slots is not None:
        job = job.scaled(target.workers, target.slots)
    if target.aggregation or target.checkpoint_every is not None:
        data = job.to_dict()
        data["spec"]["aggregation"] = {**(data["spec"].get("aggregation") or {}), **target.aggregation}
        if target.checkpoint_every is not None:
            before = data["spec"].get("checkpoint") or _build_checkpoint(job.name)
            data["spec"]["checkpoint"] = {**before, "everySteps": target.checkpoint_every}
        job = TrainingJob.parse(data)
    return _add_loggers(job, target.loggers)


def _build_script_job(target: Target) -> TrainingJob:
    name = target.name or make_job_name(target.program if target.is_module else Path(target.program).stem)
    container: dict[str, Any] = {
        "name": "worker",
        "image": target.image or IMAGE,
        "command": [_escape_variables(word) for word in _build_command(target)],
    }
    if target.arguments:
        container["args"] = [_escape_variables(word) for word in target.arguments]
    spec: dict[str, Any] = {
        "workers": 1 if target.workers is None else target.workers,
        "slotsPerWorker": 1 if target.slots is None else target.slots,
        "template": {"spec": {"containers": [container]}},
    }
    if target.aggregation:
        spec["aggregation"] = dict(target.aggregation)
    if target.checkpoint_every is not None:
        spec["checkpoint"] = {**_build_checkpoint(name), "everySteps": target.checkpoint_every}
    job = TrainingJob.parse({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})
    return _add_loggers(job, target.loggers)


def _add_loggers(job: TrainingJob, loggers: str | None) -> TrainingJob:
    """Return the job with the loggers in its container's environment. Raises SettingsError for an unknown logger, with
    which the ranks would fail in their pods."""
    if loggers is None:
        return job
    parse_loggers(loggers)
    data = job.to_dict()
    container = find_worker_container(data["spec"]["template"])
    others = [entry for entry in container.get("env") or [] if entry["name"] != LOG_VARIABLE]
    container["env"] = [*others, {"name": LOG_VARIABLE, "value": loggers}]
    return TrainingJob.parse(data)


def _build_command(target: Target) -> list[str]:
    path = Path(target.program)
    if target.is_module:
        if path.suffix == ".py" and _is_file(path if target.root is None else target.root / path):
            raise JobError(
                f"-m {target.program} names a file, not a module",
                cause="python -m would run the whole script as a package of this name, and then fail",
                next_step=f"pass the script without -m: {target.program}",
            )
        return ["python", "-m", target.program]
    if not _is_file(path):
        is_folder = bool(target.program) and os.path.isdir(path)
        raise JobError(
            f"{target.program!r} is a folder" if is_folder else f"{target.program!r} does not exist",
            cause="" if is_folder else "the path is misspelt, or it is relative to another directory",
            next_step="pass a script (train.py), the file of a TrainingJob (job.yaml), or -m MODULE",
        )
    program = target.program if target.root is None else _find_path_in(target.root, path)
    if path.suffix == ".py":
        return ["python", program]
    if not os.access(path, os.X_OK):
        raise JobError(
            f"{target.program} is neither a Python script, nor the file of a TrainingJob, nor executable",
            cause="Python scripts end in .py, and files of a TrainingJob in .yaml, .yml or .json",
            next_step="rename the file, or make it executable: chmod +x",
        )
    return [program if "/" in program else f"./{program}"]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is longer than a file name may be
        return False


def _find_path_in(root: Path, path: Path) -> str:
    """Return the path of a script in the folder that is sent. Raises JobError if it is not in this folder."""
    if not root.is_dir():
        raise JobError(f"{root} is not a folder", next_step="pass the folder of your code: --sync .")
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise JobError(
            f"{path} is not in the folder {root}, which is sent to the pods",
            next_step=f"send the folder of the script: --sync {path.parent}",
        ) from None


def _build_checkpoint(name: str) -> dict[str, Any]:
    return {"claimName": "checkpoints", "path": name}


def _escape_variables(word: str) -> str:
    """Return a word of a command in which Kubernetes replaces no $(NAME)."""
    return word.replace("$", "$$")


def make_job_name(program: str) -> str:
    """Return a valid name for the job of a script or module: my_train becomes my-train."""
    name = re.sub(r"[^a-z0-9]+", "-", program.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    return name if name[:1].isalpha() else f"train-{name}".rstrip("-")
