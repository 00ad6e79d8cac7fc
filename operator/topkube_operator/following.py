"""Which spec a job follows: the stored one, or the one that was accepted before a change that nobody may make. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.changes import change_problems, in_force
from topkube.job.template import without_nulls
from topkube_operator import admission
from topkube_operator.status import Record

INVALID = "InvalidSpec"
"""The reason of the Failed condition of a job whose spec cannot be used."""


def followed(job: Mapping[str, Any], record: Record) -> tuple[TrainingJob, str]:
    """The job as it is to be followed, and why its last change is not (empty: it is). Admission refuses what may not
    change; where there was none, the accepted spec stays in force, but for what takes effect at once.

    Raises JobError where no spec can be followed.
    """
    data = {name: value for name, value in job.items() if name != "status"}
    accepted, wanted = record.accepted, without_nulls(job.get("spec"))
    before: TrainingJob | None = None
    if accepted is not None and accepted != wanted:
        with contextlib.suppress(JobError):  # one of another version may have become invalid
            before = TrainingJob.from_cluster({**data, "spec": accepted})
    try:
        after = TrainingJob.from_cluster(data)
    except JobError:
        if before is None or not over(record):
            raise
        return before, ""  # what is left to do is to clean up
    problems = change_problems(before.spec, after.spec) if before is not None else []
    if not problems or accepted is None:
        record.accepted = wanted
        return after, ""
    record.accepted = in_force(accepted, wanted)
    return TrainingJob.from_cluster({**data, "spec": record.accepted}), admission.change_refusal(problems)


def over(record: Record) -> bool:
    """Whether the job has ended by itself."""
    return record.phase == "Succeeded" or (record.phase == "Failed" and not record.holds("Failed", INVALID))


def time_left(job: Mapping[str, Any], completion: datetime, now: datetime) -> float | None:
    """Seconds that ttlSecondsAfterFinished leaves to a job that is over, of which nothing else needs to be valid; None:
    it stays."""
    spec = job.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    seconds = policy.get("ttlSecondsAfterFinished") if isinstance(policy, Mapping) else None
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 0:
        return None
    return seconds - (now - completion).total_seconds()
