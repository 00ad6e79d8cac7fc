"""`plan` in all states that a job with one worker reaches in a few steps, in every order of events."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from simulated_cluster import Crash, SimulatedCluster
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED
from simulated_kueue import WORKLOAD, SimulatedKueue
from thorough import choose

from topkube.timestamps import parse_timestamp
from topkube_operator.model.observed import Container, Pod, Policy

DEPTH = choose(4, thorough=5)
"""Steps from the beginning. Each further step multiplies the time of the test by five."""
_FAR = 400.0
"""Seconds. All longer times are described as this time, so that they are one state."""


def _kill_after(writes: int) -> Callable[[SimulatedCluster], None]:
    """Return a step: the operator carries out this number of writes of its plan, and is killed."""

    def act(world: SimulatedCluster) -> None:
        world.crash_after = writes
        plan = world.plan()
        with contextlib.suppress(Crash):
            world.carry_out(plan)
        world.crash_after = None
        _restart(world)

    return act


def _act_on(role: str, act: Callable[[SimulatedCluster, str], object]) -> Callable[[SimulatedCluster], None]:
    def act_on_newest(world: SimulatedCluster) -> None:
        for name in [name for name in world.pods if role in name][-1:]:
            act(world, name)

    return act_on_newest


def _let_nodes_act(world: SimulatedCluster) -> None:
    world.schedule()
    world.run()


def _restart(world: SimulatedCluster) -> None:
    """Start a new operator, which has only the stored objects."""
    world.report, world.removed_at, world.last_seen, world.logs, world.troubles = None, {}, {}, {}, {}


def _toggle_suspension(world: SimulatedCluster) -> None:
    assert world.job is not None
    world.edit_policy(suspend=not world.job["spec"]["runPolicy"].get("suspend", False))


def _delete_job(world: SimulatedCluster) -> None:
    assert world.job is not None
    world.job = {**world.job, "metadata": {**world.job["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


STEPS: dict[str, Callable[[SimulatedCluster], object]] = {
    "the operator acts": lambda world: world.reconcile(),
    "it is killed after a write": _kill_after(1),
    "it is killed after two writes": _kill_after(2),
    "another operator begins": _restart,
    "nodes act": _let_nodes_act,
    "the launcher reports that ranks run": lambda world: world.report_state("Running"),
    "the launcher succeeds": lambda world: world.end_launcher(0),
    "the launcher fails": lambda world: world.end_launcher(1, {**RANK_FAILED, "pod": "train-worker-0-1-uid-1"}),
    "a launcher is deleted": _act_on("launcher", lambda world, name: world.delete("Pod", name, world.pods[name].uid)),
    "a worker vanishes": _act_on("worker", lambda world, name: world.remove(name)),
    "suspended or resumed": _toggle_suspension,
    "the job is deleted": _delete_job,
    "time passes": lambda world: world.wait(30),
}


def _leave_launcher_without_node(world: SimulatedCluster) -> None:
    """Assign a node to the worker and none to the launcher: a partial gang."""
    world.schedule()
    for name in [name for name, pod in world.pods.items() if "launcher" in name and pod.phase == "Pending"]:
        world.change(name, node="", scheduled=None, scheduling_message="no room")


def _block_image(world: SimulatedCluster, name: str) -> None:
    if world.pods[name].phase == "Pending":
        waiting = {world.pods[name].main_container: Container(waiting="ImagePullBackOff")}
        world.change(name, containers=waiting)


POLICY_STEPS: dict[str, Callable[[SimulatedCluster], object]] = {
    **STEPS,
    "the launcher finds no room": _leave_launcher_without_node,
    "an image cannot be pulled": _act_on("worker", _block_image),
    "the script is wrong": lambda world: world.end_launcher(1, {**RANK_FAILED, "reason": "SyntaxError"}),
    "the hardware is broken": lambda world: world.end_launcher(
        1, {**RANK_FAILED, "pod": "train-worker-0-1-uid-1", "reason": "HardwareFault"}
    ),
    "a node reports a fault": lambda world: setattr(world, "node_faults", {"node-a": "KernelDeadlock"}),
    "nodes are healthy": lambda world: setattr(world, "node_faults", {}),
}
FAILURE_POLICY = {
    "rules": [
        {"action": "Ignore", "onReasons": ["HardwareFault"]},
        {"action": "Restart", "onReasons": ["ImagePullBackOff"]},
    ],
    "maxDisruptions": 1,
    "pendingTimeoutSeconds": 20,
}


def _let_kueue_act(act: Callable[[SimulatedKueue], None]) -> Callable[[SimulatedCluster], None]:
    """Return a step: Kueue acts on the job's Workload, if there is one."""

    def step(world: SimulatedCluster) -> None:
        kueue = SimulatedKueue(world)
        if kueue.workload is not None and not kueue.find_condition("Finished"):
            act(kueue)

    return step


def _admit(kueue: SimulatedKueue) -> None:
    if kueue.may_be_admitted():
        kueue.admit()


def _evict(reason: str) -> Callable[[SimulatedKueue], None]:
    def act(kueue: SimulatedKueue) -> None:
        if kueue.holds_quota() and kueue.find_condition("Evicted").get("status") != "True":
            kueue.evict(reason)

    return act


def _end_pause(kueue: SimulatedKueue) -> None:
    if kueue.find_condition("Requeued").get("status") == "False":
        kueue.end_pause()


QUEUE_STEPS: dict[str, Callable[[SimulatedCluster], object]] = {
    **{name: step for name, step in STEPS.items() if name not in ("a launcher is deleted", "the job is deleted")},
    "Kueue admits": _let_kueue_act(_admit),
    "Kueue preempts": _let_kueue_act(_evict("Preempted")),
    "Kueue waits no longer for the pods": _let_kueue_act(_evict("PodsReadyTimeout")),
    "Kueue ends the pause": _let_kueue_act(_end_pause),
}


def _check_quota(world: SimulatedCluster, path: tuple[str, ...]) -> None:
    """Pods exist only with quota, and reserved quota has an admission: Kueue's webhook demands it."""
    kueue = SimulatedKueue(world)
    active = [pod.name for pod in world.pods.values() if pod.is_active]
    assert not active or kueue.holds_quota(), (path, active)
    if kueue.workload is None:
        return
    status = kueue.workload.content["status"]
    is_reserved = kueue.find_condition("QuotaReserved").get("status") == "True"
    assert is_reserved == bool(status.get("admission")), (path, status)


def _copy_world(world: SimulatedCluster) -> SimulatedCluster:
    """Return a copy of the world. Parts that a step replaces as a whole are shared."""
    copied = copy.copy(world)
    copied.job = {**world.job, "metadata": dict(world.job["metadata"])} if world.job else None
    for name in ("pods", "children", "removed_at", "last_seen", "troubles", "logs", "avoided"):
        setattr(copied, name, dict(getattr(world, name)))
    copied.freed, copied.violations, copied.events = set(world.freed), list(world.violations), []
    return copied


def _describe_state(world: SimulatedCluster) -> str:
    """Return the part of a world that determines its future. Times count from now; UIDs do not count."""

    def measure_seconds_since(time: datetime | None) -> float | None:
        return None if time is None else min((world.now - time).total_seconds(), _FAR)

    def simplify(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: simplify(item) for key, item in value.items() if key != "message"}
        if isinstance(value, list):
            return [simplify(item) for item in value]
        return (
            measure_seconds_since(parse_timestamp(value))
            if isinstance(value, str) and value.startswith("2026-")
            else value
        )

    def describe_pod(pod: Pod) -> list[Any]:
        ends = {
            name: (
                measure_seconds_since(container.started),
                container.exit_code,
                measure_seconds_since(container.ended),
            )
            for name, container in pod.containers.items()
        }
        waits = [pod.avoids_nodes, pod.scheduling_message, measure_seconds_since(pod.scheduled)]
        return [
            pod.phase,
            pod.node,
            measure_seconds_since(pod.deletion),
            ends,
            pod.has_finalizer,
            measure_seconds_since(pod.created),
            *waits,
        ]

    report = None if world.report is None else (world.report.attempt, measure_seconds_since(world.report.heard))
    pods = {name: describe_pod(pod) for name, pod in sorted(world.pods.items())}
    requests = (
        None if world.job is None else (world.job["spec"]["runPolicy"], "deletionTimestamp" in world.job["metadata"])
    )
    other_parts = [
        world.node_faults,
        sorted(world.freed),
        sorted(world.removed_at),
        sorted(world.last_seen),
        sorted(map(str, world.children)),
        simplify(world.children[WORKLOAD].content) if WORKLOAD in world.children else None,
    ]
    return json.dumps([simplify(world.status), requests, pods, report, other_parts], sort_keys=True)


def _check_promises(before: SimulatedCluster, after: SimulatedCluster, path: tuple[str, ...]) -> None:
    old, new = before.status, after.status
    if after.policy.workloads:
        _check_quota(after, path)
    assert not after.violations, (path, after.violations)
    for count in ("attempt", "restarts", "disruptions"):
        assert new.get(count, 0) >= old.get(count, 0), path
    assert len(new.get("recentDisruptions", ())) <= 2, path  # one more than `maxDisruptions` ends the job
    assert len(new.get("avoidedNodes", ())) <= 1, path  # a third of the four nodes
    if old.get("phase") in ("Succeeded", "Failed"):
        assert new["phase"] == old["phase"], path
    launchers = [
        pod.name for pod in after.pods.values() if pod.role == "launcher" and pod.is_active and not pod.deletion
    ]
    assert len(launchers) <= 1, path
    assert after.job is not None
    if path[-1] != "the operator acts":
        return
    plan = after.plan()
    assert plan.is_empty, (path, plan)
    if "deletionTimestamp" in after.job["metadata"]:
        assert not [pod.name for pod in after.pods.values() if pod.has_finalizer], path
        return
    waits = plan.requeue is not None or any(pod.is_active or pod.has_finalizer for pod in after.pods.values())
    assert waits or new["phase"] in ("Succeeded", "Failed", "Suspended"), (path, "nothing would wake the operator")


def _explore(start: SimulatedCluster, steps: dict[str, Callable[[SimulatedCluster], object]], depth: int) -> int:
    """Check all worlds within `depth` steps from `start`. Return how many there are."""
    start.reconcile()
    worlds: dict[str, tuple[SimulatedCluster, tuple[str, ...]]] = {_describe_state(start): (start, ())}
    seen_states = set(worlds)
    for _ in range(depth):
        next_worlds: dict[str, tuple[SimulatedCluster, tuple[str, ...]]] = {}
        for world, path in worlds.values():
            for name, step in steps.items():
                after = _copy_world(world)
                step(after)
                _check_promises(world, after, (*path, name))
                state = _describe_state(after)
                if state not in seen_states:
                    seen_states.add(state)
                    next_worlds[state] = (after, (*path, name))
        worlds = next_worlds
    return len(seen_states)


def test_no_order_of_events_breaks_a_promise() -> None:
    start = SimulatedCluster(build_job(workers=1, runPolicy={"backoffLimit": 1}))
    assert _explore(start, STEPS, DEPTH) > 500


def test_no_order_of_events_breaks_a_promise_of_a_job_with_a_failure_policy() -> None:
    start = SimulatedCluster(build_job(workers=1, runPolicy={"backoffLimit": 1, "failurePolicy": FAILURE_POLICY}))
    assert _explore(start, POLICY_STEPS, DEPTH) > 500


def test_no_order_of_events_breaks_a_promise_to_kueue() -> None:
    queued = build_job(workers=1, runPolicy={"backoffLimit": 1})
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    start = SimulatedCluster(queued, Policy(seed=b"s" * 32, workloads="kueue.x-k8s.io/v1beta2"))
    start.reconcile()
    SimulatedKueue(start).admit()
    assert _explore(start, QUEUE_STEPS, DEPTH) > 500


def test_the_steps_of_the_failure_policy_reach_its_endings() -> None:
    """The exploration would prove nothing if these states were out of its reach."""
    for steps, reason in (
        (["the launcher finds no room", "time passes", "the operator acts"], "PendingTimeout"),
        (["an image cannot be pulled", "the operator acts"], "ImagePullBackOff"),
        (["nodes act", "the script is wrong", "the operator acts"], "SyntaxError"),
        (["nodes act", "the hardware is broken", "the operator acts"], "HardwareFault"),
    ):
        world = SimulatedCluster(build_job(workers=1, runPolicy={"backoffLimit": 1, "failurePolicy": FAILURE_POLICY}))
        world.reconcile()
        for step in steps:
            POLICY_STEPS[step](world)
        assert world.status["firstFailure"]["reason"] == reason
