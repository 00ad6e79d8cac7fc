"""The failure policy and avoided nodes on a real cluster."""

from __future__ import annotations

import pytest
from jobs import build_job
from target import Namespace, wait_for

# The ranks of the attempts before argv[2] end with the exit code argv[1].
EARLY = """
import os, sys, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if int(os.environ["TOPKUBE_ATTEMPT"]) < int(sys.argv[2]):
    sys.exit(int(sys.argv[1]))
"""
MOST_ATTEMPTS = 99


def test_an_exit_code_of_a_rule_fails_the_job_at_once(namespace: Namespace) -> None:
    rule = {"action": "Fail", "onExitCodes": {"containerName": "worker", "values": [42]}}
    command = ["python", "-c", EARLY, "42", str(MOST_ATTEMPTS)]
    wrong = build_job("wrong", command, runPolicy={"backoffLimit": 3, "failurePolicy": {"rules": [rule]}})
    status = namespace.wait_phase(namespace.create(wrong), "Failed")
    assert (status["attempt"], status["firstFailure"]["exitCode"]) == (1, 42)
    condition = namespace.read_condition("wrong", "Failed")
    assert condition["reason"] == "FailurePolicy"
    assert "rules[0]" in condition["message"]
    assert status["firstFailure"]["node"]


def test_a_mistake_in_the_script_is_not_tried_again(namespace: Namespace) -> None:
    typo = build_job("typo", ["python", "-c", "import nunpy"], workers=1, runPolicy={"backoffLimit": 3})
    status = namespace.wait_phase(namespace.create(typo), "Failed")
    assert (status["attempt"], status["firstFailure"]["reason"]) == (1, "ImportError")


def test_a_node_on_which_a_job_failed_twice_is_avoided(namespace: Namespace) -> None:
    if len(namespace.target.list_nodes()) < 2:
        pytest.skip("needs two nodes")
    command = ["python", "-c", EARLY, "7", "3"]
    status = namespace.wait_phase(
        namespace.create(build_job("moves", command, workers=1)), "Failed", "Succeeded", seconds=180
    )
    assert status["phase"] == "Succeeded", status
    assert (status["attempt"], status["restarts"]) == (3, 2)
    failed = status["nodeFailures"]
    assert [entry["reason"] for entry in failed] == ["Error"]
    assert failed[0]["count"] == 2, "a worker whose rank failed stays where it is, so both attempts ran on one node"
    events = wait_for(
        lambda: [reason for reason in namespace.list_events() if "NodesAvoided" in reason], "the Event", 30
    )
    assert events
    workers = {pod.metadata.name: pod.spec.node_name for pod in namespace.list_pods("worker")}
    assert workers[namespace.build_pod_name("moves", "worker-0-3")] != failed[0]["name"]
