"""Jobs on this machine. Each is a `topkube run` in a folder of its own.

A job belongs to the process that started it: its ranks end with that process, also if it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from topkube.environment import copy_environment
from topkube.errors import ClusterError
from topkube.job import FirstFailure, Progress, Status, TrainingJob
from topkube.launch.output.rank_report import find_log_path
from topkube.sdk.backend import ENDED, read_phase
from topkube.sdk.local_run import build_command
from topkube.source.archive import unpack_archive
from topkube.source.packing import ARCHIVE_KEY, PackedSource
from topkube.telemetry.history import History, LogFollower, ProgressReader
from topkube.telemetry.progress import PROGRESS_FILE, StepRecord

_CHECK_SECONDS = 0.1
_END_SECONDS = 60.0
"""The time in which `topkube run` must end its ranks. It kills them itself after 10 to 25 s."""
JOB_FILE, RUN_FOLDER, SOURCE_FOLDER, OUTPUT_FILE = "job.yaml", "run", "source", "topkube-run.log"


@dataclass
class _LocalJob:
    """A job of this process: its definition, its folder and its process. `suspended` is True if the user has suspended
    it."""

    job: TrainingJob
    folder: Path
    process: subprocess.Popen[bytes]
    suspended: bool = False

    def __post_init__(self) -> None:
        self.restart(self.process)

    def restart(self, process: subprocess.Popen[bytes]) -> None:
        """Follow another process, which replaces the files of the run."""
        self.process, self.suspended = process, False
        self._reader, self._history = ProgressReader(self.run_folder), History()

    @property
    def run_folder(self) -> Path:
        return self.folder / RUN_FOLDER

    def read_history(self) -> History:
        """Return the history of the run up to now. Only new records are read."""
        for record in _read_new_records(self._reader):
            self._history.add(record)
        return self._history

    def follow_logs(self) -> list[LogFollower]:
        """Return a reader of the log of each rank, from its start."""
        return [LogFollower(find_log_path(self.run_folder, rank)) for rank in range(self.job.ranks)]


class LocalBackend:
    """A backend for this machine. The folders of jobs are in `directory`, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._jobs: dict[str, _LocalJob] = {}
        atexit.register(self._end_all)

    def submit(self, job: TrainingJob, code: PackedSource, packages: tuple[str, ...]) -> None:
        folder = self.directory / job.name
        if job.name in self._jobs:
            raise ClusterError(
                f"there is a job {job.name} already, in {folder}",
                next_step=f"client.delete({job.name!r}), or choose another name",
            )
        if folder.exists():
            raise ClusterError(
                f"there is a folder {folder} already",
                cause="it holds a job of an earlier process",
                next_step="remove the folder, or choose another name",
            )
        if missing := _list_missing_packages(packages):
            warnings.warn(
                f"{', '.join(missing)}: not installed here, and the local backend installs nothing. "
                f"Next: pip install {' '.join(missing)}",
                stacklevel=4,
            )
        folder.mkdir(parents=True)
        (folder / JOB_FILE).write_text(job.to_yaml(), encoding="utf-8")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            archive = Path(scratch) / ARCHIVE_KEY
            archive.write_bytes(code.data)
            unpack_archive(archive, folder / SOURCE_FOLDER, ARCHIVE_KEY)
        self._jobs[job.name] = _LocalJob(job, folder, _start_run(folder))

    def get(self, name: str) -> TrainingJob:
        local_job = self._find_job(name)
        code = local_job.process.poll()  # before the records: those of a run that has ended are complete
        return local_job.job.model_copy(update={"status": _build_status(local_job, code, local_job.read_history())})

    def list(self) -> list[TrainingJob]:
        return [self.get(name) for name in self._jobs]

    def watch(self, name: str, seconds: float | None, history: History) -> Iterator[TrainingJob]:
        local_job = self._find_job(name)
        process, reader = local_job.process, ProgressReader(local_job.run_folder)
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        last_status = None
        while True:
            job = self.get(name)
            if process is not local_job.process:  # resumed: the files are those of another process
                process, reader = local_job.process, ProgressReader(local_job.run_folder)
            for record in _read_new_records(reader):
                history.add(record)
            if job.status != last_status:
                last_status = job.status
                yield job
            if read_phase(job) in ENDED:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(_CHECK_SECONDS)

    def logs(self, name: str, follow: bool) -> Iterator[str]:
        local_job = self._find_job(name)
        slots = local_job.job.spec.slots_per_worker
        process, followers = local_job.process, local_job.follow_logs()

        def add_prefix(rank: int, lines: list[str]) -> Iterator[str]:
            yield from (f"[worker{rank // slots}.rank{rank}] {line}" for line in lines)

        while follow:
            has_ended = local_job.process.poll() is not None and not local_job.suspended
            if process is not local_job.process:  # resumed: the files are those of another process
                process, followers = local_job.process, local_job.follow_logs()
            for rank, follower in enumerate(followers):
                yield from add_prefix(rank, follower.read())
            if has_ended:
                break
            time.sleep(_CHECK_SECONDS)
        for rank, follower in enumerate(followers):
            for lines in follower.finish():
                yield from add_prefix(rank, lines)

    def suspend(self, name: str, seconds: float) -> None:
        local_job = self._find_job(name)
        self._refuse_ended(local_job)
        local_job.suspended = True
        _end_run(local_job.process, seconds)

    def resume(self, name: str) -> None:
        local_job = self._find_job(name)
        self._refuse_ended(local_job)
        if local_job.suspended:
            # If `suspend` ran out of time, the ranks still save their checkpoint.
            _end_run(local_job.process, _END_SECONDS)
            # Else readers would mix old and new records and lines.
            (local_job.run_folder / PROGRESS_FILE).unlink(missing_ok=True)
            for rank in range(local_job.job.ranks):
                find_log_path(local_job.run_folder, rank).unlink(missing_ok=True)
            local_job.restart(_start_run(local_job.folder))

    def delete(self, name: str, seconds: float) -> None:
        local_job = self._find_job(name)
        _end_run(local_job.process, seconds)
        del self._jobs[name]
        if local_job.folder.exists():  # somebody may have removed it
            shutil.rmtree(local_job.folder)

    def _refuse_ended(self, local_job: _LocalJob) -> None:
        phase = read_phase(self.get(local_job.job.name))
        if phase in ENDED:
            name = local_job.job.name
            raise ClusterError(
                f"the job {name} is {phase}: a finished job cannot be suspended or resumed",
                next_step=f"client.delete({name!r}), and train again",
            )

    def _find_job(self, name: str) -> _LocalJob:
        if name not in self._jobs:
            listed_jobs = f"; jobs are {', '.join(self._jobs)}" if self._jobs else "; there are no jobs"
            raise ClusterError(
                f"there is no job {name} of this process{listed_jobs}",
                status=404,
                cause="local jobs belong to the client that started them",
                next_step=f"the folders in {self.directory} hold earlier runs",
            )
        return self._jobs[name]

    def _end_all(self) -> None:
        for local_job in self._jobs.values():
            with contextlib.suppress(ClusterError):
                _end_run(local_job.process, _END_SECONDS)


def _read_new_records(reader: ProgressReader) -> list[StepRecord]:
    """Return the records since the last call; none if the script has written something else into their file."""
    try:
        return reader.read()
    except (OSError, ValueError):
        return []


def _start_run(folder: Path) -> subprocess.Popen[bytes]:
    """Start `topkube run` for the job in `folder`."""
    command = build_command([str(folder / JOB_FILE), "--run-directory", str(folder / RUN_FOLDER), "--no-plot"])
    with (folder / OUTPUT_FILE).open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=folder / SOURCE_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_build_environment(),
            start_new_session=True,  # Ctrl-C in a notebook interrupts the cell, not the job
        )


def _build_environment() -> dict[str, str]:
    """Return the environment of `topkube run`. Its Python finds the topkube of this process, also from a checkout."""
    environment = copy_environment()
    paths = [path for path in sys.path if path and os.path.isdir(os.path.join(path, "topkube"))]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH", "")])])
    return environment


def _end_run(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End the run: its ranks may save a checkpoint. Raises ClusterError if it does not end within `seconds`."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the ranks did not end within {seconds:g} s", cause="they save a large checkpoint", next_step="try again"
        ) from None


def _build_status(local_job: _LocalJob, code: int | None, history: History) -> Status:
    """Return the status of a job, with the phases of a job on a cluster. `code` is None while the process runs."""
    last = history.last
    progress = None
    if last is not None:
        total, eta = last.total_steps, history.estimate_seconds_left()
        progress = Progress(
            step=last.step,
            total_steps=total,
            percent=min(100, 100 * last.step // total) if total else None,
            eta_seconds=round(eta) if eta is not None else None,
            loss=f"{last.loss:.6g}" if last.loss is not None else None,
            samples_per_second=last.samples_per_second,
            checkpoint_step=last.checkpoint_step,
        )
    if code == 0:
        return Status(phase="Succeeded", progress=progress)
    if local_job.suspended:
        return Status(phase="Suspended" if code is not None else "Running", progress=progress)
    if code is None:
        return Status(phase="Running" if last is not None or _has_logs(local_job) else "Starting", progress=progress)
    return Status(phase="Failed", progress=progress, first_failure=_read_first_failure(local_job, code))


def _has_logs(local_job: _LocalJob) -> bool:
    return find_log_path(local_job.run_folder, 0).exists()


def _read_first_failure(local_job: _LocalJob, code: int) -> FirstFailure:
    """Return why a run failed: by its summary, or by what `topkube run` printed."""
    code = code if code > 0 else 128 - code
    try:
        summary = json.loads((local_job.run_folder / "summary.json").read_text(encoding="utf-8"))
        rank = summary.get("firstFailure") or {}
        return FirstFailure(
            rank=rank.get("rank"),
            exit_code=rank.get("exitCode") or code,
            reason="Error",
            message=(summary.get("failure") or "")[:2048] or None,
            log_tail="\n".join(rank.get("tail") or [])[-4096:] or None,
        )
    except (OSError, ValueError):
        try:
            text = (local_job.folder / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError as error:  # somebody has removed the folder
            text = f"{error.filename}: {error.strerror}"
        return FirstFailure(exit_code=code, reason="LaunchFailed", message=text.strip()[-2048:] or None)


def _list_missing_packages(packages: tuple[str, ...]) -> list[str]:
    """Return the requirements whose package is not installed here."""
    missing = []
    for requirement in packages:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
    return missing
