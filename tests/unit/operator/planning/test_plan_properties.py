"""`plan` over random histories: the promises hold after every event, and the job ends when the events stop."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import SimulatedCluster
from simulated_job import build_job
from simulated_kubelets import NODES
from thorough import choose

from topkube_operator.model.observed import Container
from topkube_operator.model.plan import Plan
from topkube_operator.planning import planner

MOST_ROUNDS = 40
Steps = list[tuple[str, int, bool]]


def _choose_pod(world: SimulatedCluster, number: int) -> str:
    names = sorted(world.pods)
    return names[number % len(names)] if names else ""


def _act_on_pod(act: Callable[[SimulatedCluster, str], object]) -> Callable[[SimulatedCluster, int], object]:
    return lambda world, number: act(world, name) if (name := _choose_pod(world, number)) else None


def _delete_child(world: SimulatedCluster, number: int) -> None:
    if world.children:
        del world.children[sorted(world.children)[number % len(world.children)]]


def _fail_launcher(world: SimulatedCluster, number: int) -> None:
    pod = _choose_pod(world, number) or None
    world.end_launcher(1, {"pod": pod, "rank": number if number % 2 else None, "reason": "Error", "exitCode": 1})


def _suspend_or_resume(world: SimulatedCluster, number: int) -> None:
    suspend = number % 2 == 1
    if world.job is not None and suspend != world.job["spec"].get("runPolicy", {}).get("suspend", False):
        if not suspend:
            world.resumes += 1
        world.edit_policy(suspend=suspend)


def _add_foreign_pod(world: SimulatedCluster, number: int) -> None:
    if (name := f"train-worker-0-{number}-uid-1") not in world.pods:  # each name is used once
        world.foreign.add(("Pod", name))


def _block_image(world: SimulatedCluster, name: str) -> None:
    if world.pods[name].phase == "Pending":
        world.change(name, containers={world.pods[name].main_container: Container(waiting="ImagePullBackOff")})


def _refuse_node(world: SimulatedCluster, name: str) -> None:
    if not world.pods[name].node:
        world.change(name, scheduling_message="no room")


ACTIONS: dict[str, Callable[[SimulatedCluster, int], Any]] = {
    "reconcile": lambda world, _: world.reconcile(),
    "crash": lambda world, number: setattr(world, "crash_after", number),
    "forget": lambda world, _: setattr(world, "report", None),
    "schedule": lambda world, _: world.schedule(),
    "run": lambda world, _: world.run(),
    "wait": lambda world, number: world.wait(number**2),
    "launcher reports waiting": lambda world, _: world.report_state("Waiting", (0,)),
    "launcher reports running": lambda world, _: world.report_state("Running"),
    "worker fails": _act_on_pod(lambda world, name: world.end(name, 137, ended_reason="OOMKilled")),
    "worker ends": _act_on_pod(lambda world, name: world.end(name, 0)),
    "launcher fails": _fail_launcher,
    "pod deleted": _act_on_pod(lambda world, name: world.delete("Pod", name, world.pods[name].uid)),
    "pod gone": _act_on_pod(lambda world, name: world.remove(name)),
    "evicted": _act_on_pod(lambda world, name: world.change(name, phase="Failed", reason="Evicted", message="disk")),
    "node lost": lambda world, number: world.lost.add(NODES[number % len(NODES)]),
    "node back": lambda world, number: world.lost.discard(NODES[number % len(NODES)]),
    "child deleted": _delete_child,
    "suspend": _suspend_or_resume,
    "image missing": _act_on_pod(_block_image),
    "no room": _act_on_pod(_refuse_node),
    "node faulty": lambda world, number: world.node_faults.update({NODES[number % len(NODES)]: "KernelDeadlock"}),
    "nodes healthy": lambda world, _: world.node_faults.clear(),
    "invalid edit": lambda world, _: world.edit(workers=0),
    "valid edit": lambda world, number: world.edit(workers=1 + number % 3),
    "foreign": _add_foreign_pod,
    "no foreign": lambda world, _: world.foreign.clear(),
    "status lost": lambda world, _: world.job.update(status={}) if world.job else None,
}
TROUBLE = ("worker fails", "launcher fails", "pod deleted", "pod gone", "evicted", "node lost", "crash")
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)) | st.sampled_from(TROUBLE), st.integers(0, 12), st.booleans()),
    max_size=25,
)
RULES = st.fixed_dictionaries(
    {
        "action": st.sampled_from(["Fail", "Restart", "Ignore"]),
        "onReasons": st.lists(
            st.sampled_from(["Error", "OOMKilled", "Deleted", "NodeLost", "PendingTimeout", "ImagePullBackOff"]),
            min_size=1,
            max_size=3,
        ),
    }
)
SPECS = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 3),
        "launcher": st.fixed_dictionaries({"colocate": st.booleans()}),
        "source": st.sampled_from([None, {"configMap": {"name": "code"}}]),
        "runPolicy": st.fixed_dictionaries(
            {
                "backoffLimit": st.integers(0, 3),
                "cleanPodPolicy": st.sampled_from(["Running", "All", "None"]),
                "suspend": st.booleans(),
                "failurePolicy": st.fixed_dictionaries(
                    {},
                    optional={
                        "rules": st.lists(RULES, max_size=2),
                        "maxDisruptions": st.integers(0, 3),
                        "pendingTimeoutSeconds": st.sampled_from([20, 100]),
                    },
                ),
            }
        ),
    }
)
quick = settings(max_examples=choose(80, thorough=250))


def _run_steps(world: SimulatedCluster, steps: Steps) -> None:
    """Do each step. After some steps, everything that can continue continues."""
    world.start_ranks()
    for action, number, continues in steps:
        before = world.status
        ACTIONS[action](world, number)
        if continues:
            world.wait(200)
            world.start_ranks()
            _check_running(world)
            _check_released(world)
        if action != "status lost":
            _check_promises(world, before)


def _check_running(world: SimulatedCluster) -> None:
    """While ranks run, no pod of an earlier attempt exists."""
    if world.status.get("phase") != "Running" or world.report is None or world.job is None:
        return
    remaining = [pod.name for pod in world.pods.values() if pod.deletion is None and pod.node not in world.lost]
    launcher = world.launcher
    if launcher is not None and launcher.is_active and launcher.node not in world.lost:
        assert len(remaining) <= launcher.workers + (launcher.role == "launcher"), remaining


def _check_released(world: SimulatedCluster) -> None:
    """No finalizer keeps a pod whose grace period has passed: a drain would wait without end."""
    overdue = world.now - timedelta(seconds=5)
    held = [name for name, pod in world.pods.items() if pod.has_finalizer and pod.deletion and pod.deletion <= overdue]
    assert not held


def _check_promises(world: SimulatedCluster, before: dict[str, Any]) -> None:
    assert not world.violations, world.violations
    status, limit = world.status, (world.job or {"spec": {}})["spec"].get("runPolicy", {}).get("backoffLimit", 3)
    assert status.get("restarts", 0) <= limit
    if before.get("phase") == "Succeeded":
        assert status["phase"] == "Succeeded"
        assert status["attempt"] == before["attempt"]


@quick
@given(SPECS, STEPS)
def test_every_history_ends_when_the_cluster_works_again(spec: dict[str, Any], steps: Steps) -> None:
    world = SimulatedCluster(build_job(**spec))
    _run_steps(world, steps)
    world.foreign.clear()
    world.lost.clear()
    world.crash_after = None
    assert world.job is not None
    world.edit(workers=world.job["spec"]["workers"] or 1)
    world.edit_policy(suspend=False)
    for _ in range(MOST_ROUNDS):
        world.start_ranks()
        if world.status["phase"] in ("Succeeded", "Failed"):
            break
        if world.status["phase"] == "Running":
            world.end_launcher(0)
        world.wait(400)
    assert world.status["phase"] in ("Succeeded", "Failed"), world.status
    _check_promises(world, {})
    for _ in range(3):  # the cleanup: workers are given a while to end by themselves
        world.reconcile()
        world.wait(30)
        world.run()
    last = world.reconcile()
    assert last.is_empty, last
    policy = world.job["spec"]["runPolicy"]["cleanPodPolicy"]
    if policy != "None":
        assert not [pod.name for pod in world.pods.values() if pod.is_active]
        assert not world.children
    if policy == "All":
        assert not world.pods


@quick
@given(SPECS, STEPS)
def test_attempts_are_bounded_by_restarts_disruptions_and_resumptions(spec: dict[str, Any], steps: Steps) -> None:
    world = SimulatedCluster(build_job(**spec))
    _run_steps(world, [step for step in steps if step[0] != "status lost"])
    status = world.status
    counted = status.get("restarts", 0) + status.get("disruptions", 0) + world.resumes
    assert status.get("attempt", 0) <= 1 + counted, status


@quick
@given(SPECS, STEPS)
def test_plan_is_pure_and_a_carried_out_plan_leaves_nothing_to_do(spec: dict[str, Any], steps: Steps) -> None:
    world = SimulatedCluster(build_job(**spec))
    _run_steps(world, steps)
    if world.job is None:
        return
    observed, now = world.observe(), world.now
    first = planner.plan(world.job, observed, now)
    assert planner.plan(world.job, observed, now) == first
    world.crash_after = None
    world.foreign.clear()
    world.troubles.clear()
    last = world.reconcile()
    assert last.is_empty, last
    assert world.plan() == last


@quick
@given(SPECS, STEPS)
def test_nothing_is_made_for_deleted_jobs_or_jobs_of_other_controllers(spec: dict[str, Any], steps: Steps) -> None:
    world = SimulatedCluster(build_job(**spec))
    _run_steps(world, steps)
    if world.job is None:
        return
    world.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    held = {pod.uid for pod in world.pods.values() if pod.has_finalizer}
    plan = world.plan()
    assert {release.uid for release in plan.release} == held, "nothing of ours keeps a job that is being deleted"
    assert plan == Plan(release=plan.release)
    del world.job["metadata"]["deletionTimestamp"]
    world.edit_policy(managedBy="kueue.x-k8s.io/multikueue")
    plan = world.plan()
    assert plan == Plan(release=plan.release)
    assert all(world.pods[release.name].deletion is not None for release in plan.release)
