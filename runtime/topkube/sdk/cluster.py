"""Jobs on a Kubernetes cluster, by the functions of the command line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from topkube.cli.cluster import delete, logs, submit, suspend, sync
from topkube.cli.cluster.api import ClusterLocation, connect
from topkube.cli.cluster.jobs import find_job, list_jobs
from topkube.cli.cluster.log_options import LogOptions
from topkube.cli.cluster.watches import JobWatch
from topkube.errors import ClusterError, JobError
from topkube.job import TrainingJob
from topkube.sdk.backend import ENDED, read_phase
from topkube.sdk.display import add_progress
from topkube.source.packing import PackedSource
from topkube.telemetry.history import History


class ClusterBackend:
    """A backend for the cluster and the namespace of `location`. Raises ClusterError if there is no kubeconfig, or no
    client for Kubernetes."""

    def __init__(self, location: ClusterLocation) -> None:
        self._api = connect(location)
        self._location = ClusterLocation(location.kubeconfig, location.context, self._api.namespace)

    def submit(self, job: TrainingJob, code: PackedSource, packages: tuple[str, ...]) -> None:
        if submit.read_stored(self._api, job.name) is not None:
            raise ClusterError(
                f"there is a job {job.name} in namespace {self._api.namespace} already",
                next_step=f"client.delete({job.name!r}), or choose another name",
            )
        submit.apply_job(self._api, sync.add_code(job, code, packages), code)

    def get(self, name: str) -> TrainingJob:
        return _parse_job(find_job(self._api, name))

    def list(self) -> list[TrainingJob]:
        jobs = []
        for stored in list_jobs(self._api):
            try:
                jobs.append(_parse_job(stored))
            except JobError as error:
                warnings.warn(f"left out: {error}", stacklevel=3)
        return jobs

    def watch(self, name: str, seconds: float | None, history: History) -> Iterator[TrainingJob]:
        for stored in JobWatch(self._api, name, seconds).read_states():
            if stored is None:
                raise ClusterError(f"the job {name} was deleted before it ended", status=404)
            job = _parse_job(stored)
            add_progress(history, job.status.progress if job.status is not None else None)
            yield job
            if read_phase(job) in ENDED:
                return

    def logs(self, name: str, follow: bool) -> Iterator[str]:
        return logs.read_log_lines(LogOptions(name, self._location, follow=follow))

    def suspend(self, name: str, seconds: float) -> None:
        self._set_suspended(name, True, seconds)

    def resume(self, name: str) -> None:
        self._set_suspended(name, False, 0)

    def _set_suspended(self, name: str, suspended: bool, seconds: float) -> None:
        options = suspend.SuspendOptions([name], self._location, suspended, timeout_seconds=seconds)
        suspend.set_suspended(options, _print_nothing)

    def delete(self, name: str, seconds: float) -> None:
        delete.delete_jobs(delete.DeleteOptions([name], self._location, timeout_seconds=seconds), _print_nothing)


def _parse_job(stored: Mapping[str, Any]) -> TrainingJob:
    """Return a stored job. Raises JobError with its namespace and name: the cluster accepts invalid jobs while its
    webhook does not answer."""
    metadata = stored["metadata"]
    return TrainingJob.from_cluster(stored, f"the stored job {metadata.get('namespace')}/{metadata['name']}")


def _print_nothing(_: str) -> None:
    """Print nothing: the caller of a method sees that it returned."""
