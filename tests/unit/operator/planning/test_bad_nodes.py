"""`plan` keeps new pods away from nodes with a fault, and from nodes on which attempts failed first repeatedly."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from simulated_api_server import START
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube.errors import JobError
from topkube_operator.children.avoidance import avoid_nodes
from topkube_operator.model import names
from topkube_operator.model.nodes import NodeFailure, find_fault, read_node_failures
from topkube_operator.model.observed import Trouble

HOUR = 3600
NO_ROOM = "0/4 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
MANY_RESTARTS = {"backoffLimit": 99}
LONG_NAME = "a." * 40 + "example"
"""The name of a node may be this long, but not the value of a label."""


def _list_avoided_nodes(world: SimulatedCluster) -> list[str]:
    return [entry["name"] for entry in world.status.get("avoidedNodes", [])]


def _fail_on(world: SimulatedCluster, node: str, **failure: Any) -> None:
    """Let a rank of worker 0 fail on `node`, and begin the next attempt."""
    name = max(name for name in world.pods if "worker-0" in name)
    world.change(name, node=node)
    world.end_launcher(1, {**RANK_FAILED, "pod": name, "rank": 0, **failure})
    world.reconcile()


def _list_pods_on(node: str, world: SimulatedCluster) -> list[str]:
    return [pod.name for pod in world.pods.values() if pod.node == node and pod.deletion is None and not pod.has_ended]


def _build_failures(*entries: tuple[str, int], minutes: int = 5, node: str = "node-c") -> tuple[NodeFailure, ...]:
    at = START - timedelta(minutes=minutes)
    return tuple(NodeFailure(node, job, count, "Error", at) for job, count in entries)


def test_the_second_failure_of_a_job_on_a_node_moves_it_elsewhere() -> None:
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    _fail_on(world, "node-c")
    assert (_list_avoided_nodes(world), world.status["firstFailure"]["node"]) == ([], "node-c")
    assert world.status["nodeFailures"] == [
        {"name": "node-c", "count": 1, "reason": "Error", "lastFailureTime": "2026-01-01T00:00:00Z"}
    ]
    world.wait(100)
    world.start_ranks()
    _fail_on(world, "node-c")
    world.wait(100)
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"]
    entry = world.status["avoidedNodes"][0]
    assert (entry["reason"], entry["until"]) == ("Error", "2026-01-01T01:01:40Z")
    assert "2 attempts of this job failed there first" in entry["message"]
    assert world.events.count("NodesAvoided") == 1
    assert _list_pods_on("node-c", world) == [], "the worker on this node is replaced too"
    assert world.status["phase"] == "Running"


def test_an_avoided_node_is_used_again_after_an_hour() -> None:
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    _fail_on(world, "node-c", reason="HardwareFault")
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"], "one fault of the hardware is enough"
    world.report_state("Running")
    assert world.reconcile().requeue == HOUR
    world.wait(HOUR)
    world.report_state("Running")
    world.reconcile()
    assert _list_avoided_nodes(world) == []
    _fail_on(world, "node-c")
    world.start_ranks()
    assert world.status["nodeFailures"][0]["count"] == 1, "the earlier failure does not count any more"
    assert _list_avoided_nodes(world) == []


@pytest.mark.parametrize("reason", ["OOMKilled", "SyntaxError", "SourceUnavailable", "SetupFailed", "Terminated"])
def test_failures_by_the_job_or_the_cluster_do_not_count_against_the_node(reason: str) -> None:
    rules = [{"action": "Restart", "onReasons": ["SyntaxError"]}]
    world = start_running_job(workers=1, runPolicy={**MANY_RESTARTS, "failurePolicy": {"rules": rules}})
    for _ in range(3):
        _fail_on(world, "node-c", reason=reason)
        world.wait(400)
        world.start_ranks()
    assert "nodeFailures" not in world.status
    assert _list_avoided_nodes(world) == []


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "TopologyAffinityError"])
def test_a_node_whose_kubelet_refuses_a_pod_is_avoided_and_the_restart_does_not_count(reason: str) -> None:
    """The scheduler sees neither a broken device nor the room of a NUMA node: it would choose the node again."""
    world = start_running_job(workers=1, runPolicy={"backoffLimit": 0})
    (name,) = (name for name in world.pods if "worker-0" in name)
    world.change(name, node="node-c", phase="Failed", reason=reason, message="refused", containers={})
    world.report = None
    world.wait(60)
    world.reconcile()
    status = world.status
    assert (status["phase"], status["restarts"], status["disruptions"]) == ("Restarting", 0, 1)
    assert (status["firstFailure"]["reason"], _list_avoided_nodes(world)) == (reason, ["node-c"])


def test_a_lost_node_is_avoided_when_it_is_back() -> None:
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    world.change("train-worker-0-1-uid-1", node="node-c")
    world.lost.add("node-c")
    world.wait(60)
    world.reconcile()
    assert world.status["firstFailure"]["reason"] == "NodeLost"
    world.lost.clear()
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"]


@pytest.mark.parametrize(
    ("failures", "is_avoided"),
    [
        (_build_failures(("a", 1), ("b", 2)), True),
        (_build_failures(("a", 1), ("b", 1), ("c", 1)), True),
        (_build_failures(("a", 50)), False),
        (_build_failures(("a", 1), ("b", 1)), False),
        (_build_failures(("a", 9), ("b", 9), minutes=61), False),
    ],
    ids=["three of two jobs", "three of three jobs", "one job alone", "too few", "too long ago"],
)
def test_failures_of_several_other_jobs_count(failures: tuple[NodeFailure, ...], is_avoided: bool) -> None:
    world = SimulatedCluster(build_job())
    world.node_failures = failures
    world.start_ranks()
    assert _list_avoided_nodes(world) == (["node-c"] if is_avoided else [])
    assert all(avoided == ({"node-c"} if is_avoided else set()) for avoided in world.avoided.values())
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize(
    "time",
    [
        "9999-12-31T23:59:59Z",
        "9999-12-31T23:59:59-14:00",
        "2099-01-01T00:00:00Z",
        "2026-01-01T00:05:01Z",
        "0001-01-01T00:00:00+14:00",
        "0001-01-01T00:00:00Z",
        "soon",
        "",
        None,
        7,
    ],
)
def test_forged_times_in_the_statuses_of_other_jobs_have_no_effect(time: Any) -> None:
    entry = {"name": "node-c", "count": 9, "reason": "Error", "lastFailureTime": time}
    world = SimulatedCluster(build_job())
    world.node_failures = tuple(
        failure for job in ("a", "b") for failure in read_node_failures(job, {"nodeFailures": [entry]})
    )
    world.start_ranks()
    assert (_list_avoided_nodes(world), world.status["phase"]) == ([], "Running")


def test_a_failure_on_a_node_that_does_not_exist_is_not_recorded() -> None:
    """A template may name any node. The pod is then removed by Kubernetes' garbage collection of pods."""
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    worker = "train-worker-0-1-uid-1"
    world.change(worker, node="phantom", phase="Failed", disruption="DeletionByPodGC")
    world.reconcile()
    world.wait(5)
    world.start_ranks()
    assert (world.status["firstFailure"]["reason"], world.status["attempt"]) == ("NodeLost", 2)
    assert "nodeFailures" not in world.status
    assert _list_avoided_nodes(world) == []


def test_nodes_that_do_not_exist_take_no_place_of_real_nodes() -> None:
    world = SimulatedCluster(build_job(spread="None"))
    forged = [_build_failures(("a", 99), ("b", 99), node=node) for node in ("another", "phantom", LONG_NAME)]
    world.node_failures = (
        *(failure for failures in forged for failure in failures),
        *_build_failures(("a", 2), ("b", 2)),
    )
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"]


@pytest.mark.parametrize(("hostname", "is_avoided"), [(LONG_NAME, False), ("a", True), ("a-", False)])
def test_a_node_whose_hostname_is_no_label_value_is_not_avoided(hostname: str, is_avoided: bool) -> None:
    world = SimulatedCluster(build_job())
    world.hostnames = {LONG_NAME: hostname}
    world.node_failures = _build_failures(("a", 2), ("b", 2), node=LONG_NAME)
    world.start_ranks()
    assert _list_avoided_nodes(world) == ([LONG_NAME] if is_avoided else [])
    assert world.status["phase"] == "Running"


def test_a_clock_of_an_earlier_leader_may_be_ahead() -> None:
    world = SimulatedCluster(build_job())
    world.node_failures = _build_failures(("a", 2), ("b", 2), minutes=-5)
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"]


def test_failures_of_other_jobs_move_no_worker_that_runs() -> None:
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    world.change("train-worker-0-1-uid-1", node="node-c")
    world.node_failures = _build_failures(("a", 9), ("b", 9))
    world.end_launcher(1, {**RANK_FAILED, "pod": None, "rank": None})
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"]
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1"]
    world.node_faults = {"node-c": "KernelDeadlock"}
    world.end_launcher(1, {**RANK_FAILED, "pod": None, "rank": None})
    world.reconcile()
    world.wait(5)
    world.start_ranks()
    assert sorted(name for name, pod in world.pods.items() if not pod.deletion) == [
        "train-launcher-3-uid-1",
        "train-worker-0-3-uid-1",
    ]


def test_a_node_with_a_fault_is_avoided_and_comes_first() -> None:
    world = SimulatedCluster(build_job(spread="None"))
    world.node_failures = _build_failures(("a", 9), ("b", 9), node="node-a")
    world.node_faults = {"node-b": "ReadonlyFilesystem"}
    world.start_ranks()
    assert world.status["avoidedNodes"] == [
        {
            "name": "node-b",
            "reason": "ReadonlyFilesystem",
            "message": "the node reports the condition ReadonlyFilesystem",
        }
    ], "only a third of the nodes is avoided"
    assert world.reconcile().is_empty
    assert _list_pods_on("node-b", world) == []


def test_a_job_that_needs_every_node_avoids_none() -> None:
    world = SimulatedCluster(build_job(workers=4, spread="Node"))
    world.node_faults = {"node-b": "ReadonlyFilesystem"}
    world.reconcile()
    assert _list_avoided_nodes(world) == []


@pytest.mark.parametrize("crash_after", [None, 1])
def test_pods_that_find_no_other_node_may_use_the_avoided_nodes_after_a_minute(crash_after: int | None) -> None:
    """`crash_after`: the operator is killed after it has written the status, before it deletes a pod."""
    world = SimulatedCluster(build_job())
    world.node_faults = {"node-b": "KernelDeadlock"}
    world.reconcile()
    world.schedule()
    waiting = "train-worker-1-1-uid-1"
    world.change(waiting, node="", scheduled=None, scheduling_message=NO_ROOM)
    world.run()
    assert world.reconcile().requeue == 60
    world.wait(60)
    world.crash_after = crash_after
    world.reconcile()
    status = world.status
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (2, 0, 1)
    assert (status["firstFailure"]["reason"], status["firstFailure"]["pod"]) == ("AvoidedNodeNeeded", waiting)
    assert _list_avoided_nodes(world) == []
    world.start_ranks()
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-2-uid-1"]
    assert world.avoided["train-worker-1-2-uid-1"] == set()
    assert world.status["phase"] == "Running"


class RefusingCluster(SimulatedCluster):
    """A cluster whose API server, or a policy, refuses all pods with a word in their annotations."""

    refused_word = names.AVOIDED_NODES

    def apply(self, manifest: dict[str, Any]) -> None:
        metadata = manifest["metadata"]
        if manifest["kind"] == "Pod" and self.refused_word in str(metadata["annotations"]):
            self.troubles["Pod", metadata["name"]] = Trouble("Refused", "values[0]: Invalid value")
        else:
            super().apply(manifest)


def test_refused_pods_may_use_the_avoided_nodes_after_a_minute() -> None:
    world = RefusingCluster(build_job())
    world.node_faults = {"node-b": "KernelDeadlock"}
    world.reconcile()
    world.reconcile()
    assert (world.status["attempt"], world.find_condition("Created")["reason"]) == (1, "Refused")
    assert world.plan().requeue == 60
    world.wait(60)
    world.reconcile()
    world.start_ranks()
    status = world.status
    assert (status["attempt"], status["restarts"], status["phase"]) == (2, 0, "Running")
    assert status["firstFailure"]["reason"] == "AvoidedNodeNeeded"
    assert "refused for 60 s (values[0]: Invalid value)" in status["firstFailure"]["message"]
    assert not world.violations


def test_pods_that_are_refused_for_another_reason_begin_one_attempt() -> None:
    world = RefusingCluster(build_job())
    world.refused_word = ""
    world.node_faults = {"node-b": "KernelDeadlock"}
    for _ in range(10):
        world.reconcile()
        world.wait(60)
    assert (world.status["attempt"], world.find_condition("Created")["reason"]) == (2, "Refused")


def test_waiting_for_the_avoided_nodes_does_not_count_against_max_disruptions() -> None:
    world = SimulatedCluster(build_job(runPolicy={"failurePolicy": {"maxDisruptions": 0}}))
    world.node_faults = {"node-b": "KernelDeadlock"}
    world.reconcile()
    world.change("train-worker-1-1-uid-1", scheduling_message=NO_ROOM)
    world.wait(60)
    world.reconcile()
    assert (world.status["attempt"], world.status["phase"]) == (2, "Restarting")


def test_nothing_is_avoided_when_nothing_runs() -> None:
    world = start_running_job(workers=1, runPolicy=MANY_RESTARTS)
    _fail_on(world, "node-c", reason="HardwareFault")
    assert _list_avoided_nodes(world) == ["node-c"]
    world.edit_policy(suspend=True)
    world.reconcile()
    assert _list_avoided_nodes(world) == []
    world.run()
    world.edit_policy(suspend=False)
    world.start_ranks()
    assert _list_avoided_nodes(world) == ["node-c"], "the job remembers"
    world.end_launcher(0)
    world.reconcile()
    assert _list_avoided_nodes(world) == []
    assert world.status["nodeFailures"], "other jobs remember"


def test_the_rule_is_added_to_every_term_of_the_templates_own_affinity() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": []}]}
    pod: Any = {
        "metadata": {"annotations": {}},
        "spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}},
    }
    avoid_nodes(pod, ["b", "a"])
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, rule]},
        {"matchFields": [], "matchExpressions": [rule]},
    ]
    assert pod["metadata"]["annotations"] == {"topkube.dev/avoided-nodes": "a,b"}
    plain: Any = {"metadata": {"annotations": {}}, "spec": {}}
    avoid_nodes(plain, [])
    assert plain == {"metadata": {"annotations": {}}, "spec": {}}
    required["nodeSelectorTerms"] = {}  # type: ignore[assignment]
    with pytest.raises(JobError, match="nodeSelectorTerms: is not a list"):
        avoid_nodes(pod, ["a"])


@pytest.mark.parametrize(
    ("conditions", "fault"),
    [
        ([("Ready", "True"), ("MemoryPressure", "True"), ("EtcdIsVoter", "True")], ""),
        ([("KernelDeadlock", "False"), ("ReadonlyFilesystem", "True")], "ReadonlyFilesystem"),
        ([("AcceleratedHardwareReady", "True")], ""),
        ([("AcceleratedHardwareReady", "False")], "AcceleratedHardwareReady"),
        ([("GpuXidError", "True")], "GpuXidError"),
    ],
)
def test_a_fault_is_read_from_the_conditions_of_a_node(conditions: list[tuple[str, str]], fault: str) -> None:
    entries = [{"type": kind, "status": status} for kind, status in conditions]
    assert find_fault(entries, ["GpuXidError"]) == fault


@pytest.mark.parametrize("status", [None, 3, {"nodeFailures": 3}, {"nodeFailures": [3, {}, {"name": "a"}]}])
def test_a_malformed_status_has_no_failures(status: Any) -> None:
    assert read_node_failures("uid", status) == ()
