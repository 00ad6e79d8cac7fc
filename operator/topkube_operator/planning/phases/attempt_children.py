"""The pods and other objects of an attempt: made when it begins, and restored while it runs. Pure."""

from __future__ import annotations

from datetime import timedelta

from topkube_operator.children import datasets, placement, workloads
from topkube_operator.model.plan import ObjectRequest
from topkube_operator.planning import attempts, cleanup, pacing
from topkube_operator.planning.attempt_status import mark_created, mark_pending
from topkube_operator.planning.causes import bad_nodes
from topkube_operator.planning.causes.failures import AttemptPods
from topkube_operator.planning.phases.plan_steps import PlanSteps

_FLAVOR_RETRY = timedelta(seconds=10)


def create_children(steps: PlanSteps) -> None:
    """Make the children that the attempt lacks, as soon as it may begin. Reusable workers are kept."""
    due = pacing.compute_earliest_start(steps.draft, steps.observed.policy)
    if steps.now < due:
        steps.wakes.append(due)
        return
    if datasets.uses_node_cache(steps.job) and not steps.observed.node_cache:
        message = datasets.explain_node_cache_refusal(steps.job)
        steps.draft.set_condition("Created", False, "NodeCacheNotAllowed", message, "Warning")
        mark_pending(steps.draft, "Pending", "NodeCacheNotAllowed", message)
        return
    if not _check_assigned_flavors(steps):
        return
    bad_nodes.choose_avoided_nodes(steps.job, steps.draft, steps.observed)
    creation = attempts.plan_creation(steps.job, steps.uid, steps.draft, steps.observed)
    steps.remove_pods(creation.outdated)
    if ending := attempts.find_replaced_pods(creation.outdated):
        message = f"Kueue accepts a replacement when the replaced pod has ended: {', '.join(ending)}"
        steps.draft.set_condition("Created", False, "WaitingForPods", message)
        mark_pending(steps.draft, "Pending", "WaitingForPods", message)
        return
    steps.apply += creation.stages
    _report_troubles(steps, None)


def _check_assigned_flavors(steps: PlanSteps) -> bool:
    """Return True if the operator knows on which nodes Kueue wants the pods. Otherwise request the flavors that Kueue
    has assigned, or report a flavor that cannot be read."""
    flavors = workloads.list_assigned_flavors(steps.workload) if steps.workload is not None else []
    unknown = [name for name in flavors if (workloads.FLAVOR, name) not in steps.observed.objects]
    steps.reads += [ObjectRequest(workloads.FLAVOR, name) for name in unknown]
    unreadable = [name for name in flavors if steps.observed.objects.get((workloads.FLAVOR, name)) == {}]
    if unreadable:
        message = f"the ResourceFlavor {unreadable[0]}, which Kueue has assigned, cannot be read"
        steps.draft.set_condition("Created", False, "FlavorNotFound", message, "Warning")
        mark_pending(steps.draft, "Pending", "FlavorNotFound", message)
        steps.wakes.append(steps.now + _FLAVOR_RETRY)
    return not unknown and not unreadable


def repair_children(steps: PlanSteps, attempt: AttemptPods) -> None:
    """Restore a Secret, Service, policy or PodGroup that was deleted or changed, and remove pods of older
    attempts that were created late."""
    steps.apply += attempts.plan_objects(steps.job, steps.uid, attempt, steps.observed)
    steps.remove_pods(cleanup.find_unused_pods(attempt, steps.observed.pods))
    _report_troubles(steps, attempt)


def _report_troubles(steps: PlanSteps, attempt: AttemptPods | None) -> None:
    """Report children that cannot be made, or that others change. `attempt` is None until its pods are made."""
    draft, observed = steps.draft, steps.observed
    planned = {(manifest["kind"], manifest["metadata"]["name"]) for stage in steps.apply for manifest in stage}
    troubles = [
        (trouble.reason, key)
        for key, trouble in observed.troubles.items()
        if key in planned or trouble.reason == "Contested"
    ]
    if troubles:
        reason, (kind, name) = min(troubles)
        message = f"{kind} {name}: {observed.troubles[kind, name].message}"
        if attempt is not None:
            draft.set_condition("Created", True, reason, message, "Warning")
        elif reason != "Contested" or not any(steps.apply):
            draft.set_condition("Created", False, reason, message, "Warning")
            mark_pending(draft, "Pending", reason, message)
    elif attempt is not None and not draft.holds("Created", "PodsCreated"):
        mark_created(draft, attempt)
    elif not draft.holds("Created") and placement.asks_for_gang(steps.job) and observed.policy.gang is None:
        message = "the cluster has no PodGroup (Volcano or scheduler-plugins): pods are scheduled one by one"
        draft.set_condition("Created", False, "NoGangScheduler", message, "Warning")
