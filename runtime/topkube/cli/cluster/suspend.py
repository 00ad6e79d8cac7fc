"""`topkube suspend` and `topkube resume`: set runPolicy.suspend of jobs, and print the step at which they continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from topkube.cli.cluster.api import FIELD_MANAGER, MERGE, Api, ClusterLocation, connect
from topkube.cli.cluster.jobs import FINISHED_PHASES, build_job_path, find_job, list_some_pods, print_line, read_phase
from topkube.cli.cluster.status import describe_newest_checkpoint
from topkube.errors import ClusterError

_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class SuspendOptions:
    """The options of the command line."""

    jobs: list[str]
    location: ClusterLocation
    suspend: bool
    wait: bool = True
    timeout_seconds: float = 300.0


def set_suspended(options: SuspendOptions, report: Callable[[str], None] = print_line) -> int:
    """Suspend or resume the jobs, and `report` what was done. If one name is wrong, no job is changed.

    Raises ClusterError if a job is finished, or if the pods of a suspended job do not end in time.
    """
    api = connect(options.location)
    jobs = [find_job(api, name) for name in options.jobs]
    for job in jobs:
        if read_phase(job) in FINISHED_PHASES:
            name = job["metadata"]["name"]
            raise ClusterError(
                f"the job {name} is {read_phase(job)}: a finished job cannot be suspended or resumed",
                next_step=f"topkube delete {name}, then submit it again; it continues from its newest checkpoint",
            )
    changed = [_change_job(api, job, options.suspend) for job in jobs]  # all of them, before the command waits for one
    deadline = time.monotonic() + options.timeout_seconds
    for before, job in zip(jobs, changed, strict=True):
        if options.suspend and options.wait:
            job = _wait_for_end_of_pods(api, job["metadata"]["name"], deadline, options.timeout_seconds)
        report(_describe_change(before, job, options.suspend))
    return 0


def _is_suspended(job: dict[str, Any]) -> bool:
    return bool((job["spec"].get("runPolicy") or {}).get("suspend"))


def _change_job(api: Api, job: dict[str, Any], suspend: bool) -> dict[str, Any]:
    """Suspend or resume one job. Return it as the server stores it."""
    if _is_suspended(job) == suspend:
        return job
    path, query = build_job_path(api, job["metadata"]["name"]), {"fieldManager": FIELD_MANAGER}
    return api.request("PATCH", path, query, {"spec": {"runPolicy": {"suspend": suspend}}}, MERGE).data


def _describe_change(before: dict[str, Any], job: dict[str, Any], suspend: bool) -> str:
    """Return what was done to a job, which was `before`."""
    if suspend:
        verb = "is already suspended" if _is_suspended(before) else "suspended"
    else:
        verb = "resumed" if _is_suspended(before) else "is not suspended"
    return f"trainingjob.topkube.dev/{job['metadata']['name']} {verb}{_describe_continuation(job, suspend)}"


def _describe_continuation(job: dict[str, Any], suspended: bool) -> str:
    """Return the end of a sentence: the step at which the job continues, and what is lost."""
    if not job["spec"].get("checkpoint"):
        return "; it saves no checkpoints (spec.checkpoint), so it begins again at step 0"
    progress = (job.get("status") or {}).get("progress") or {}
    if not progress.get("checkpointStep"):
        return "; no checkpoint is reported"
    words = describe_newest_checkpoint(job, datetime.now(UTC)).removeprefix("newest ")
    return f"; its newest checkpoint is {words}" if suspended else f"; it continues from the checkpoint {words}"


def _wait_for_end_of_pods(api: Api, name: str, deadline: float, seconds: float) -> dict[str, Any]:
    """Wait until the suspended job has no pods: until then, ranks save their state. Return the job."""
    while True:
        try:
            job = api.get(build_job_path(api, name))
            phase = read_phase(job)
            if phase in FINISHED_PHASES or (
                phase == "Suspended" and not list_some_pods(api, name, job["metadata"].get("uid"))
            ):
                return job
            state = f"{name} is {phase} and still has pods"
        except ClusterError as error:
            if not error.passing:
                raise
            state = f"the state of {name} is unknown ({error.what})"
        if time.monotonic() >= deadline:
            raise ClusterError(
                f"after {seconds:g} s, {state}",
                cause="its ranks save a last checkpoint, no operator runs, or a lost node cannot report their end",
                next_step=f"topkube status {name}; `topkube suspend --no-wait` does not wait",
            )
        time.sleep(_CHECK_SECONDS)
