"""submit, status, logs and delete against a real API server and real pods."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_operator import build_minimal_job, create_job, run_pod, set_status
from target import PATIENCE, wait_for

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import build_job_path, list_pods
from topkube.cli.entry import run_app
from topkube.errors import ClusterError


@dataclass
class CommandResult:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


Topkube = Callable[..., CommandResult]


@pytest.fixture
def topkube(api: Api, kubeconfig: Path) -> Topkube:
    """The command line in the test's namespace. It runs in this process, because the start of a process takes most of a
    second."""

    def run(*arguments: str, config: Path = kubeconfig) -> CommandResult:
        location = ["--namespace", api.namespace, "--kubeconfig", str(config)]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run_app([*arguments, *location])
        return CommandResult(code, out.getvalue(), err.getvalue())

    return run


def write_job_file(path: Path, job: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(job))
    return str(path)


def list_jobs(api: Api) -> list[str]:
    return [job["metadata"]["name"] for job in api.get(build_job_path(api)).get("items", [])]


def test_submit_prints_its_result_and_refusals(api: Api, topkube: Topkube, tmp_path: Path) -> None:
    job = build_minimal_job("first")
    file = write_job_file(tmp_path / "job.yaml", job)
    dry = topkube("submit", file, "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "trainingjob.topkube.dev/first created (dry run on the server)\n")
    assert list_jobs(api) == []
    assert topkube("submit", file).stdout == "trainingjob.topkube.dev/first created\n"
    assert topkube("submit", file).stdout == "trainingjob.topkube.dev/first unchanged\n"
    job["spec"]["runPolicy"]["backoffLimit"] = 7
    applied = topkube("submit", write_job_file(tmp_path / "job.yaml", job), "-o", "json")
    assert json.loads(applied.stdout)["spec"]["runPolicy"]["backoffLimit"] == 7

    # Another tool changes a field. `submit` does not overwrite it, unless it is asked to.
    patch = {"spec": {"runPolicy": {"backoffLimit": 1}}}
    api.request(
        "PATCH", build_job_path(api, "first"), {"fieldManager": "kubectl-edit"}, patch, "application/merge-patch+json"
    )
    refused = topkube("submit", file := write_job_file(tmp_path / "job.yaml", job))
    assert refused.returncode == 1
    assert 'conflict with "kubectl-edit"' in refused.stderr
    assert "--force-conflicts" in refused.stderr
    assert topkube("submit", file, "--force-conflicts").stdout == "trainingjob.topkube.dev/first configured\n"


def test_submit_reports_mistakes_in_a_file_as_run_does(api: Api, topkube: Topkube, tmp_path: Path) -> None:
    file = write_job_file(tmp_path / "job.yaml", build_minimal_job("bad", workers=0, aggregation={"wire": "bf8"}))
    ended = topkube("submit", file)
    assert ended.returncode == 2
    assert "has 2 mistakes" in ended.stderr
    line = Path(file).read_text().splitlines().index("  workers: 0") + 1
    assert f"spec.workers (line {line}): 0 is not a whole number of at least 1" in ended.stderr
    assert "did you mean bf16?" in ended.stderr
    assert list_jobs(api) == []


def test_names_that_do_not_exist_are_reported(api: Api, topkube: Topkube, tmp_path: Path) -> None:
    create_job(api, build_minimal_job("char-gpt"))
    for command in ("status", "logs", "delete"):
        ended = topkube(command, "chargpt")
        assert ended.returncode == 1
        assert f"there is no TrainingJob chargpt in namespace {api.namespace}; jobs are char-gpt" in ended.stderr
    ended = topkube("delete", "char-gpt", "char-gtp")
    assert ended.returncode == 1
    assert list_jobs(api) == ["char-gpt"], "a typing mistake in one name deletes none"
    other = build_minimal_job("a")
    other["metadata"]["namespace"] = "elsewhere"
    ended = topkube("submit", write_job_file(tmp_path / "job.yaml", other))
    assert ended.returncode == 2
    assert f"is for namespace elsewhere, but --namespace is {api.namespace}" in ended.stderr


def test_status_shows_progress_pods_conditions_and_the_first_failure(api: Api, topkube: Topkube) -> None:
    job = create_job(api, build_minimal_job("seen"))
    assert "Pending" in topkube("status").stdout
    progress = {
        "step": 30,
        "totalSteps": 120,
        "percent": 25,
        "etaSeconds": 41,
        "loss": "1.5",
        "samplesPerSecond": 5120.0,
    }
    condition = {
        "type": "Running",
        "status": "True",
        "reason": "RanksStarted",
        "message": "all ranks run",
        "lastTransitionTime": "2025-01-01T00:00:00Z",
    }
    set_status(
        api,
        "seen",
        phase="Running",
        workersReady="2/2",
        attempt=2,
        restarts=1,
        observedGeneration=1,
        progress=progress,
        conditions=[condition],
        cache={"hitRatio": "0.97", "nodes": [{"name": "node1", "cachedBytes": 12_000_000}]},
        firstFailure={"pod": "seen-worker-1-1", "rank": 1, "reason": "OOMKilled", "exitCode": 137, "logTail": "a\nb"},
    )
    run_pod(api, job, 0, 2, "sleep 60")
    shown = topkube("status", "seen").stdout
    for text in (
        f"seen  Running  in namespace {api.namespace}",
        "2/2 ready, 1 rank each, MPICH",
        "step 30/120  25%  loss 1.5  5,120 samples/s  41 s left",
        "attempt 2, 1 of 3 restarts used",
        "RanksStarted  all ranks run",
        "seen-worker-0-2  worker 0  attempt 2",
        "pod seen-worker-1-1, rank 1: OOMKilled, exit code 137",
        "    | a\n    | b",
        "hit ratio 0.97",
        "node1  12 MB",
    ):
        assert text in shown, shown
    table = topkube("status").stdout.splitlines()
    assert table[0].split() == ["NAME", "PHASE", "WORKERS", "STEP", "PROGRESS", "RATE", "LEFT", "RESTARTS", "AGE"]
    assert table[1].split()[:9] == ["seen", "Running", "2/2", "30/120", "25%", "5,120", "41", "s", "1"]
    data = json.loads(topkube("status", "seen", "-o", "json").stdout)
    assert data["job"]["status"]["progress"] == progress
    assert [pod["metadata"]["name"] for pod in data["pods"]] == ["seen-worker-0-2"]


def test_logs_follow_all_workers_across_a_restart_to_the_end(api: Api, kubectl: Path, kubeconfig: Path) -> None:
    job = create_job(api, build_minimal_job("talk"))
    set_status(api, "talk", phase="Starting", attempt=1)
    following = subprocess.Popen(
        [sys.executable, "-m", "topkube.cli", "logs", "talk", "-n", api.namespace, "--kubeconfig", str(kubeconfig)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert following.stdout is not None
        # Worker 0 survives the restart; worker 1 dies and is created again.
        stay = "echo '[rank 0] step 1'; while [ ! -e /tmp/go ]; do sleep 0.2; done; echo '[rank 0] step 2'"
        zero = run_pod(api, job, 0, 1, stay)
        run_pod(api, job, 1, 1, "echo '[rank 1] step 1'; exit 3")
        set_status(api, "talk", phase="Running")
        first = {following.stdout.readline() for _ in range(2)}
        assert first == {"[worker0.rank0] step 1\n", "[worker1.rank1] step 1\n"}
        set_status(api, "talk", phase="Restarting", attempt=2, firstFailure={"message": "rank 1 ended with 3"})
        go = ["exec", zero, "-c", "main", "--", "touch", "/tmp/go"]
        subprocess.run([kubectl, f"--kubeconfig={kubeconfig}", "-n", api.namespace, *go], check=True)
        run_pod(api, job, 1, 2, "echo '[rank 1] step 2'; echo done")
        second = {following.stdout.readline() for _ in range(3)}
        assert second == {"[worker0.rank0] step 2\n", "[worker1.rank1] step 2\n", "[worker1] done\n"}
        failure = {"pod": zero, "exitCode": 9, "message": "rank 0 ended with 9"}
        set_status(api, "talk", phase="Failed", firstFailure=failure)
        out, err = following.communicate(timeout=60 * PATIENCE)
    finally:
        following.kill()
        following.communicate()
    assert out == ""
    assert following.returncode == 9
    assert "attempt 2 begins; the last one ended: rank 1 ended with 3" in err
    assert "talk failed: rank 0 ended with 9" in err


def test_logs_can_be_read_without_following_and_of_one_worker(api: Api, topkube: Topkube) -> None:
    job = create_job(api, build_minimal_job("ended"))
    for index in (0, 1):
        run_pod(api, job, index, 1, f'for n in 1 2 3; do echo "[rank {index}] step $n"; done')
    set_status(api, "ended", phase="Succeeded")
    deadline = time.monotonic() + 60 * PATIENCE
    while len(topkube("logs", "ended").stdout.splitlines()) < 6:
        assert time.monotonic() < deadline
    ended = topkube("logs", "ended", "--worker", "1", "--tail", "1", "-o", "json")
    assert ended.returncode == 0
    [line] = [json.loads(line) for line in ended.stdout.splitlines()]
    assert line.pop("time")
    assert line == {"pod": "ended-worker-1-1", "worker": 1, "rank": 1, "text": "step 3"}
    stamped = topkube("logs", "ended", "--no-follow", "--worker", "0", "--timestamps").stdout.splitlines()
    assert [line.split(" ", 2)[2] for line in stamped] == ["step 1", "step 2", "step 3"]


def test_logs_of_a_job_without_pods_come_from_its_status(api: Api, topkube: Topkube) -> None:
    create_job(api, build_minimal_job("gone"))
    kept = {"pod": "gone-worker-0-1", "exitCode": 1, "logTail": "Traceback\nValueError: boom"}
    set_status(api, "gone", phase="Failed", firstFailure=kept)
    ended = topkube("logs", "gone")
    assert (ended.returncode, ended.stdout) == (1, "Traceback\nValueError: boom\n")
    assert "the last lines of gone-worker-0-1" in ended.stderr


def test_submit_waits_for_the_end(api: Api, topkube: Topkube, tmp_path: Path) -> None:
    file = write_job_file(tmp_path / "job.yaml", build_minimal_job("waited"))
    late = topkube("submit", file, "--wait", "--timeout", "2")
    assert late.returncode == 124
    assert "waited is still Pending after 2 s and continues" in late.stderr
    set_status(api, "waited", phase="Failed", firstFailure={"exitCode": 7, "message": "rank 1 ended with 7"})
    ended = topkube("submit", file, "--wait")
    assert ended.returncode == 7
    assert ended.stderr == "waited: Failed\nwaited: rank 1 ended with 7\n"


def test_status_watches_to_the_end(api: Api, topkube: Topkube, kubeconfig: Path) -> None:
    create_job(api, build_minimal_job("watched"))
    command = [sys.executable, "-m", "topkube.cli", "status", "watched", "--watch", "-n", api.namespace]
    watching = subprocess.Popen([*command, "--kubeconfig", str(kubeconfig)], stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "watched  Pending\n"
        set_status(api, "watched", phase="Running", progress={"step": 3, "totalSteps": 9})
        assert watching.stdout.readline() == "watched  Running  step 3/9\n"
        set_status(api, "watched", phase="Succeeded")
        assert watching.communicate(timeout=30 * PATIENCE)[0] == "watched  Succeeded  step 3/9\n"
    finally:
        watching.kill()
        watching.communicate()
    assert watching.returncode == 0


def test_delete_waits_until_the_pods_are_gone(api: Api, topkube: Topkube) -> None:
    job = create_job(api, build_minimal_job("doomed"))
    run_pod(api, job, 0, 1, "sleep 600")
    ended = topkube("delete", "doomed")
    assert (ended.returncode, ended.stdout) == (0, "trainingjob.topkube.dev/doomed deleted\n")
    assert list_jobs(api) == []
    assert list_pods(api, "doomed") == []


def write_account_config(api: Api, kubeconfig: Path, target: Path, role: str | None) -> Path:
    """Write the kubeconfig of a service account to `target`. The account has the ClusterRole `role` in the test's
    namespace; None: no role."""
    name = target.stem
    api.request("POST", build_path(api.namespace, "serviceaccounts"), body={"metadata": {"name": name}})
    if role:
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": api.namespace}],
        }
        api.request(
            "POST", build_path(api.namespace, "rolebindings", group="rbac.authorization.k8s.io/v1"), body=binding
        )
    token_request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 600},
    }
    path = build_path(api.namespace, "serviceaccounts", name) + "/token"
    token = api.request("POST", path, body=token_request).data["status"]["token"]
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"] = [{"name": "user", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "user"
    target.write_text(yaml.safe_dump(config))
    return target


def test_an_error_names_the_right_that_the_user_lacks(
    api: Api, topkube: Topkube, kubeconfig: Path, tmp_path: Path
) -> None:
    create_job(api, build_minimal_job("mine"))
    nobody = write_account_config(api, kubeconfig, tmp_path / "nobody.yaml", None)
    ended = topkube("status", "mine", config=nobody)
    assert ended.returncode == 1
    assert "cannot get resource" in ended.stderr
    assert f"kubectl auth can-i get trainingjobs.topkube.dev -n {api.namespace}" in ended.stderr
    stranger = yaml.safe_load(nobody.read_text())
    stranger["users"][0]["user"]["token"] = base64.b64encode(b"nonsense").decode()
    (tmp_path / "stranger.yaml").write_text(yaml.safe_dump(stranger))
    ended = topkube("status", config=tmp_path / "stranger.yaml")
    assert ended.returncode == 1
    assert "the cluster does not know who you are" in ended.stderr


def test_the_roles_for_users_allow_what_they_need_and_no_more(
    api: Api, topkube: Topkube, kubeconfig: Path, tmp_path: Path, roles: None
) -> None:
    file = write_job_file(tmp_path / "job.yaml", build_minimal_job("shared"))
    editor = write_account_config(api, kubeconfig, tmp_path / "editor.yaml", "topkube-edit")
    viewer = write_account_config(api, kubeconfig, tmp_path / "viewer.yaml", "topkube-view")
    assert topkube("submit", file, config=editor).returncode == 0
    assert topkube("status", "shared", config=viewer).returncode == 0
    assert topkube("logs", "shared", "--no-follow", config=viewer).returncode == 0
    assert topkube("delete", "shared", config=viewer).returncode == 1
    assert topkube("delete", "shared", config=editor).returncode == 0


def test_kubectl_finds_the_plugin(api: Api, kubectl: Path, kubeconfig: Path) -> None:
    create_job(api, build_minimal_job("plugged"))
    programs = Path(sys.executable).parent
    shown = subprocess.run(
        [str(kubectl), "topkube", "status", "-n", api.namespace],
        env={"PATH": f"{programs}:/usr/bin:/bin", "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert "plugged  Pending" in shown.stdout, shown.stderr


def test_a_deletion_by_uid_spares_a_newer_job_of_the_same_name(api: Api) -> None:
    """The UID protects an object that was created in the meantime from the deletion."""
    before = create_job(api, build_minimal_job("twice"))
    api.request("DELETE", build_job_path(api, "twice"))
    create_job(api, build_minimal_job("twice"))
    body = {"preconditions": {"uid": before["metadata"]["uid"]}}
    with pytest.raises(ClusterError) as refused:
        api.request("DELETE", build_job_path(api, "twice"), body=body)
    assert refused.value.status == 409
    assert list_jobs(api) == ["twice"]


def test_doctor_tries_the_policies_of_the_network_and_leaves_nothing(api: Api, topkube: Topkube) -> None:
    ended = topkube("doctor", "--network-policy", "--output", "json")
    check = json.loads(ended.stdout)["checks"][-1]
    assert check["name"] == "network policy"
    enforces = {"ok": "the cluster enforces NetworkPolicies", "warn": "the cluster does not enforce NetworkPolicies"}
    assert check["message"].startswith(enforces[check["state"]]), check

    def is_gone() -> bool:
        policies = api.get(build_path(api.namespace, "networkpolicies", group="networking.k8s.io/v1"))
        pods = api.get(build_path(api.namespace, "pods"))
        return not any("topkube-doctor" in item["metadata"]["name"] for item in policies["items"] + pods["items"])

    wait_for(is_gone, "the probe is gone")
