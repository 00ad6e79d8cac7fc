"""The planner of one TrainingJob: `plan` reads everything that exists and returns the next steps. Pure.

The planner does no I/O, reads no clock and uses no randomness, so tests can explore all its states in memory. It is
level-triggered: nothing depends on the event that woke the operator, so a lost event, a repeated call or a new operator
changes nothing. The caller writes `status` first. If that write fails, the rest of the plan is void. Therefore the
number of an attempt is stored before a pod of the attempt exists, and the names of pods contain the number. If the
operator is killed between two calls, the next operator continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from topkube.errors import JobError
from topkube_operator.children import workloads
from topkube_operator.model import stored_job
from topkube_operator.model.observed import Observed
from topkube_operator.model.plan import Deletion, Plan, find_releases
from topkube_operator.model.status import Event, StatusDraft
from topkube_operator.planning import accepted_spec, admission, attempts, cleanup
from topkube_operator.planning.phases import ended, running, stopped
from topkube_operator.planning.phases.plan_steps import FINISHED, PlanSteps

_REFUSED = "ChangeRefused"


def plan(job: Mapping[str, Any], observed: Observed, now: datetime) -> Plan:
    """Return what to do about `job`, the stored object as plain data, valid or not. `now` has a time zone."""
    metadata = job["metadata"]
    if metadata.get("deletionTimestamp"):
        return Plan(release=find_releases(observed.pods))
    if not stored_job.is_managed(job):
        return Plan(release=find_releases(pod for pod in observed.pods if pod.deletion is not None))
    generation = metadata.get("generation")
    draft = StatusDraft.read(job.get("status"), generation, observed.pods, now)
    try:
        accepted = accepted_spec.choose_spec(job, draft)
        return _plan_accepted_job(PlanSteps(accepted.job, metadata["uid"], draft, observed, now), accepted)
    except JobError as error:
        # The message of admission, which did not check this object, or accepted a template that makes no valid pod.
        message = admission.explain_refusal(job) or str(error)
        return _plan_invalid_job(
            job, StatusDraft.read(job.get("status"), generation, observed.pods, now), observed, message
        )


def _plan_invalid_job(job: Mapping[str, Any], draft: StatusDraft, observed: Observed, message: str) -> Plan:
    """Return the plan for an unusable spec: the status explains it, or contains the success of the ranks. Nothing is
    made, and nothing is removed before ttlSecondsAfterFinished has passed."""
    name, uid, seconds_left = job["metadata"]["name"], job["metadata"]["uid"], None
    attempt = attempts.find_current_pods(name, uid, 0, draft, observed)
    if not accepted_spec.has_ended(draft) and not ended.complete_if_succeeded(draft, attempt):
        draft.phase = "Failed"
        draft.set_condition("Failed", True, accepted_spec.INVALID, message, "Warning")
    # An edit can make the spec invalid while the job trains.
    if accepted_spec.has_ended(draft) or not any(pod.is_active for pod in observed.pods):
        draft.completion = draft.completion or draft.now
        seconds_left = accepted_spec.compute_seconds_to_live(job, draft.completion, draft.now)
        if seconds_left is not None and seconds_left <= 0:
            return Plan(delete=(Deletion("TrainingJob", name, uid),))
    releases, due = cleanup.find_due_releases(observed.pods, draft, observed)
    waits = [(time - draft.now).total_seconds() for time in due]
    return Plan(
        status=draft.build_patch(),
        release=releases,
        events=tuple(draft.events),
        phase=draft.phase,
        requeue=min([*waits, *([] if seconds_left is None else [seconds_left])], default=None),
    )


def _plan_accepted_job(steps: PlanSteps, accepted: accepted_spec.AcceptedJob) -> Plan:
    """Return the plan for a valid spec. Raises JobError if the templates make no valid pod."""
    draft = steps.draft
    _report_spec(draft, accepted.refusal)
    if draft.phase in FINISHED:
        ended.clean_up_job(steps)
    elif ended.complete_if_succeeded(draft, steps.find_current_pods()):
        pass  # a job that has succeeded stays so, whatever the spec asks for since
    elif steps.policy.suspend or accepted.replaced:
        stopped.suspend_job(steps)
    elif steps.is_queued and not workloads.is_admitted(steps.workload):
        stopped.wait_for_admission(steps)
    else:
        if draft.attempt == 0 or draft.holds("Suspended"):
            running.start_job(steps)
        running.continue_attempt(steps)
    stopped.report_to_queue(steps)
    return steps.to_plan()


def _report_spec(draft: StatusDraft, refusal: str) -> None:
    """Report that an invalid spec was corrected, that a change is refused, or that a refused change was reverted."""
    if draft.holds("Failed", accepted_spec.INVALID):
        draft.set_condition("Failed", False, "Corrected", "the spec is valid", "Normal")
        draft.completion = None
        if draft.phase == "Failed":
            draft.phase = "Pending" if draft.attempt else ""
    if draft.phase in FINISHED:
        return
    before = draft.conditions.get("Failed", {})
    if refusal:
        draft.set_condition("Failed", False, _REFUSED, refusal)
        if draft.conditions["Failed"]["message"] != before.get("message"):
            draft.events.append(Event("Warning", _REFUSED, refusal))
    elif before.get("reason") == _REFUSED:
        draft.set_condition("Failed", False, "Corrected", "the spec is the accepted spec again", "Normal")
