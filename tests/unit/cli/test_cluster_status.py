"""The report of `topkube status` about stored jobs, and about objects that the account may not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cluster_answers import Answer, Answers, build_status

from topkube.cli.cluster.jobs import find_waiting_reason
from topkube.cli.cluster.status import View, build_report
from topkube.cli.entry import run_app

NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
SPEC: dict[str, Any] = {"workers": 2, "slotsPerWorker": 2, "runPolicy": {"backoffLimit": 1}}
REFUSAL = (
    "this cannot be changed in a job that exists:\n  - spec.workers: cannot be changed from 2 to 9: delete the job."
)


def build_condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def build_job(phase: str, *conditions: dict[str, str], spec: Any = None, **status: Any) -> dict[str, Any]:
    metadata = {"name": "j", "namespace": "team", "generation": 2, "creationTimestamp": "2026-01-01T00:00:00Z"}
    stored_status = {"phase": phase, "observedGeneration": 2, "conditions": list(conditions), **status}
    return {"metadata": metadata, "spec": spec or SPEC, "status": stored_status}


def list_report_lines(stored: dict[str, Any]) -> list[str]:
    return list(build_report(View(stored, [], []), NOW))


def test_a_refused_change_comes_first_and_the_accepted_spec_is_shown() -> None:
    stored = build_job(
        "Running",
        build_condition("Failed", "False", "ChangeRefused", REFUSAL),
        spec={**SPEC, "workers": 9, "slotsPerWorker": 5},
        acceptedSpec=SPEC,
    )
    shown = list_report_lines(stored)
    position = next(number for number, line in enumerate(shown) if "the job follows status.acceptedSpec" in line)
    assert "spec.workers: cannot be changed from 2 to 9" in shown[position + 1]
    assert any("0/2 ready, 2 ranks each" in line for line in shown)
    assert not any("ChangeRefused" in line for line in shown[position + 1 :]), "the refusal is shown once"


def test_messages_of_several_lines_do_not_break_the_table() -> None:
    shown = list_report_lines(
        build_job("Failed", build_condition("Failed", "True", "InvalidSpec", "two mistakes:\n  - a\n  - b"))
    )
    assert [line for line in shown if "InvalidSpec" in line] == [
        "  Failed  True  60s  InvalidSpec  two mistakes: - a - b"
    ]


@pytest.mark.parametrize(
    ("phase", "words"), [("Pending", "no room"), ("Starting", "no room"), ("Running", ""), ("Suspended", "")]
)
def test_the_reason_for_waiting_is_shown_while_a_job_waits(phase: str, words: str) -> None:
    assert (
        find_waiting_reason(build_job(phase, build_condition("Running", "False", "Unschedulable", "no\n  room")))
        == words
    )
    assert find_waiting_reason({"metadata": {}, "status": None}) == ""


def test_the_newest_checkpoint_is_shown_with_its_age() -> None:
    spec = {**SPEC, "checkpoint": {"claimName": "c", "everySteps": 50}}
    progress = {"step": 70, "checkpointStep": 50, "checkpointAt": "2026-01-01T00:00:20Z", "etaSeconds": 90}
    shown = "\n".join(list_report_lines(build_job("Running", spec=spec, progress=progress)))
    assert "newest of step 50, 40s ago; claim c, every 50 steps" in shown
    assert "1 min 30 s left" in shown
    assert "none yet; claim c" in "\n".join(list_report_lines(build_job("Running", spec=spec)))


def test_workers_of_a_job_that_has_succeeded_are_not_called_ready() -> None:
    assert any(
        "2/2 succeeded, 2 ranks each" in line for line in list_report_lines(build_job("Succeeded", workersReady="2/2"))
    )


def test_the_node_of_the_first_failure_and_the_nodes_that_the_job_avoids_are_shown() -> None:
    shown = list_report_lines(
        build_job(
            "Restarting",
            firstFailure={"pod": "j-worker-0-1", "node": "node-a", "rank": 1, "reason": "HardwareFault"},
            avoidedNodes=[
                {"name": "node-a", "reason": "HardwareFault"},
                {"name": "node-b", "reason": "KernelDeadlock"},
            ],
        )
    )
    assert any("pod j-worker-0-1, node node-a, rank 1: HardwareFault" in line for line in shown)
    assert any("avoids" in line and "node-a (HardwareFault), node-b (KernelDeadlock)" in line for line in shown)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"git": {"url": "https://h/r", "commit": "abcdef0123456789"}}, "commit abcdef012345 of https://h/r"),
        ({"archive": {"uri": "s3://b/code.tar.gz"}}, "s3://b/code.tar.gz"),
        ({"configMap": {"name": "code"}}, "ConfigMap code"),
    ],
)
def test_the_source_and_the_packages_of_a_job_are_shown(source: dict[str, Any], words: str) -> None:
    shown = "\n".join(
        list_report_lines(
            build_job("Running", spec={**SPEC, "source": source, "setup": {"requirements": ["a[b]==1", "c"]}})
        )
    )
    assert words in shown
    assert "a\\[b]==1, c" in shown


POD = {"metadata": {"name": "j-worker-0-1", "labels": {}}, "spec": {"containers": [{"name": "main"}]}}


@pytest.mark.parametrize("refused", ["pods", "events"])
def test_what_the_account_may_not_read_is_not_shown_as_absent(
    start_server: Callable[[Answers], Path], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"metadata": {}, "involvedObject": {"kind": "TrainingJob", "name": "j"}, "reason": "Started"}
    stored: dict[str, list[Any]] = {"pods": [POD], "events": [event]}

    def answer(method: str, path: str) -> Answer:
        kind = path.partition("?")[0].rsplit("/", 1)[-1]
        if kind == refused:
            return build_status(403, f"{kind} is forbidden: no", kind=kind)
        data = {"items": stored[kind]} if kind in stored else build_job("Running")
        return 200, json.dumps(data).encode(), {}

    config = str(start_server(answer))
    assert run_app(["status", "j", "--kubeconfig", config]) == 0
    output = capsys.readouterr().out
    assert f"unknown: {refused} is forbidden: no" in output
    assert ("j-worker-0-1" in output) == (refused != "pods")
    assert ("Started" in output) == (refused != "events")
    assert run_app(["status", "j", "-o", "json", "--kubeconfig", config]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[refused] is None
    assert f"the {refused} are unknown: {refused} is forbidden" in captured.err


def test_watching_a_large_job_does_not_list_its_pods_for_each_change(
    start_server: Callable[[Answers], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the report of a terminal
    lists: list[str] = []
    changes = [build_job("Running", progress={"step": step}) for step in range(30)] + [build_job("Succeeded")]
    events = [{"type": "MODIFIED", "object": job} for job in changes]

    def answer(method: str, path: str) -> Answer:
        if "watch=true" in path:
            return 200, "\n".join(map(json.dumps, events)).encode(), {}
        if "/pods" in path:
            lists.append(path)
            return 200, json.dumps({"items": [POD] * 5000}).encode(), {}
        return 200, json.dumps({"items": []} if "/events" in path else changes[0]).encode(), {}

    assert run_app(["status", "j", "--watch", "--kubeconfig", str(start_server(answer))]) == 0
    assert len(lists) == 2, "at the start, and when the job has ended"
    assert "Succeeded" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--watch"]])
@pytest.mark.parametrize("colours", ["", "1"])
def test_the_code_of_a_job_cannot_control_the_terminal_of_a_reader(
    start_server: Callable[[Answers], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    colours: str,
) -> None:
    """A rank writes the message of its failure: it could clear the screen and write another report on it."""
    if colours:
        monkeypatch.setenv("FORCE_COLOR", colours)
    message = "\x1b]0;title\x07\x1b[2J\x1b[1;1H\x9b31mall is well"
    stored = build_job(
        "Failed",
        build_condition("Failed", "True", "Error", message),
        firstFailure={"reason": "Error", "message": message, "logTail": message},
        progress={"step": 1, "loss": "\x1b[8m"},
    )

    def answer(method: str, path: str) -> Answer:
        return 200, json.dumps({"items": []} if "/pods" in path or "/events" in path else stored).encode(), {}

    assert run_app(["status", "j", *options, "--kubeconfig", str(start_server(answer))]) == 0
    output = capsys.readouterr().out
    assert "^[[8m" in output
    for sequence in ("\x1b]0;", "\x07", "\x1b[2J", "\x1b[1;1H", "\x1b[8m", "\x9b"):
        assert sequence not in output
