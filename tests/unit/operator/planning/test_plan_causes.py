"""`plan` by example: every cause of a failure and of a wait is named, with a reason that outlives the pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_api_server import START
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube.launch import contract
from topkube_operator.model.observed import Container

WORKER = "train-worker-1-1-uid-1"
LONG_LOG = "\n".join(f"line {number} " + "é" * 150 for number in range(60))
TAIL = LONG_LOG.encode()[-4000:].decode(errors="ignore")  # as much as a launcher's message can hold


def _end_worker(code: int, **more: Any) -> Callable[[SimulatedCluster], None]:
    """Return a step: worker 1's pod ends, and the launcher has lost it."""

    def act(world: SimulatedCluster) -> None:
        world.end(WORKER, code, **more)
        world.end_launcher(1, {"pod": WORKER, "reason": "WorkerLost", "message": "its connection was closed"})

    return act


def _end_launcher_with(**failure: Any) -> Callable[[SimulatedCluster], None]:
    """Return a step: the launcher ends with this message about worker 1."""
    return lambda world: world.end_launcher(1, {"pod": WORKER, "exitCode": 1, "logTail": TAIL, **failure})


def _change_and_wait(seconds: float, **change: Any) -> Callable[[SimulatedCluster], None]:
    def act(world: SimulatedCluster) -> None:
        world.change(WORKER, **change)
        world.reconcile()
        world.wait(seconds)

    return act


def _let_worker_be_missing(world: SimulatedCluster) -> None:
    world.report_state("Waiting", missing=(1,))
    world.reconcile()
    world.wait(700)
    world.report_state("Waiting", missing=(1,))


def _lose_node(world: SimulatedCluster) -> None:
    world.change(WORKER, node="node-x")
    world.lost.add("node-x")
    world.report = None
    world.wait(60)


def _fail_before_start(prepare: Container) -> Callable[[SimulatedCluster], None]:
    """Return a step: worker 1's init container fails, so its own container never starts."""

    def act(world: SimulatedCluster) -> None:
        containers = {"prepare": prepare, "worker": Container(waiting="PodInitializing")}
        world.change(WORKER, phase="Failed", ready=False, containers=containers)
        world.report_state("Waiting", missing=(1,))

    return act


MISSING_IMAGE = {
    "worker": Container(waiting="ImagePullBackOff", waiting_message="Back-off pulling image", image="none/such:1")
}
MISSING_MANIFEST = {"worker": Container(waiting="ErrImagePull", waiting_message="manifest unknown")}
KILLED_FOR_MEMORY = {"pod": WORKER, "rank": 2, "reason": "OOMKilled", "exitCode": 137, "logTail": TAIL}
CRASHING_SIDECAR = {
    "proxy": Container(waiting="CrashLoopBackOff", waiting_message="back-off 40s restarting failed container=proxy"),
    "worker": Container(waiting="PodInitializing"),
}
CAUSES: dict[str, tuple[Callable[[SimulatedCluster], None], str, int | None, str, bool]] = {
    "exit code": (_end_worker(7), "Error", 7, "exit code 7", True),
    "exit code of a rank": (_end_launcher_with(reason="Error", rank=3, exitCode=7), "Error", 7, "exit code 7", True),
    "a signal": (_end_worker(139), "Error", 139, "signal 11", True),
    "memory of the container": (_end_worker(137, ended_reason="OOMKilled"), "OOMKilled", 137, "memory", True),
    "memory, in a living pod": (lambda world: world.end_launcher(1, KILLED_FOR_MEMORY), "OOMKilled", 137, "", True),
    "memory, by the worker's words": (
        _end_worker(
            137,
            ended_message=contract.Ending(
                attempt=1, state="Failed", exit_code=137, index=1, oom_kills=2, first_failure=None
            ).to_message(),
        ),
        "OOMKilled",
        137,
        "memory",
        True,
    ),
    "a hung collective": (
        _end_launcher_with(reason="CollectiveTimeout", rank=3, message="rank 3 never arrived"),
        "CollectiveTimeout",
        1,
        "rank 3 never arrived",
        True,
    ),
    "a stall": (
        _end_launcher_with(reason="Stalled", rank=2, message="waited for: rank 2"),
        "Stalled",
        1,
        "rank 2",
        True,
    ),
    "no such command": (
        _end_launcher_with(reason="CommandNotFound", rank=2, exitCode=127, message="'trian' is not there"),
        "CommandNotFound",
        127,
        "'trian' is not there",
        True,
    ),
    "evicted for its own use": (
        lambda world: world.change(WORKER, phase="Failed", reason="Evicted", message="EmptyDir exceeds the limit 1Gi"),
        "Evicted",
        None,
        "exceeds the limit",
        True,
    ),
    "evicted": (
        lambda world: world.change(WORKER, phase="Failed", reason="Evicted", message="The node was low on memory."),
        "Evicted",
        None,
        "low on memory",
        True,
    ),
    "preempted": (
        lambda world: world.change(
            WORKER,
            disruption="PreemptionByScheduler",
            disruption_message="preempting to accommodate a higher priority pod",
            deletion=world.now,
        ),
        "Preempted",
        None,
        "a higher priority pod",
        False,
    ),
    "an init container": (
        _fail_before_start(Container(started=START, exit_code=3, ended=START, ended_reason="Error")),
        "Error",
        3,
        "container prepare: ended with exit code 3",
        True,
    ),
    "an init container's memory": (
        _fail_before_start(Container(started=START, exit_code=137, ended=START, ended_reason="OOMKilled")),
        "OOMKilled",
        137,
        "container prepare: exceeded its memory limit",
        True,
    ),
    "its node restarted": (_end_worker(255, ended_reason="Unknown"), "NodeLost", 255, "restart of the node", True),
    "its node restarted without its runtime's data": (
        _end_worker(137, ended_reason="ContainerStatusUnknown"),
        "NodeLost",
        137,
        "restart of the node",
        True,
    ),
    "its node is lost": (_lose_node, "NodeLost", None, "node-x", False),
    "deleted": (lambda world: world.remove(WORKER), "Deleted", None, "removed", False),
    "does not call": (_let_worker_be_missing, "RendezvousTimeout", None, WORKER, True),
}
"""By name: (the step that causes the failure, its reason, its exit code, words of its message, True if the failure has
a log tail)."""
PENDING: dict[str, tuple[Callable[[SimulatedCluster], None], str, str]] = {
    "the image": (
        _change_and_wait(0, containers=MISSING_IMAGE),
        "ImagePullBackOff",
        "the image none/such:1 cannot be pulled",
    ),
    "the image, in its registry's words": (
        _change_and_wait(0, containers=MISSING_MANIFEST),
        "ImagePullBackOff",
        "manifest unknown",
    ),
    "a native sidecar": (
        _change_and_wait(0, containers=CRASHING_SIDECAR),
        "CrashLoopBackOff",
        "container proxy: back-off 40s",
    ),
    "no room": (
        _change_and_wait(0, scheduling_message="0/3 nodes: 3 Insufficient cpu."),
        "Unschedulable",
        "3 Insufficient cpu.",
    ),
    "nothing else": (_change_and_wait(0), "DeadlineExceeded", "activeDeadlineSeconds (100)"),
}
"""By name: (the step that causes the wait, the reason, words of the message)."""


def _check_kept_after_cleanup(world: SimulatedCluster) -> None:
    """The pods are removed, and the stored failure stays."""
    failure = dict(world.status["firstFailure"])
    for _ in range(3):
        world.wait(60)
        world.reconcile()
        world.run()
    assert (world.status["phase"], world.pods) == ("Failed", {})
    assert world.status["firstFailure"] == failure


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_named_with_a_log_tail_that_outlives_the_pods(cause: str) -> None:
    act, reason, code, words, has_log = CAUSES[cause]
    world = start_running_job(runPolicy={"backoffLimit": 0, "cleanPodPolicy": "All"})
    world.logs = {name: LONG_LOG for name in world.pods}
    act(world)
    for _ in range(3):
        world.reconcile()
        if world.status.get("firstFailure"):
            break
        world.wait(15)
        world.run()
    failure = world.status["firstFailure"]
    assert (failure["reason"], failure.get("exitCode"), failure["pod"]) == (reason, code, WORKER)
    assert words in failure["message"]
    assert ("logTail" in failure) == has_log
    if has_log:
        assert len(failure["logTail"].encode()) <= 4096
        assert len(failure["logTail"].splitlines()) <= 20
        assert failure["logTail"].splitlines()[-1].startswith("line 59 ")
    world.lost.clear()
    if world.status["phase"] != "Failed":  # a disruption: the next attempt fails for good
        world.wait(100)
        world.start_ranks()
        world.end_launcher(1, {**RANK_FAILED, "pod": None})
        world.reconcile()
    _check_kept_after_cleanup(world)


def test_a_restart_of_the_launchers_node_does_not_count() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    (launcher,) = (name for name in world.pods if "launcher" in name)
    ended = Container(started=START, exit_code=255, ended=START, ended_reason="Unknown")
    world.change(launcher, phase="Failed", containers={"launcher": ended})
    world.reconcile()
    status = world.status
    assert (status["phase"], status["restarts"], status["disruptions"]) == ("Restarting", 0, 1)
    assert (status["firstFailure"]["reason"], status["firstFailure"]["pod"]) == ("NodeLost", launcher)


@pytest.mark.parametrize("cause", PENDING)
def test_a_job_that_never_began_fails_at_the_deadline_with_the_reason_of_its_wait(cause: str) -> None:
    act, reason, words = PENDING[cause]
    world = SimulatedCluster(build_job(runPolicy={"activeDeadlineSeconds": 100, "cleanPodPolicy": "All"}))
    world.reconcile()
    act(world)
    world.reconcile()
    assert world.status["phase"] == "Pending"
    world.wait(100)
    world.reconcile()
    failure = world.status["firstFailure"]
    assert (world.status["phase"], failure["reason"]) == ("Failed", reason)
    assert words in failure["message"]
    assert words in world.find_condition("Failed")["message"]
    _check_kept_after_cleanup(world)
