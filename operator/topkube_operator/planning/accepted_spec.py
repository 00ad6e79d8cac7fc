"""The spec that a job follows: the stored spec, or the spec that was accepted before a forbidden change. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.base.reading import check_extent
from topkube.job.changes import build_outline, find_refused_changes, merge_allowed_changes, restore_spec
from topkube.job.spec import Spec
from topkube.job.template import remove_nulls, restore_nulls
from topkube_operator.model import stored_job
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning import admission

LARGEST_COPY = 128 << 10
"""Bytes of JSON. The status holds a copy of specs up to this size."""
_EDITS_OF_A_RESUMPTION = 2
"""Number of generations by which a job advances if it is suspended, changed and resumed between two reconciles."""
INVALID = "InvalidSpec"
"""The reason of the Failed condition of a job whose spec cannot be used."""


@dataclass(frozen=True)
class AcceptedJob:
    """The job with the spec that the operator follows."""

    job: TrainingJob
    refusal: str = ""
    """Why the last change is not followed; empty if the stored spec is followed."""
    replaced: bool = False
    """True if the job was suspended, changed and resumed between two reconciles. Its pods belong to the earlier
    spec."""


def choose_spec(job: Mapping[str, Any], draft: StatusDraft) -> AcceptedJob:
    """Return the job with the spec to follow, and store that spec in `draft.accepted`.

    Admission refuses forbidden changes. If admission did not run, the accepted spec stays in force, except for the
    fields that may change at any time.

    The placement of pods may change while a job is suspended. The job may be resumed before the operator reads it. The
    number of changes since the last reconcile is known, so a change that was possible in a suspended job is followed.

    Raises JobError if no spec can be followed.
    """
    data = {name: value for name, value in job.items() if name != "status"}
    check_extent(job.get("spec"), "the stored job", ("spec",))  # before anything reads the spec level by level
    accepted, requested, refused_templates = draft.accepted, remove_nulls(job.get("spec")), list[str]()
    if accepted is not None:
        accepted, refused_templates = restore_spec(accepted, requested)
    before: TrainingJob | None = None
    if accepted is not None and accepted != requested:
        with contextlib.suppress(JobError):  # a spec that an older version accepted may be invalid now
            before = TrainingJob.from_cluster({**data, "spec": accepted})
    try:
        after = TrainingJob.from_cluster(data)
    except JobError:
        if before is None or not has_ended(draft):
            raise
        return AcceptedJob(before)  # only cleaning up is left to do
    if refused_templates and not has_ended(draft):
        raise JobError(
            "this cannot be changed in a job that exists",
            refused_templates,
            cause=f"the spec has more than {LARGEST_COPY >> 10} KiB, so the status holds no copy to continue with",
            next_step="revert the change, or delete the job and create it again",
        )
    if refused_templates:
        return AcceptedJob(after)
    problems = find_refused_changes(before.spec, after.spec) if before is not None else []
    if not problems or accepted is None:
        draft.accepted = _copy_for_status(requested)
        return AcceptedJob(after)
    assert before is not None
    if _count_changes(draft) >= _EDITS_OF_A_RESUMPTION and not find_refused_changes(
        _suspend_spec(before.spec), after.spec
    ):
        draft.accepted = _copy_for_status(requested)
        return AcceptedJob(after, replaced=True)
    accepted = merge_allowed_changes(accepted, requested)
    draft.accepted = _copy_for_status(accepted)
    followed = {**data, "spec": restore_nulls(accepted, job.get("spec"))}
    return AcceptedJob(TrainingJob.from_cluster(followed), admission.explain_change_refusal(problems))


def _copy_for_status(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what status.acceptedSpec holds: all of the spec, or the outline of a large spec, because spec and status
    share the 1.5 MiB that etcd accepts per object."""
    return spec if len(json.dumps(spec)) <= LARGEST_COPY else build_outline(spec)


def _suspend_spec(spec: Spec) -> Spec:
    return spec.model_copy(update={"run_policy": spec.run_policy.model_copy(update={"suspend": True})})


def _count_changes(draft: StatusDraft) -> int:
    """Return the number of changes of the spec since the status was written."""
    before = draft.stored.get("observedGeneration")
    return draft.generation - before if isinstance(before, int) and draft.generation is not None else 0


def has_ended(draft: StatusDraft) -> bool:
    """Return True if the job has succeeded or failed. A job with an invalid spec has not ended."""
    return draft.phase == "Succeeded" or (draft.phase == "Failed" and not draft.holds("Failed", INVALID))


def compute_seconds_to_live(job: Mapping[str, Any], completion: datetime, now: datetime) -> float | None:
    """Return the seconds until ttlSecondsAfterFinished has passed for a finished job, whose other fields may be
    invalid; None if the job stays."""
    seconds = stored_job.read_run_policy(job).get("ttlSecondsAfterFinished")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 0:
        return None
    return seconds - (now - completion).total_seconds()
