"""A run on this machine: mpiexec in a session of its own, watched, and nothing left of it when it is over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.launch.environment import defaults
from topkube.launch.mpi import Mpi
from topkube.launch.processes import (
    adopt_orphans,
    descendants,
    dies_with_parent,
    kill_descendants,
    reap_orphans,
    signal_all,
)
from topkube.launch.report import RankReport, diagnose, first_failure, read_all
from topkube.settings import Settings

GRACE_SECONDS = 10.0
"""Between asking a run to end and killing it: time for a checkpoint."""
MPIEXEC_LOG = "mpiexec.log"
_PERSONAL = (
    "simd",
    "threads",
    "deadline_seconds",
    "cache_directory",
    "cache_memory_directory",
    "cache_free_percent",
)
"""Settings that no job determines: the person's environment holds."""


def rank_environment(
    job: TrainingJob, mpi: Mpi, run_directory: Path, inherited: Mapping[str, str], deadline_seconds: float | None = None
) -> dict[str, str]:
    """The environment of each rank: this process's, then the container's plain entries, then what the job says.

    Raises SettingsError where a variable holds something unusable.
    """
    fields = Settings.__dataclass_fields__
    determined = {fields[name].metadata["variable"] for name in fields if name not in _PERSONAL}
    environment = {name: value for name, value in inherited.items() if name not in determined}
    environment.update(mpi.environment())
    defaults(environment, job.ranks)
    environment.update({name: value for name, value in job.plain_environment.items() if name not in determined})
    environment.update(
        job.environment(
            ranks_per_node=",".join([str(job.spec.slots_per_worker)] * job.spec.workers),
            run_directory=str(run_directory.resolve()),
            checkpoint_directory=str((run_directory / "checkpoints").resolve()) if job.spec.checkpoint else "",
        )
    )
    if deadline_seconds is not None:
        environment["TOPKUBE_DEADLINE_SECONDS"] = str(deadline_seconds)
    Settings.from_environment(environment)
    return environment


def rank_command(job: TrainingJob, environment: Mapping[str, str]) -> list[str]:
    """The job's command for this machine: `python` is this Python, $(NAME) is replaced as Kubernetes does."""
    command = [expanded(word, environment) for word in job.command]
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    return command


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """$(NAME) becomes the variable's value, an unknown name stays as it is, $$ is a dollar."""

    def value(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else environment.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^()]*)\)", value, word)


class LocalRun:
    """All ranks of one job on this machine. Use `with`: leaving it ends every process."""

    def __init__(self, job: TrainingJob, mpi: Mpi, run_directory: Path, environment: Mapping[str, str]) -> None:
        self.job, self.mpi, self.directory = job, mpi, run_directory
        self._environment = dict(environment)
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._others: frozenset[int] = frozenset()
        self._kill_at = float("inf")

    def __enter__(self) -> LocalRun:
        adopt_orphans()
        self._others = frozenset(descendants())
        shim = [sys.executable, "-m", "topkube.launch.rank", "--no-echo", "--"]
        command = self.mpi.command(self.job.ranks, [*shim, *rank_command(self.job, self._environment)])
        with (self.directory / MPIEXEC_LOG).open("wb") as log:
            self._mpiexec = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we end the rest in order
                preexec_fn=dies_with_parent(signal.SIGTERM),
            )
        return self

    def __exit__(self, *_: object) -> None:
        left = kill_descendants(self._others)
        self._process.wait()
        reap_orphans(self._others)
        if left:
            print(f"topkube run: could not end processes {left}", file=sys.stderr)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._mpiexec is not None, "used outside `with`"
        return self._mpiexec

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`; true when every process of the run has ended."""
        if time.monotonic() > self._kill_at:
            kill_descendants(self._others)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        reap_orphans(self._others | {self._process.pid})
        if not descendants(but=self._others):
            return True
        self._kill_at = min(self._kill_at, time.monotonic() + GRACE_SECONDS + 5)  # the keepers' own grace, and a little
        time.sleep(min(seconds, 0.05))
        return False

    def stop(self) -> None:
        """Asks all ranks to end; those that have not after GRACE_SECONDS are killed. A second call kills at once."""
        if self._kill_at <= time.monotonic() + GRACE_SECONDS:
            self._kill_at = 0.0
            return
        self._kill_at = time.monotonic() + GRACE_SECONDS
        signal_all([self._process.pid], signal.SIGTERM)

    @property
    def mpiexec_code(self) -> int | None:
        return self._process.returncode

    def node_of(self, rank: int) -> int:
        return rank // self.job.spec.slots_per_worker

    def failed_report(self) -> RankReport | None:
        """The report of the rank that failed first, None where none has."""
        return first_failure(read_all(self.directory, self.job.ranks))

    def failure(self) -> LaunchError | None:
        """Why the run failed, with the first failing rank's traceback and exit code; None where it did not."""
        report = self.failed_report()
        if report is not None:
            what, cause, next_step = diagnose(report, self.node_of(report.rank))
            lines = report.traceback or "\n".join(report.tail)
            return LaunchError(
                what + (":\n\n" + _indented(lines) + "\n" if lines else ""),
                exit_code=report.exit_code,
                cause=cause,
                next_step=next_step.replace("in the run directory", f"in {self.directory}"),
            )
        if self.mpiexec_code:
            said = (self.directory / MPIEXEC_LOG).read_text(errors="replace").strip()
            code = self.mpiexec_code if self.mpiexec_code > 0 else 128 - self.mpiexec_code
            return LaunchError(
                f"mpiexec ended with exit code {code}, and no rank says why"
                + (":\n\n" + _indented("\n".join(said.splitlines()[-20:])) + "\n" if said else ""),
                exit_code=code,
                cause="the ranks could not be started, or were killed together with their shims",
                next_step=f"read {self.directory / MPIEXEC_LOG}; try `topkube doctor`",
            )
        return None


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def fresh_directory(wanted: Path | None, job: TrainingJob, now: time.struct_time) -> Path:
    """The run's directory, made if need be: `wanted`, or runs/NAME-TIME. What an earlier run in it reported is removed;
    its checkpoints stay.

    Raises LaunchError where it cannot be written, or holds files that no run has left: they could be a person's own.
    """
    directory = wanted or Path("runs") / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', now)}"
    number = 1
    while wanted is None and directory.exists():
        number += 1
        directory = directory.with_name(f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', now)}-{number}")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MPIEXEC_LOG).exists():
        raise LaunchError(
            f"{directory} is not empty, and no earlier run's directory",
            exit_code=2,
            cause="the run would overwrite files there that have the names of its own",
            next_step="give a new directory with --run-directory",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for pattern in (
            "rank-*.json",
            "rank-*.log",
            "rank-*.part",
            "metrics-*.bin",
            "metrics-*.part",
            "progress.jsonl",
            MPIEXEC_LOG,
            "summary.json",
            "plot.png",
        ):
            for old in directory.glob(pattern):
                old.unlink()
        (directory / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run directory {directory} cannot be written: {error.strerror}",
            exit_code=2,
            next_step="give another with --run-directory",
        ) from None
    return directory


def is_this_python(command: list[str]) -> bool:
    """Whether the ranks run in this Python, so that its MPI can be checked before they start."""
    return os.path.realpath(command[0]) == os.path.realpath(sys.executable)
