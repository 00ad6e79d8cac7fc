"""The pauses before the pods of the next attempt are made. Pure.

All times are by the operator's clock: nodes' clocks differ, and a removed pod has no time at all. The time at which the
operator saw the end of an attempt is stored as the transition of the Created condition to false.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from topkube.job.fields.failure_policy import PENDING_TIMEOUT
from topkube_operator.model.observed import Policy
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning.causes.failures import AttemptPods

_LONG_RUN = timedelta(seconds=60)
"""After an attempt whose ranks ran for this long, the next restart comes at once, as the first restart does."""
_LONGEST_PAUSE_SECONDS = 300.0
_PENDING_PAUSE_SECONDS = 60.0
"""The shortest pause after an attempt that gave its nodes back, so that another job can take the nodes."""
_MOST_DOUBLINGS = 16


def count_restart(draft: StatusDraft, attempt: AttemptPods) -> None:
    """Count the restart that follows `attempt`, whose end the operator has just seen."""
    has_waited = draft.holds("Restarting", PENDING_TIMEOUT)  # then the launcher ran, but no rank did
    is_long = not has_waited and _measure_run_time(draft, attempt) >= _LONG_RUN
    draft.restarts_in_a_row = 1 if is_long else draft.restarts_in_a_row + 1


def compute_pause(draft: StatusDraft, policy: Policy) -> float:
    """Return the seconds between the end of the last attempt and the pods of the current one."""
    count = draft.restarts_in_a_row
    if draft.holds("Restarting", PENDING_TIMEOUT):
        shortest, doublings = _PENDING_PAUSE_SECONDS, max(0, count - 1)
    elif count <= 1 or not draft.holds("Restarting"):
        return 0.0
    else:
        shortest, doublings = policy.backoff_seconds, count - 2
    return float(min(shortest * 2.0 ** min(doublings, _MOST_DOUBLINGS), _LONGEST_PAUSE_SECONDS))


def compute_earliest_start(draft: StatusDraft, policy: Policy) -> datetime:
    """Return when the pods of the current attempt may be made. The result is the same at every reconcile, whatever
    objects are missing."""
    ended = draft.find_change_time("Created")
    if ended is None or draft.holds("Created"):
        return draft.now
    return min(ended, draft.now) + timedelta(seconds=compute_pause(draft, policy))


def _measure_run_time(draft: StatusDraft, attempt: AttemptPods) -> timedelta:
    """Return how long the ranks of `attempt` ran. If the launcher has never answered the operator, use the run time of
    the launcher's container, whose start and end come from one clock."""
    since = draft.find_change_time("Running")
    if draft.holds("Running") and since is not None:
        return draft.now - since
    container, created = attempt.launcher_container, draft.find_change_time("Created")
    if container.started is not None and container.ended is not None:
        return container.ended - container.started
    if container.started is not None and created is not None:
        return draft.now - created
    return timedelta(0)
