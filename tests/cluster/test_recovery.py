"""Recovery of jobs from failures of ranks, pods, operators, API servers, nodes and links."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kubernetes
import needs
import pytest
from jobs import build_endless_steps, build_job, build_steps, build_steps_that_end_in_attempt
from kubernetes.client.exceptions import ApiException
from localkube.cluster import LocalCluster
from target import GROUP, PATIENCE, PLURAL, VERSION, Namespace, Target, wait_for

RESTART_SECONDS = 15.0 * PATIENCE
"""Maximum time from the death of a worker to running ranks."""


def start_running(namespace: Namespace, name: str, **spec: object) -> None:
    """Create a job without end, and wait until its ranks run."""
    namespace.create(build_job(name, build_endless_steps(), **spec))
    namespace.wait_phase(name, "Running")
    namespace.wait_log("runs")


def wait_for_attempt(namespace: Namespace, name: str, attempt: int, seconds: float = 90.0) -> dict[str, object]:
    """Return the status when ranks run in `attempt`."""

    def read_running_status() -> dict[str, object] | None:
        status = namespace.read_status(name)
        assert status.get("phase") not in ("Failed", "Succeeded"), status
        return status if status.get("attempt") == attempt and status.get("phase") == "Running" else None

    return wait_for(read_running_status, f"{name} to run in attempt {attempt}", seconds)


@pytest.mark.alone
def test_a_killed_rank_restarts_in_place(namespace: Namespace) -> None:
    """Every worker pod continues, including the pod whose rank died."""
    start_running(namespace, "rank")
    before = namespace.read_uids("worker")
    launcher = namespace.read_uids("launcher")
    failed, living = (namespace.build_pod_name("rank", part) for part in ("worker-1-1", "worker-0-1"))
    match = wait_for(lambda: re.search(r"rank 1 of 2 runs as (\d+)", namespace.read_log(failed)), "rank 1's number", 30)
    namespace.execute(failed, "python", "-c", f"import os; os.kill({match[1]}, 9)")
    began = time.monotonic()
    status = wait_for_attempt(namespace, "rank", 2)
    assert time.monotonic() - began < RESTART_SECONDS
    assert status["restarts"] == 1
    failure = status["firstFailure"]
    assert failure["rank"] == 1
    assert failure["exitCode"] == 137
    after = namespace.read_uids("worker")
    assert after[living] == before[living]
    assert set(namespace.read_uids("launcher")) != set(launcher)


@pytest.mark.alone
def test_a_killed_worker_is_replaced_and_the_living_stay(namespace: Namespace, breakable_cluster: LocalCluster) -> None:
    start_running(namespace, "worker")
    before = namespace.read_uids("worker")
    parts = ("worker-0-1", "worker-1-1", "worker-1-2")
    living, killed, replacement = (namespace.build_pod_name("worker", part) for part in parts)
    pod = next(pod for pod in namespace.list_pods("worker") if pod.metadata.name == killed)
    namespace.target.kill_container(pod, "worker")
    began = time.monotonic()
    status = wait_for_attempt(namespace, "worker", 2)
    assert time.monotonic() - began < RESTART_SECONDS
    assert status["restarts"] == 1
    after = namespace.read_uids("worker")
    assert after[living] == before[living]
    assert replacement in after
    assert len(namespace.list_pods("launcher")) == 1


@pytest.mark.parametrize("how", ["worker deleted", "worker drained", "launcher deleted"])
def test_a_deleted_pod_costs_one_attempt_and_no_backoff(namespace: Namespace, how: str) -> None:
    """The pod is deleted by hand, or evicted by a drain of its node."""
    role, _, way = how.partition(" ")
    start_running(namespace, "gone", runPolicy={"backoffLimit": 0})
    before = namespace.read_uids("worker")
    deleted = namespace.list_pods(role)[0].metadata.name
    if way == "drained":
        eviction = {"metadata": {"name": deleted, "namespace": namespace.name}}
        namespace.target.core.create_namespaced_pod_eviction(deleted, namespace.name, eviction)
    else:
        namespace.target.core.delete_namespaced_pod(deleted, namespace.name)
    status = wait_for_attempt(namespace, "gone", 2)
    assert (status["restarts"], status["disruptions"]) == (0, 1)
    after = namespace.read_uids("worker")
    assert {name: uid for name, uid in before.items() if name != deleted}.items() <= after.items()
    assert len(after) == 2


@pytest.mark.parametrize("kind", ["service", "secret", "network_policy"])
def test_a_deleted_child_is_put_back(namespace: Namespace, kind: str) -> None:
    """If the new Service has another address, the workers of the next attempt find it."""
    start_running(namespace, "child")
    names = {"service": "child", "secret": "child-credentials", "network_policy": "child-worker"}
    api = namespace.target.policies if kind == "network_policy" else namespace.target.core
    before = getattr(api, f"read_namespaced_{kind}")(names[kind], namespace.name)
    getattr(api, f"delete_namespaced_{kind}")(names[kind], namespace.name, _preload_content=False)

    def is_replaced() -> bool:
        listed = getattr(api, f"list_namespaced_{kind}")(namespace.name).items
        return any(item.metadata.name == names[kind] and item.metadata.uid != before.metadata.uid for item in listed)

    wait_for(is_replaced, f"the {kind} to be put back", 30)
    if kind == "secret":  # it is derived from a key, so it has the same bytes
        assert namespace.target.core.read_namespaced_secret(names[kind], namespace.name).data == before.data
    attempt = namespace.read_status("child")["attempt"]
    pod = namespace.list_pods("worker")[1].metadata.name
    namespace.target.core.delete_namespaced_pod(pod, namespace.name, grace_period_seconds=0)

    def has_next_attempt() -> bool:
        status = namespace.read_status("child")
        return status["attempt"] > attempt and status["phase"] == "Running"

    wait_for(has_next_attempt, "the next attempt to run", 90)


@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_a_job_completes_although_the_operator_is_killed_again_and_again(namespace: Namespace) -> None:
    """The operator gets SIGKILL at random moments of a job's life, in which a worker is deleted. Attempts are counted
    once, there is one launcher at a time, and no object is left."""
    target = namespace.target
    target.scale_operator(0)
    chance = random.Random(20)
    try:
        name = namespace.create(
            build_job("immortal", build_steps_that_end_in_attempt(2, 120, 0.05), runPolicy={"cleanPodPolicy": "All"})
        )
        launchers, killed, deleted = 0, 0, False
        deadline = time.monotonic() + 240 * PATIENCE
        while namespace.read_phase(name) not in ("Succeeded", "Failed"):
            assert time.monotonic() < deadline, namespace.read_status(name)
            with run_operator(target, namespace.name) as process:
                # Each process lives longer than the last, because on a slow machine the first ones do nothing yet.
                until = time.monotonic() + (0.9 + chance.random() * 3) * (1 + killed / 6)
                while time.monotonic() < until and namespace.read_phase(name) not in ("Succeeded", "Failed"):
                    active = [
                        pod for pod in namespace.list_pods("launcher") if pod.status.phase in ("Pending", "Running")
                    ]
                    launchers = max(launchers, len(active))
                    if namespace.read_phase(name) == "Running" and not deleted:
                        pod = namespace.list_pods("worker")[0].metadata.name
                        target.core.delete_namespaced_pod(pod, namespace.name, grace_period_seconds=0)
                        deleted = True
                process.send_signal(signal.SIGKILL)
                killed += 1
        status = namespace.read_status(name)
        assert status["phase"] == "Succeeded", status
        assert killed >= 3
        assert launchers == 1
        assert (status["restarts"], status["disruptions"], status["attempt"]) == (0, 1, 2)
    finally:
        target.scale_operator(2)
    wait_for(
        lambda: not any("pod/" in child for child in namespace.list_children()), "cleanPodPolicy All to be done", 30
    )


def read_lease_holder(target: Target) -> str:
    """Return the holder of the operators' Lease."""
    lease = target.leases.read_namespaced_lease("topkube-operator", "topkube-system")
    return str(lease.spec.holder_identity or "")


def find_leader(target: Target) -> tuple[str, Any]:
    """Return the leader and its pod."""
    first = wait_for(lambda: read_lease_holder(target), "an operator to lead", 30)
    return first, next(pod for pod in target.list_operator_pods() if first.startswith(pod.metadata.name))


@pytest.mark.alone
def test_one_of_two_operators_acts_and_the_other_takes_over(
    namespace: Namespace, breakable_cluster: LocalCluster
) -> None:
    """The leader is killed: its Lease is taken over within 20 s, and a new job runs."""
    target = namespace.target
    first, pod = find_leader(target)
    # The process is killed before it can hand over its Lease.
    target.kill_container(pod, "operator")
    began = time.monotonic()
    wait_for(lambda: read_lease_holder(target) not in ("", first), "another operator to lead", 60)
    assert time.monotonic() - began < 20 * PATIENCE
    name = namespace.create(build_job("heir", build_steps(1), workers=1))
    namespace.wait_phase(name, "Succeeded")


@pytest.mark.alone
def test_a_restart_of_the_api_server_does_not_disturb_a_job(
    namespace: Namespace, breakable_cluster: LocalCluster
) -> None:
    start_running(namespace, "outage")
    uids = namespace.read_uids("worker")
    breakable_cluster.restart_api_server()
    assert namespace.read_uids("worker") == uids
    assert namespace.read_status("outage")["restarts"] == 0
    worker = namespace.list_pods("worker")[1].metadata.name  # the operator listens again
    namespace.target.core.delete_namespaced_pod(worker, namespace.name, grace_period_seconds=0)
    assert wait_for_attempt(namespace, "outage", 2)["disruptions"] == 1


@pytest.mark.alone
def test_a_worker_on_a_vanished_node_is_replaced(namespace: Namespace, breakable_cluster: LocalCluster) -> None:
    """The worker is replaced on another node. Its old pod, which is stuck on the lost node, blocks nothing, not even a
    new job of the same name. When the node returns, it takes no part."""
    needs.require_nodes(namespace.target, 3, "the third to replace the lost one")
    start_running(namespace, "lost", runPolicy={"backoffLimit": 0})
    before = {pod.metadata.name: pod for pod in namespace.list_pods()}
    workers = [pod for name, pod in before.items() if "worker" in name]
    launcher = next(pod for name, pod in before.items() if "launcher" in name)
    lost_worker = next((pod for pod in workers if pod.spec.node_name != launcher.spec.node_name), workers[0])
    node = lost_worker.spec.node_name
    breakable_cluster.vanish(node)
    try:
        status = wait_for_attempt(namespace, "lost", 2, seconds=120)
        assert (status["restarts"], status["disruptions"]) == (0, 1)
        assert status["firstFailure"]["pod"] == lost_worker.metadata.name
        assert status["firstFailure"]["reason"] in ("NodeLost", "WorkerLost"), status["firstFailure"]
        living = next(pod for pod in workers if pod is not lost_worker).metadata.name
        assert namespace.read_uids("worker")[living] == before[living].metadata.uid
        replaced = [pod for pod in namespace.list_pods("worker") if pod.metadata.labels["topkube.dev/attempt"] == "2"]
        assert [pod.spec.node_name == node for pod in replaced] == [False]
        namespace.delete("lost")
        wait_for(lambda: not namespace.exists("lost"), "the job to be gone")
        start_running(namespace, "lost")
        stuck = namespace.target.core.read_namespaced_pod(lost_worker.metadata.name, namespace.name).metadata
        assert stuck.uid == lost_worker.metadata.uid, (
            "the pod on the lost node stays, and the next job of this name runs"
        )
    finally:
        breakable_cluster.come_back(node)
    wait_for(lambda: _is_gone(namespace, lost_worker), "the lost pod to be cleared away", 60)
    status = namespace.read_status("lost")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)


def _is_gone(namespace: Namespace, pod: Any) -> bool:
    listed = namespace.target.core.list_namespaced_pod(namespace.name).items
    return all(other.metadata.uid != pod.metadata.uid for other in listed)


@pytest.mark.alone
def test_a_job_survives_a_link_that_is_cut_for_ten_seconds(
    namespace: Namespace, breakable_cluster: LocalCluster
) -> None:
    start_running(namespace, "blip")
    nodes = sorted({pod.spec.node_name for pod in namespace.list_pods("worker")})
    uids = namespace.read_uids("worker")
    breakable_cluster.cut(*nodes)
    began = time.monotonic()
    try:
        wait_for(lambda: time.monotonic() - began > 10, "ten seconds to pass", 12)
    finally:
        breakable_cluster.mend(*nodes)
    attempt = namespace.read_status("blip")["attempt"]

    def is_running() -> bool:
        status = namespace.read_status("blip")
        return status["phase"] == "Running" and status["workersReady"] == "2/2"

    wait_for(is_running, "the job to continue", 60)
    assert namespace.read_uids("worker") == uids
    assert namespace.read_status("blip")["attempt"] == attempt == 1


@pytest.mark.alone
def test_a_link_that_stays_cut_ends_the_attempt_as_a_disruption(
    namespace: Namespace, breakable_cluster: LocalCluster
) -> None:
    """The attempt ends as a disruption. The next attempt waits and names the missing worker until the link works
    again."""
    # The launcher runs on `first`, which the operator can reach.
    leaders_node = find_leader(namespace.target)[1].spec.node_name
    rest = [node for node in breakable_cluster.nodes if node != leaders_node]
    first, second = rest[:2] if len(rest) > 1 else (leaders_node, *rest)
    cut = place_on_nodes(build_job("cut", build_endless_steps(), runPolicy={"backoffLimit": 0}), first, second)
    namespace.create(cut)
    namespace.wait_phase("cut", "Running")
    namespace.wait_log("runs")
    breakable_cluster.cut(first, second)
    try:
        wait_for(lambda: namespace.read_status("cut")["attempt"] == 2, "the attempt to be given up", 90)
        lost = namespace.read_status("cut")["firstFailure"]["pod"]
        words = "1 of 2 workers have not called the launcher"
        wait_for(
            lambda: words in namespace.read_condition("cut", "Running").get("message", ""),
            "the condition to name the missing worker",
            90,
        )
        assert "cut-worker-" in lost
    finally:
        breakable_cluster.mend(first, second)
    status = wait_for_attempt(namespace, "cut", 2)
    assert (status["restarts"], status["disruptions"]) == (0, 1)


@pytest.fixture
def unguarded_namespace(namespace: Namespace) -> Iterator[Namespace]:
    """Remove the webhook, so that invalid jobs are stored."""
    hooks = namespace.target.admission
    before = hooks.read_validating_webhook_configuration("topkube")
    hooks.delete_validating_webhook_configuration("topkube")
    wait_for(
        lambda: _is_accepted(namespace, build_job("asked", build_steps(1))), "the API server to forget the webhook", 30
    )
    yield namespace
    before.metadata = kubernetes.client.V1ObjectMeta(name="topkube", labels=before.metadata.labels)
    hooks.create_validating_webhook_configuration(before)


def _is_accepted(namespace: Namespace, invalid: dict[str, Any]) -> bool:
    """Return True if the API server would store a job without a command."""
    del invalid["spec"]["template"]["spec"]["containers"][0]["command"]
    kind = (GROUP, VERSION, namespace.name, PLURAL)
    try:
        namespace.target.custom.create_namespaced_custom_object(*kind, invalid, dry_run="All")
    except ApiException:
        return False
    return True


@pytest.mark.alone
def test_a_job_with_an_invalid_spec_fails_without_pods(unguarded_namespace: Namespace) -> None:
    """The Failed condition and an Event report the mistake, and no pod is made."""
    nonsense = build_job("nonsense", build_steps(1))
    del nonsense["spec"]["template"]["spec"]["containers"][0]["command"]
    name = unguarded_namespace.create(nonsense)
    unguarded_namespace.wait_phase(name, "Failed")
    failed = unguarded_namespace.read_condition(name, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "InvalidSpec")
    assert "command" in failed["message"]
    assert unguarded_namespace.list_children() == set()
    wait_for(
        lambda: any("command" in event for event in unguarded_namespace.list_events()), "an Event with the mistake", 30
    )


@pytest.mark.alone
def test_an_invalid_change_of_a_running_job_is_reported_and_its_pods_stay(unguarded_namespace: Namespace) -> None:
    """The job reports the mistake, and its pods do not change. After the correction it continues."""
    start_running(unguarded_namespace, "edited")
    before = unguarded_namespace.read_uids("worker") | unguarded_namespace.read_uids("launcher")
    template = unguarded_namespace.read_job("edited")["spec"]["template"]
    command = template["spec"]["containers"][0].pop("command")
    unguarded_namespace.patch("edited", {"spec": {"template": template}})
    wait_for(
        lambda: unguarded_namespace.read_condition("edited", "Failed").get("status") == "True",
        "the condition Failed",
        30,
    )
    assert "command" in unguarded_namespace.read_condition("edited", "Failed")["message"]
    template["spec"]["containers"][0]["command"] = command
    unguarded_namespace.patch("edited", {"spec": {"template": template}})
    status = wait_running(unguarded_namespace, "edited")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
    assert unguarded_namespace.read_uids("worker") | unguarded_namespace.read_uids("launcher") == before


def wait_running(namespace: Namespace, name: str) -> dict[str, object]:
    def read_running_status() -> dict[str, object] | None:
        status = namespace.read_status(name)
        return status if status.get("phase") == "Running" else None

    return wait_for(read_running_status, f"{name} to run again", 60)


def place_on_nodes(job: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """Place the job's workers on two nodes, and its launcher on the first of them. Return the job."""
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [first, second]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    job["spec"]["template"]["spec"]["affinity"] = affinity
    job["spec"]["launcher"] = {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": first}}}}
    return job


@contextmanager
def run_operator(target: Target, namespace: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an operator outside the cluster, for one namespace, without a Lease."""
    command = [
        sys.executable, "-m", "topkube_operator", "--kubeconfig", str(target.kubeconfig), "--namespace", namespace,
        "--operator-namespace", "topkube-system", "--no-leader-election", "--metrics-port", "0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
