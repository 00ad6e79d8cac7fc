"""The cluster commands with an API server that refuses, without an API server, and with an unusable kubeconfig.

The server is local, and each test chooses its answers; tests/cluster uses a real API server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_answers import Answer, Answers, build_status, write_kubeconfig

from topkube.cli.cluster.api import ClusterLocation, connect
from topkube.cli.entry import run_app
from topkube.errors import ClusterError

REFUSALS: list[tuple[Answer, list[str]]] = [
    (
        (404, b"404 page not found\n", {}),
        ["this cluster does not know TrainingJobs", "TopKube is not installed in it", "kubectl apply -f manifests/"],
    ),
    (
        build_status(403, "trainingjobs is forbidden: no", group="topkube.dev", kind="trainingjobs"),
        ["trainingjobs is forbidden: no", "ClusterRole topkube-edit", "auth can-i get trainingjobs.topkube.dev -n n"],
    ),
    (build_status(401, "Unauthorized"), ["the cluster does not know who you are", "kubectl config get-contexts"]),
    (build_status(500, "etcdserver: request timed out"), ["etcdserver: request timed out"]),
    ((200, b"<html>", {}), ["sends a response that is not JSON", "kubectl config view --minify"]),
]


@pytest.mark.parametrize(("answer", "words"), REFUSALS)
def test_refusals_contain_the_next_step(
    start_server: Callable[[Answers], Path], answer: Answer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_server(lambda method, path: answer)
    assert run_app(["status", "-n", "n", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    for word in words:
        assert word in output


def test_a_cluster_that_does_not_answer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    assert run_app(["status", "--kubeconfig", str(config)]) == 1
    output = capsys.readouterr().err
    assert "the cluster at http://127.0.0.1:1 does not answer" in output
    assert "Connection refused" in output
    assert "kubectl cluster-info" in output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no cluster is configured"),
        ("", "cannot be used"),
        ("clusters: 5", "kubeconfig"),
        ("\t- [", "kubeconfig"),
        ("apiVersion: v1\nkind: Config\ncurrent-context: gone\ncontexts: []\nclusters: []\nusers: []\n", "kubeconfig"),
    ],
)
def test_an_unusable_kubeconfig_is_reported(
    content: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    if content is None:
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        assert run_app(["status"]) == 1
    else:
        path.write_text(content)
        assert run_app(["status", "--kubeconfig", str(path)]) == 1
    output = capsys.readouterr().err
    assert words in output
    assert "next: " in output
    assert "Traceback" not in output


def test_the_namespace_is_the_contexts_unless_given(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1", namespace="team")
    assert connect(ClusterLocation(kubeconfig=config)).namespace == "team"
    assert connect(ClusterLocation(kubeconfig=config, namespace="other")).namespace == "other"
    with pytest.raises(ClusterError, match="known: here"):
        connect(ClusterLocation(kubeconfig=config, context="there"))


def test_warnings_of_the_server_are_shown(start_server: Callable[[Answers], Path], tmp_path: Path, capsys: Any) -> None:
    file = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"
    stored = {"metadata": {"name": "char-gpt", "resourceVersion": "1"}, "spec": {}}

    def answer(method: str, path: str) -> Answer:
        if method == "GET":
            return build_status(404, "not found", name="char-gpt", kind="trainingjobs")
        return 201, json.dumps(stored).encode(), {"Warning": '299 - "a \\"tag\\" is missing"'}

    assert run_app(["submit", str(file), "--kubeconfig", str(start_server(answer))]) == 0
    output = capsys.readouterr()
    assert output.out == "trainingjob.topkube.dev/char-gpt created\n"
    assert output.err == 'warning: a "tag" is missing\n'


def test_logs_of_a_launcher_in_the_pod_of_worker_0_have_its_own_name(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"topkube.dev/job-name": "j", "topkube.dev/worker-index": "0", "topkube.dev/attempt": "1"}
    names = ("main", "side", "launcher")
    states = [{"name": name, "state": {"terminated": {"exitCode": 0}}} for name in names]
    pod = {
        "metadata": {"name": "p", "uid": "1", "labels": labels},
        "spec": {"containers": [{"name": name} for name in names]},
        "status": {"containerStatuses": states},
    }
    owner = {"kind": "TrainingJob", "name": "j", "uid": "old"}  # a job of the same name, deleted before
    former = {**pod, "metadata": {"name": "q", "uid": "2", "labels": labels, "ownerReferences": [owner]}}

    def answer(method: str, path: str) -> Answer:
        if "/log?" in path:
            name = path.partition("container=")[2].partition("&")[0]
            return 200, f"2025-01-01T00:00:01Z by {name}\n".encode(), {}
        if "/pods?" in path:
            return 200, json.dumps({"items": [former, pod]}).encode(), {}
        return 200, json.dumps({"metadata": {"name": "j", "uid": "new"}, "status": {"phase": "Succeeded"}}).encode(), {}

    config = str(start_server(answer))
    assert run_app(["logs", "j", "--kubeconfig", config]) == 0
    assert capsys.readouterr().out == "[worker0] by main\n[launcher] by launcher\n"
    assert run_app(["logs", "j", "--worker", "0", "--kubeconfig", config]) == 0
    assert capsys.readouterr().out == "[worker0] by main\n"


def test_a_log_stream_that_breaks_continues_where_it_was(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second stream begins with the second of the last line: what was shown is not shown again, nothing is lost."""
    first = b"2025-01-01T00:00:01.1Z [rank 0] a\n2025-01-01T00:00:02.2Z [rank 0] b\n2025-01-01T00:00:02.2Z [rank 0] c\n"
    rest = first.split(b"\n", 1)[1] + b"2025-01-01T00:00:02.2Z [rank 0] d\n2025-01-01T00:00:02.25Z [rank 0] e\n"
    requests: list[str] = []
    labels = {"topkube.dev/job-name": "j", "topkube.dev/worker-index": "0", "topkube.dev/attempt": "1"}
    pod: dict[str, Any] = {
        "metadata": {"name": "p", "uid": "1", "labels": labels},
        "spec": {"containers": [{"name": "main"}]},
    }

    def answer(method: str, path: str) -> Answer:
        is_last = len(requests) > 1
        state = {"terminated": {"exitCode": 0}} if is_last else {"running": {}}
        seen = {**pod, "status": {"containerStatuses": [{"name": "main", "state": state}]}}
        job = {"metadata": {"name": "j", "uid": "u"}, "status": {"phase": "Succeeded" if is_last else "Running"}}
        if "/log?" in path:
            requests.append(path)
            return 200, rest if len(requests) > 1 else first, {}
        if "/pods/p" in path:
            return 200, json.dumps(seen).encode(), {}
        if "/pods?" in path:
            return 200, json.dumps({"items": [seen]}).encode(), {}
        if "watch=true" in path:
            return 200, json.dumps({"type": "MODIFIED", "object": job}).encode() + b"\n", {}
        return 200, json.dumps(job).encode(), {}

    assert run_app(["logs", "j", "--kubeconfig", str(start_server(answer))]) == 0
    assert capsys.readouterr().out.split() == [word for letter in "abcde" for word in ("[worker0.rank0]", letter)]
    assert "sinceTime=2025-01-01T00%3A00%3A02.2Z" in requests[1]


def test_a_line_of_many_megabytes_is_read_in_linear_time(start_server: Callable[[Answers], Path]) -> None:
    seconds = []
    for mebibytes in (4, 32):
        text = b"a\n" + b"x" * (mebibytes << 20) + b"\nb\n\nend"
        answer: Answer = (200, text, {})
        api = connect(ClusterLocation(start_server(lambda method, path, answer=answer: answer)))
        before = time.process_time()
        assert list(api.read_lines("/log", {})) == text.split(b"\n")
        seconds.append(time.process_time() - before)
    assert seconds[1] < 20 * seconds[0] + 1, "8 times the bytes would take 64 times as long"


PASSING_FAILURES: dict[str, Answer] = {
    "the server starts, and has no paths yet": build_status(
        503, "the request has been made before all known HTTP paths have been installed"
    ),
    "the server starts, and does not know TrainingJobs yet": (404, b"404 page not found\n", {}),
    "etcd has lost its leader": build_status(500, "etcdserver: leader changed"),
    "the server has too much to do": build_status(429, "Too many requests, please try again later."),
    "the server is killed while it answers": (200, b"{", {"Content-Length": "100", "Connection": "close"}),
}


@pytest.mark.parametrize("answer", PASSING_FAILURES.values(), ids=PASSING_FAILURES)
@pytest.mark.parametrize("command", ["submit --wait", "logs", "status --watch"])
def test_commands_that_wait_for_a_job_survive_a_restart_of_the_api_server(
    start_server: Callable[[Answers], Path], command: str, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"
    requests = {"watch": 0, "bad": 0}

    def respond(method: str, path: str) -> Answer:
        is_last = requests["bad"] > 1
        job = {"metadata": {"name": "char-gpt", "uid": "u"}, "status": {"phase": "Succeeded" if is_last else "Running"}}
        if "watch=true" in path:
            requests["watch"] += "/pods" not in path
            return 200, b"", {}
        if "/pods" in path or "/events" in path:
            return 200, json.dumps({"items": []}).encode(), {}
        if method == "GET" and requests["watch"] and not is_last:
            requests["bad"] += 1
            return answer
        return 200, json.dumps(job).encode(), {}

    words = [*command.split(), str(file) if command.startswith("submit") else "char-gpt"]
    code = run_app([*words, "--kubeconfig", str(start_server(respond))])
    output = capsys.readouterr()
    assert (code, requests["bad"]) == (0, 2), output.err
    assert "deleted" not in output.err
    assert "Traceback" not in output.err


def test_a_job_that_is_deleted_meanwhile_is_reported_as_deleted(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def answer(method: str, path: str) -> Answer:
        if "watch=true" in path:
            return 200, b"", {}
        if "/pods" in path:
            return 200, json.dumps({"items": []}).encode(), {}
        seen.append(path)
        if len(seen) > 2:
            return build_status(404, 'trainingjobs.topkube.dev "j" not found', name="j", kind="trainingjobs")
        return 200, json.dumps({"metadata": {"name": "j", "uid": "u"}, "status": {"phase": "Running"}}).encode(), {}

    assert run_app(["logs", "j", "--kubeconfig", str(start_server(answer))]) == 1
    assert "the job j was deleted" in capsys.readouterr().err


def test_submit_follows_no_longer_than_the_timeout(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"

    def answer(method: str, path: str) -> Answer:
        if "watch=true" in path:
            return 200, b"", {}
        if "/pods" in path:
            return 200, json.dumps({"items": []}).encode(), {}
        job = {"metadata": {"name": "char-gpt", "uid": "u"}, "status": {"phase": "Running"}}
        return 200, json.dumps(job).encode(), {}

    words = ["submit", "--follow", "--timeout", "1", str(file), "--kubeconfig", str(start_server(answer))]
    assert run_app(words) == 124
    assert "char-gpt is still Running after 1 s and continues" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "logs", "delete"])
def test_an_empty_name_is_refused(
    start_server: Callable[[Answers], Path], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell variable that is not set becomes an empty name; the path would name all jobs."""
    requests: list[str] = []

    def answer(method: str, path: str) -> Answer:
        requests.append(method)
        return 200, json.dumps({"items": []}).encode(), {}

    assert run_app([command, "", "--kubeconfig", str(start_server(answer))]) == 1
    assert "the job's name is empty" in capsys.readouterr().err
    assert requests == []


def test_a_job_of_more_workers_than_streams_is_followed_in_part(
    start_server: Callable[[Answers], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("topkube.cli.cluster.log_streams.MOST_STREAMS", 2)
    requests: set[str] = set()
    waiting = threading.Event()

    def answer(method: str, path: str) -> Answer:
        is_last = len(requests) >= 2
        pods = [
            {
                "metadata": {
                    "name": f"p{index}",
                    "uid": str(index),
                    "labels": {"topkube.dev/job-name": "j", "topkube.dev/worker-index": str(index)},
                },
                "spec": {"containers": [{"name": "main"}]},
                "status": {"containerStatuses": [{"name": "main", "state": {"running": {}}}]},
            }
            for index in range(4)
        ]
        if "/log?" in path:
            requests.add(path.partition("?")[0])
            waiting.wait(3)
            return 200, b"2025-01-01T00:00:01Z said\n", {}
        if "/pods/" in path:
            return build_status(404, "gone", name="p", kind="pods")
        if "/pods?" in path:
            return 200, json.dumps({"items": pods}).encode(), {}
        job = {"metadata": {"name": "j", "uid": "u"}, "status": {"phase": "Succeeded" if is_last else "Running"}}
        if "watch=true" in path:
            return 200, json.dumps({"type": "MODIFIED", "object": job}).encode() + b"\n", {}
        return 200, json.dumps(job).encode(), {}

    assert run_app(["logs", "j", "--kubeconfig", str(start_server(answer))]) == 0
    output = capsys.readouterr()
    assert "the first 2 containers are followed; choose others: --worker INDEX" in output.err
    assert output.out.count("said") >= 2


def build_job(phase: str, **spec: Any) -> dict[str, Any]:
    progress = {"step": 700, "checkpointStep": 500, "checkpointAt": "2026-01-01T00:00:00Z"}
    stored = {"workers": 2, "checkpoint": {"claimName": "c"}, **spec}
    return {"metadata": {"name": "j", "uid": "u"}, "spec": stored, "status": {"phase": phase, "progress": progress}}


def test_suspend_waits_for_the_pods_and_names_the_last_checkpoint(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def answer(method: str, path: str) -> Answer:
        calls.append(method)
        if "/pods" in path:
            remaining_pods = [{"metadata": {"name": "p"}}] if calls.count("GET") < 6 else []
            return 200, json.dumps({"items": remaining_pods}).encode(), {}
        return 200, json.dumps(build_job("Suspended" if "PATCH" in calls else "Running")).encode(), {}

    config = start_server(answer)
    assert run_app(["suspend", "j", "--kubeconfig", str(config)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("trainingjob.topkube.dev/j suspended; its newest checkpoint is of step 500, ")
    assert calls.count("PATCH") == 1
    assert calls.count("GET") >= 6, "the pods still saved their state"


@pytest.mark.parametrize("answer", PASSING_FAILURES.values(), ids=PASSING_FAILURES)
def test_suspend_outlives_a_restart_of_the_api_server(
    start_server: Callable[[Answers], Path], answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def respond(method: str, path: str) -> Answer:
        calls.append(method)
        if "PATCH" in calls and calls[calls.index("PATCH") :].count("GET") == 1:
            return answer
        if "/pods" in path:
            return 200, json.dumps({"items": []}).encode(), {}
        return 200, json.dumps(build_job("Suspended" if "PATCH" in calls else "Running")).encode(), {}

    assert run_app(["suspend", "j", "--kubeconfig", str(start_server(respond))]) == 0, capsys.readouterr().err
    assert "trainingjob.topkube.dev/j suspended; its newest checkpoint" in capsys.readouterr().out


def test_all_jobs_are_suspended_before_the_command_waits_for_one(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The pods of the first job do not end, for example on a lost node. The others must not train on."""
    patched: list[str] = []

    def answer(method: str, path: str) -> Answer:
        name = path.split("?")[0].rsplit("/", 1)[-1]
        if "/pods" in path:
            return 200, json.dumps({"items": [{"metadata": {"name": "p"}}]}).encode(), {}
        if method == "PATCH":
            patched.append(name)
        job = build_job("Suspended" if name in patched else "Running")
        return 200, json.dumps({**job, "metadata": {"name": name, "uid": name}}).encode(), {}

    config = str(start_server(answer))
    assert run_app(["suspend", "a", "b", "c", "--timeout", "0.1", "--kubeconfig", config]) == 1
    assert "a is Suspended and still has pods" in capsys.readouterr().err
    assert patched == ["a", "b", "c"]


def test_resume_names_the_step_and_changes_nothing_twice(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job, calls = build_job("Suspended", runPolicy={"suspend": True}), list[str]()

    def answer(method: str, path: str) -> Answer:
        calls.append(method)
        return 200, json.dumps(job).encode(), {}

    config = str(start_server(answer))
    assert run_app(["resume", "j", "--kubeconfig", config]) == 0
    assert "resumed; it continues from the checkpoint of step 500" in capsys.readouterr().out
    job["spec"] = {"workers": 2, "runPolicy": {"suspend": False}}
    assert run_app(["resume", "j", "--kubeconfig", config]) == 0
    assert "is not suspended; it saves no checkpoints" in capsys.readouterr().out
    assert calls.count("PATCH") == 1


def test_a_finished_job_is_not_suspended(
    start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_server(lambda method, path: (200, json.dumps(build_job("Succeeded")).encode(), {}))
    assert run_app(["suspend", "j", "--kubeconfig", str(config)]) == 1
    assert "the job j is Succeeded: a finished job cannot be suspended" in capsys.readouterr().err
