"""`plan` causes no storms of restarts or of writes: it paces restarts whatever fails, and keeps what others add to our
objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube_operator.model.observed import Trouble, find_difference, satisfies

HOUR = 3600
MOST_ATTEMPTS_PER_HOUR = 20
"""An upper bound on the attempts in an hour if each attempt fails at once. The pauses between them are 0, 5, 10, 20,
40, 80 and 160 s, and then 300 s each."""


def _remove_pod(world: SimulatedCluster, name: str) -> None:
    if name in world.pods:
        world.remove(name)


def _build_launcher_name(world: SimulatedCluster) -> str:
    return f"train-launcher-{world.status.get('attempt', 0)}-uid-1"


def _fail_launcher(world: SimulatedCluster, skew: int) -> None:
    """Let the launcher fail on a node whose clock is wrong by `skew` seconds."""
    now, world.now = world.now, world.now + timedelta(seconds=skew)
    world.schedule()
    world.run()
    world.end_launcher(1, RANK_FAILED)
    world.now = now


FAULTS: dict[str, Callable[[SimulatedCluster], Any]] = {
    "the launcher is gone": lambda world: _remove_pod(world, _build_launcher_name(world)),
    "a worker is gone": lambda world: _remove_pod(
        world, max((item for item in world.pods if "worker-0" in item), default="")
    ),
    "all pods are gone": lambda world: [_remove_pod(world, name) for name in list(world.pods)],
    "a pod is refused": lambda world: [
        world.change(name, phase="Failed", reason="UnexpectedAdmissionError") for name in list(world.pods)[-1:]
    ],
    "ranks fail on a node whose clock is fast": lambda world: _fail_launcher(world, HOUR),
    "ranks fail on a node whose clock is slow": lambda world: _fail_launcher(world, -HOUR),
    "the operator is new": lambda world: [item.clear() for item in (world.removed_at, world.last_seen)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_before_any_pause_has_passed_at_most_two_attempts_have_pods(fault: str) -> None:
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 1000}))
    for _ in range(200):
        world.reconcile()
        FAULTS[fault](world)
    assert world.status["attempt"] <= 3, "the third attempt is in the status, and its pods wait"
    assert all(pod.attempt < 3 for pod in world.pods.values())


@settings(max_examples=20)
@given(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=4), st.sampled_from([1, 4, 7]))
def test_the_number_of_attempts_in_a_quarter_of_an_hour_is_limited_whatever_fails(
    faults: list[str], step_seconds: int
) -> None:
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 1000}))
    attempts = set()
    for step in range(HOUR // step_seconds // 4):
        world.reconcile()
        FAULTS[faults[step % len(faults)]](world)
        attempts.add(world.status["attempt"])
        world.wait(step_seconds)
    assert len(attempts) <= MOST_ATTEMPTS_PER_HOUR, attempts
    assert not world.violations


def _count_seconds_until_pod(world: SimulatedCluster, name: str) -> float:
    began = world.now
    while name not in world.pods:
        plan = world.reconcile()
        if name not in world.pods:
            assert plan.requeue is not None
            world.wait(plan.requeue)
    return (world.now - began).total_seconds()


@pytest.mark.parametrize("launcher_answers", [True, False])
def test_after_an_attempt_that_ran_for_a_minute_pauses_are_short_again(launcher_answers: bool) -> None:
    """If the launcher does not answer the operator, the start of its container counts."""
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 99}))
    for number in range(2, 9):
        world.reconcile()
        world.schedule()
        world.run()
        world.end_launcher(1, RANK_FAILED)
        waited = _count_seconds_until_pod(world, f"train-launcher-{number}-uid-1")
    assert waited == 160
    world.schedule()
    world.run()
    if launcher_answers:
        world.report_state("Running")
    world.reconcile()
    world.wait(60)
    world.end_launcher(1, RANK_FAILED)
    assert _count_seconds_until_pod(world, "train-launcher-9-uid-1") == 0
    waits = []
    for number in (10, 11, 12):
        world.start_ranks()
        world.end_launcher(1, RANK_FAILED)
        waits.append(_count_seconds_until_pod(world, f"train-launcher-{number}-uid-1"))
    assert waits == [5, 10, 20]


def test_restarts_are_paced_if_an_older_crd_drops_the_count() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 99})
    for number in range(2, 6):
        world.wait(61)
        world.end_launcher(1, RANK_FAILED)
        _count_seconds_until_pod(world, f"train-launcher-{number}-uid-1")
        world.start_ranks()
    assert world.job is not None
    assert world.job["status"].pop("restartsInARow") == 1
    world.end_launcher(1, RANK_FAILED)
    assert _count_seconds_until_pod(world, "train-launcher-6-uid-1") == 40


def test_pods_that_a_former_leader_made_late_are_removed_while_the_attempt_runs() -> None:
    world = start_running_job()
    world.end("train-worker-1-1-uid-1", 1)
    world.end_launcher(1, RANK_FAILED)
    world.wait(20)
    world.start_ranks()
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-2-uid-1"]
    old = {name: world.last_seen[name] for name in ("train-launcher-1-uid-1", "train-worker-1-1-uid-1")}
    world.wait(5)
    for name, pod in old.items():
        world.pods[name] = world.last_seen[name] = pod
        world.change(
            name, uid=f"late-{name}", created=world.now, phase="Pending", containers={}, node="", deletion=None
        )
    world.reconcile()
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-2-uid-1"]
    assert (world.status["attempt"], world.status["phase"]) == (2, "Running")


def test_a_worker_pod_that_is_newer_than_the_launcher_is_removed() -> None:
    """The former leader considered worker 1 lost and made another pod; the present leader keeps the first pod."""
    world = start_running_job()
    world.end_launcher(1, RANK_FAILED)
    world.wait(20)
    world.start_ranks()
    assert "train-worker-1-1-uid-1" in world.pods
    world.wait(5)
    late = {"name": "train-worker-1-2-uid-1", "uid": "late", "attempt": 2, "created": world.now, "phase": "Pending"}
    world.pods["train-worker-1-2-uid-1"] = dataclasses.replace(world.pods["train-worker-1-1-uid-1"], node="", **late)
    world.reconcile()
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-1-uid-1"]
    assert world.status["attempt"] == 2


# Additions by others.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from("abc"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


def _add_foreign_parts(draw: Any, value: Any) -> Any:
    """Return `value` with fields and entries that something else added."""
    if isinstance(value, dict):
        added_fields = {f"added-{number}": 1 for number in range(draw(st.integers(0, 2)))}
        return {**added_fields, **{key: _add_foreign_parts(draw, item) for key, item in value.items()}}
    if isinstance(value, list):
        items = [_add_foreign_parts(draw, item) for item in value]
        for _ in range(draw(st.integers(0, 2))):
            items.insert(draw(st.integers(0, len(items))), {"added": True})
        return items
    return value


@given(VALUES, st.data())
def test_additions_to_our_part_of_an_object_do_not_cause_a_write(expected: Any, data: st.DataObject) -> None:
    assert satisfies(_add_foreign_parts(data.draw, expected), expected)


@pytest.mark.parametrize(
    ("actual", "expected", "path"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": [3, 2, 1]}, {"a": [1, 2]}, None),
        ({"a": [1]}, {"a": [1, 1]}, ".a[1]"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ".a.b"),
        ({"a": []}, {"a": [{"b": 1}]}, ".a[0]"),
        ({}, {"a": {"b": 2}}, ".a"),
        ({"a": "x"}, {"a": ["x"]}, ".a"),
    ],
)
def test_a_difference_is_reported_with_its_path(actual: Any, expected: Any, path: str | None) -> None:
    assert find_difference(actual, expected) == path


def test_a_rule_that_a_policy_engine_adds_stays() -> None:
    world = start_running_job()
    policy = world.children["NetworkPolicy", "train-worker"]
    rule = {"from": [{"podSelector": {"matchLabels": {"app": "scanner"}}}]}
    policy.content["ingress"].append(rule)  # type: ignore[index]
    assert world.reconcile().is_empty
    policy.content["ingress"].pop(0)  # type: ignore[index]
    world.reconcile()
    assert len(world.children["NetworkPolicy", "train-worker"].content["ingress"]) == 2


def test_a_child_that_something_changes_back_is_reported_and_not_written_for_a_while() -> None:
    world = start_running_job()
    key = ("NetworkPolicy", "train-worker")
    world.children[key].content["ingress"].clear()  # type: ignore[index]
    world.paused.add(key)
    world.troubles[key] = Trouble("Contested", "something changes ingress[0]")
    world.reconcile()
    created = world.find_condition("Created")
    assert (created["status"], created["reason"]) == ("True", "Contested")
    assert "NetworkPolicy train-worker: something changes ingress[0]" in created["message"]
    assert world.events.count("Contested") == 1
    assert world.status["phase"] == "Running"
    world.paused.clear()
    world.reconcile()
    assert world.children[key].content["ingress"]
    world.troubles.clear()
    world.reconcile()
    assert world.find_condition("Created")["reason"] == "PodsCreated"
