"""The interface of the TrainingClient's backends, for a cluster and for this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from topkube.errors import LaunchError
from topkube.job import TrainingJob
from topkube.source.packing import PackedSource
from topkube.telemetry.history import History

ENDED = ("Succeeded", "Failed")


class Backend(Protocol):
    """Starts jobs, and follows and ends them by name. Methods raise ClusterError for a job that does not exist."""

    def submit(self, job: TrainingJob, code: PackedSource, packages: tuple[str, ...]) -> None:
        """Start the job, whose ranks run in a copy of `code`."""

    def get(self, name: str) -> TrainingJob:
        """Return the job with its status."""

    def list(self) -> list[TrainingJob]:
        """Return all jobs."""

    def watch(self, name: str, seconds: float | None, history: History) -> Iterator[TrainingJob]:
        """Yield the job now and after changes, to its end, and add its steps to `history`. Raises TimeoutError after
        `seconds`."""

    def logs(self, name: str, follow: bool) -> Iterator[str]:
        """Yield the lines that ranks print, each after `[worker0.rank1] `."""

    def suspend(self, name: str, seconds: float) -> None:
        """Save a checkpoint, end the ranks and free their resources. Raises an error after `seconds`."""

    def resume(self, name: str) -> None:
        """Let a suspended job continue."""

    def delete(self, name: str, seconds: float) -> None:
        """End the job and remove it, with its pods or its files."""


def read_phase(job: TrainingJob) -> str:
    """Return the phase of a job: Pending until its status has one."""
    return (job.status.phase if job.status is not None else None) or "Pending"


def build_failure(job: TrainingJob) -> LaunchError:
    """Return the error of a failed job, with the exit code of the rank that failed first."""
    failure = job.status.first_failure if job.status is not None else None
    what = (failure.message or failure.reason if failure is not None else None) or "no reason is known"
    tail = f":\n\n{failure.log_tail}\n" if failure is not None and failure.log_tail else ""
    code = failure.exit_code if failure is not None and failure.exit_code else 1
    return LaunchError(
        f"the job {job.name} failed: {what}{tail}", exit_code=code, next_step=f"read client.logs({job.name!r})"
    )
