"""`topkube delete` with an API server that restarts, and with many pods."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cluster_answers import Answer, Answers, build_status

from topkube.cli.entry import run_app

UNKNOWN_KIND = (404, b"404 page not found\n", dict[str, str]())
GONE = build_status(404, 'trainingjobs.topkube.dev "j" not found', name="j", kind="trainingjobs")
JOB = {"metadata": {"name": "j", "uid": "u"}}


def respond(data: Any) -> Answer:
    return 200, json.dumps(data).encode(), {}


def test_a_deletion_that_a_starting_server_does_not_know_is_an_error(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_server(lambda method, path: UNKNOWN_KIND if method == "DELETE" else respond(JOB))
    assert run_app(["delete", "j", "--no-wait", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr()
    assert "deleted" not in output.out
    assert "this cluster does not know TrainingJobs" in output.err


def test_a_job_is_not_taken_for_gone_while_the_server_starts(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def answer(method: str, path: str) -> Answer:
        if "/pods" in path:
            return respond({"items": []})
        calls.append(method)
        return {3: UNKNOWN_KIND, 5: GONE}.get(len(calls), respond(JOB))

    assert run_app(["delete", "j", "--kubeconfig", str(start_server(answer))]) == 0, capsys.readouterr().err
    assert calls == ["GET", "DELETE", "GET", "GET", "GET"]


def test_a_wait_reads_few_pods_at_a_time(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first page has only pods of an earlier job of the same name."""
    owner = {"kind": "TrainingJob", "name": "j", "uid": "old"}
    former = [{"metadata": {"name": f"old-{n}", "ownerReferences": [owner]}} for n in range(20)]
    own = [{"metadata": {"name": f"j-{n}"}} for n in range(20)]
    queries: list[dict[str, list[str]]] = []

    def answer(method: str, path: str) -> Answer:
        if "/pods" not in path:
            return GONE if queries else respond(JOB)
        queries.append(parse_qs(urlsplit(path).query))
        if "continue" in queries[-1]:
            return respond({"metadata": {"continue": "second"}, "items": own})
        return respond({"metadata": {"continue": "first"}, "items": former})

    assert run_app(["delete", "j", "--timeout", "0", "--kubeconfig", str(start_server(answer))]) == 1
    output = capsys.readouterr().err
    assert "these still exist: the job j, pod j-0, " in output
    assert "pod j-9, perhaps more pods" in output
    assert "old-" not in output
    assert [query.get("continue") for query in queries] == [None, ["first"]]
    assert all(query["limit"] == ["20"] for query in queries)


def test_a_job_that_does_not_exist_is_reported_also_without_the_right_to_list_jobs(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = build_status(403, "trainingjobs is forbidden: no", group="topkube.dev", kind="trainingjobs")
    config = start_server(lambda method, path: refused if path.endswith("/trainingjobs") else GONE)
    assert run_app(["delete", "j", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: there is no TrainingJob j in namespace default\n")
    assert "there are no jobs" not in output
