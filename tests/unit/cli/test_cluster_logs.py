"""The logs of a job whose API server refuses, breaks or does not stream, against simulated answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_answers import Answer, Answers, build_status

from topkube.cli.cluster.api import ClusterLocation, connect
from topkube.cli.cluster.log_options import LogOptions
from topkube.cli.cluster.log_streams import LogStreams
from topkube.cli.entry import run_app
from topkube.errors import ClusterError
from topkube.sdk import TrainingClient

RIGHT = 'cannot get resource "pods/log" in API group "" in the namespace "default"'
REFUSED = build_status(403, f'pods "j-0" is forbidden: User "bob" {RIGHT}', name="j-0", kind="pods")
LINE = b"2025-01-01T00:00:01Z [rank 0] said\n"


def build_pod(index: int, **state: Any) -> dict[str, Any]:
    labels = {"topkube.dev/job-name": "j", "topkube.dev/worker-index": str(index), "topkube.dev/attempt": "1"}
    return {
        "metadata": {"name": f"j-{index}", "uid": f"p{index}", "labels": labels},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"containerStatuses": [{"name": "main", "state": state or {"running": {}}}]},
    }


def respond(data: Any) -> Answer:
    return 200, json.dumps(data).encode(), {}


def answer_for(
    log: Callable[[str], Answer], pods: list[dict[str, Any]], is_ended: Callable[[], bool] = lambda: False
) -> Answers:
    """Return the answers of a server whose job has these pods and ends when `is_ended`."""

    def answer(method: str, path: str) -> Answer:
        job = {
            "metadata": {"name": "j", "namespace": "default", "uid": "u"},
            "status": {"phase": "Succeeded" if is_ended() else "Running"},
        }
        address = path.partition("?")[0]
        if address.endswith("/log"):
            return log(address.split("/")[-2])
        if address.endswith("/pods"):
            return respond({"items": pods})
        if "/pods/" in address:
            return respond(next(pod for pod in pods if pod["metadata"]["name"] == address.split("/")[-1]))
        return (200, b"", {}) if "watch=true" in path else respond(job)

    return answer


@pytest.mark.parametrize("options", [["--no-follow"], ["--follow"]])
def test_a_refused_log_is_an_error_that_names_the_missing_right(
    start_server: Callable[[Answers], Path], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_server(answer_for(lambda pod: REFUSED, [build_pod(0), build_pod(1)]))
    assert run_app(["logs", "j", *options, "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr().err
    assert 'User "bob" cannot get resource "pods/log"' in output
    assert "kubectl auth can-i get pods/log -n default" in output
    assert "printed nothing" not in output


@pytest.mark.parametrize("follow", [False, True])
def test_the_client_raises_the_refusal_of_a_log(start_server: Callable[[Answers], Path], follow: bool) -> None:
    config = start_server(answer_for(lambda pod: REFUSED, [build_pod(0)]))
    with pytest.raises(ClusterError, match="pods/log") as raised:
        list(TrainingClient(kubeconfig=config).logs("j", follow))
    assert raised.value.status == 403


@pytest.mark.parametrize(
    "answer",
    [
        build_status(400, 'container "main" in pod "j-0" is waiting to start: ContainerCreating'),
        build_status(404, 'pods "j-0" not found', name="j-0", kind="pods"),
    ],
)
def test_a_pod_that_has_not_started_or_is_gone_has_no_lines(
    start_server: Callable[[Answers], Path], answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_server(answer_for(lambda pod: answer, [build_pod(0)]))
    assert run_app(["logs", "j", "--no-follow", "--kubeconfig", str(config)]) == 0
    assert "its pods have printed nothing" in capsys.readouterr().err


def test_the_logs_of_other_pods_are_shown_if_a_node_does_not_answer(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lost = build_status(500, "dial tcp 10.0.0.1:10250: connect: no route to host")
    config = start_server(
        answer_for(lambda pod: lost if pod == "j-0" else (200, LINE, {}), [build_pod(0), build_pod(1)])
    )
    assert run_app(["logs", "j", "--no-follow", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr()
    assert output.out == "[worker1.rank0] said\n"
    assert "the logs of 1 of 2 containers cannot be read: dial tcp 10.0.0.1:10250" in output.err


def test_a_log_that_breaks_off_is_not_taken_for_the_whole(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = (200, LINE, {"Content-Length": "1000", "Connection": "close"})
    config = start_server(answer_for(lambda pod: broken, [build_pod(0)]))
    assert run_app(["logs", "j", "--no-follow", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr()
    assert output.out == "[worker0.rank0] said\n"
    assert "does not answer" in output.err


@pytest.mark.parametrize(
    "first",
    [build_status(500, "the kubelet is busy"), (200, b"", {"Content-Length": "1000", "Connection": "close"})],
    ids=["refused", "broken"],
)
def test_the_log_of_a_container_that_has_ended_is_asked_for_again(
    start_server: Callable[[Answers], Path], first: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[str] = []

    def log(pod: str) -> Answer:
        requests.append(pod)
        return first if len(requests) == 1 else (200, LINE, {})

    ended = build_pod(0, terminated={"exitCode": 0})
    config = start_server(answer_for(log, [ended], lambda: len(requests) > 1))
    assert run_app(["logs", "j", "--kubeconfig", str(config)]) == 0
    assert capsys.readouterr().out == "[worker0.rank0] said\n"


def test_a_refused_pod_is_not_taken_for_one_that_runs(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """After a stream has ended, its container is read. Without the right to do so, the stream would never end."""
    refused = build_status(403, 'pods "j-0" is forbidden: User "bob" cannot get resource "pods"', kind="pods")
    answers = answer_for(lambda pod: (200, LINE, {}), [build_pod(0)])
    config = start_server(lambda method, path: refused if path.endswith("/pods/j-0") else answers(method, path))
    assert run_app(["logs", "j", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr()
    assert output.out == "[worker0.rank0] said\n"
    assert "kubectl auth can-i get pods -n default" in output.err


def test_pods_are_listed_at_the_start_and_at_the_end_only(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A container that starts meanwhile is seen by the watch; a pod that the watch has missed, at the job's end."""
    lists: list[str] = []
    said, finished = threading.Event(), threading.Event()
    running, late = build_pod(0), build_pod(1, terminated={"exitCode": 0})

    def answer(method: str, path: str) -> Answer:
        address = path.partition("?")[0]
        job = {"metadata": {"name": "j", "uid": "u"}, "status": {"phase": "Succeeded" if said.is_set() else "Running"}}
        if address.endswith("/log"):
            said.set()
            return 200, LINE, {}
        if address.endswith("/pods") and "watch=true" in path:
            if said.is_set() or "resourceVersion=2" in path:
                finished.wait(30)
                return 200, b"", {}
            changed = {**running, "metadata": {**running["metadata"], "resourceVersion": "2"}}
            return respond({"type": "MODIFIED", "object": changed})
        if address.endswith("/pods"):
            lists.append(path)
            pods = [build_pod(0, waiting={})] if len(lists) == 1 else [running, late]
            return respond({"metadata": {"resourceVersion": "1"}, "items": pods})
        if "/pods/" in address:
            return build_status(404, "gone", name="j-0", kind="pods")
        if "watch=true" in path:
            assert said.wait(30)
            return respond({"type": "MODIFIED", "object": {**job, "status": {"phase": "Succeeded"}}})
        return respond(job)

    config = start_server(answer)
    try:
        assert run_app(["logs", "j", "--kubeconfig", str(config)]) == 0
    finally:
        finished.set()
    assert sorted(capsys.readouterr().out.splitlines()) == ["[worker0.rank0] said", "[worker1.rank0] said"]
    assert ["resourceVersion=0" in path for path in lists] == [True, False], "the last list must not be old"


def test_streams_end_when_nobody_reads_them(start_server: Callable[[Answers], Path]) -> None:
    """A client that stops to read must not leave threads that ask for logs until the job ends."""
    location = ClusterLocation(start_server(answer_for(lambda pod: (200, LINE, {}), [build_pod(0), build_pod(1)])))
    streams = LogStreams(connect(location), LogOptions("j", location), "u")
    deadline = time.monotonic() + 30
    while len(streams.seen) < 2:
        assert time.monotonic() < deadline
        assert list(streams.follow_new_containers()) == []
        list(streams.take_lines(0.01))
    assert not streams.has_ended(), "the containers run"
    streams.stop()
    for thread in streams.seen.values():
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("follow", ["--follow", "--no-follow"])
def test_a_worker_that_the_job_does_not_have_is_an_error(
    follow: str, start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its logs would never come, and the command would show nothing until the job ends."""

    def answer(method: str, path: str) -> Answer:
        return respond({"metadata": {"name": "j"}, "spec": {"workers": 2}, "status": {"phase": "Running"}})

    config = str(start_server(answer))
    assert run_app(["logs", "j", "--worker", "2", follow, "--kubeconfig", config]) == 2
    assert "j has no worker 2" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["logs j --tail -3", "logs j --worker -1", "delete j --timeout -5"])
def test_negative_numbers_are_refused_before_the_cluster_is_asked(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app([*words.split(), "--kubeconfig", "absent"]) == 2
    assert words.split()[2] in capsys.readouterr().err
