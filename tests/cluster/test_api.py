"""Jobs on a real API server: defaults, refusals with path and reason, columns, the webhook."""

from __future__ import annotations

import asyncio
import copy
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from simulated_operator import build_minimal_job, create_job, set_status
from target import wait_for

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import build_job_path
from topkube.errors import ClusterError, JobError
from topkube.job import TrainingJob
from topkube_operator.http.webhook import PATH, serve

HOOKS = build_path(None, "validatingwebhookconfigurations", group="admissionregistration.k8s.io/v1")


def test_a_minimal_job_gets_the_defaults_of_the_types(api: Api) -> None:
    job = build_minimal_job("tiny")
    job["spec"] = {"template": job["spec"]["template"], "aggregation": None, "dataset": {"uri": "s3://b"}}
    stored = create_job(api, job)
    expected = TrainingJob.parse(job).spec.model_dump(by_alias=True, exclude_none=True)
    assert stored["spec"] == expected
    assert TrainingJob.from_cluster(stored).spec.model_dump() == TrainingJob.parse(job).spec.model_dump()


def test_a_pod_template_is_kept_as_it_is_written(api: Api) -> None:
    job = build_minimal_job("kept")
    container = job["spec"]["template"]["spec"]["containers"][0]
    container |= {
        "command": ["sh", "-c", ""],
        "args": [""],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "new": [1.5],
    }
    job["spec"]["template"]["metadata"] = {"labels": {"a": "b"}}
    assert create_job(api, job)["spec"]["template"] == job["spec"]["template"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"workers": 0}, "spec.workers"),
        ({"workers": "2"}, "spec.workers"),
        ({"slotsPerWorker": 257}, "spec.slotsPerWorker"),
        ({"aggregation": {"density": 2}}, "spec.aggregation.density"),
        ({"aggregation": {"density": 0}}, "spec.aggregation.density"),
        ({"aggregation": {"algorithm": "ring"}}, "spec.aggregation.algorithm"),
        ({"dataset": {"uri": "nowhere"}}, "spec.dataset.uri"),
        ({"dataset": {}}, "spec.dataset.uri"),
        ({"dataset": {"uri": "s3://b", "cache": {"sizeLimit": "many"}}}, "spec.dataset.cache.sizeLimit"),
        ({"dataset": {"uri": "s3://b", "cache": {"sizeLimit": -1}}}, "spec.dataset.cache.sizeLimit"),
        ({"runPolicy": {"backoffLimit": -1}}, "spec.runPolicy.backoffLimit"),
        ({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers"),
        ({"template": {}}, "spec.template.spec"),
    ],
)
def test_the_schema_alone_refuses_with_path_and_reason(api: Api, change: dict[str, Any], path: str) -> None:
    with pytest.raises(JobError) as refused:
        create_job(api, build_minimal_job("bad", **change))
    assert refused.value.problems[0].split(":")[0] == path


def test_names_have_at_most_63_characters(api: Api) -> None:
    create_job(api, build_minimal_job("a" * 63))
    with pytest.raises(JobError, match=r"metadata\.name"):
        create_job(api, build_minimal_job("a" * 64))


def run_lines(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_kubectl_get_shows_the_columns(api: Api, kubectl: Path, kubeconfig: Path) -> None:
    create_job(api, build_minimal_job("shown"))
    progress = {"step": 5, "totalSteps": 10, "percent": 50, "samplesPerSecond": 12.5}
    set_status(api, "shown", phase="Running", workersReady="2/2", restarts=1, progress=progress)
    for kinds in (["tj"], ["trainingjobs.topkube.dev"], ["all"]):
        command = [str(kubectl), "--kubeconfig", str(kubeconfig), "-n", api.namespace, "get", *kinds]
        shown = wait_for(lambda command=command: run_lines(command), "kubectl to know the kind", 30)
        head, row = shown[:2]
        assert head.split() == ["NAME", "PHASE", "WORKERS", "STEP", "PROGRESS", "RATE", "RESTARTS", "AGE"]
        assert row.split()[0].endswith("shown")
        assert row.split()[1:7] == ["Running", "2/2", "5", "50", "12.5", "1"]


@pytest.fixture
def hooked_api(api: Api) -> Iterator[Api]:
    """The API server with a webhook that this process serves. It is called only for the test's namespace."""
    ready, stop, problems = threading.Event(), threading.Event(), list[BaseException]()
    hook: dict[str, Any] = {
        "name": "trainingjobs.topkube.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "namespaceSelector": {"matchLabels": {"test": api.namespace}},
        "rules": [
            {
                "apiGroups": ["topkube.dev"],
                "apiVersions": ["v1alpha1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": ["trainingjobs"],
            }
        ],
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # to find our address for the API server
        server_address = urlsplit(api.server)
        probe.connect((server_address.hostname, server_address.port or 443))
        host = probe.getsockname()[0]

    async def run() -> None:
        bundle = asyncio.get_running_loop().create_future()

        async def publish(text: str) -> None:
            if not bundle.done():
                bundle.set_result(text)

        async with serve(b"s" * 32, [host], publish, host=host, port=0) as port:
            hook["clientConfig"] = {"url": f"https://{host}:{port}{PATH}", "caBundle": await bundle}
            ready.set()
            await asyncio.to_thread(stop.wait)

    def run_in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            problems.append(error)
            ready.set()

    server = threading.Thread(target=run_in_thread, daemon=True)
    server.start()
    assert ready.wait(60)
    assert not problems, problems
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": api.namespace},
        "webhooks": [hook],
    }
    api.request("POST", HOOKS, body=configuration)
    try:
        _wait_until_called(api)
        yield api
    finally:
        api.request("DELETE", f"{HOOKS}/{api.namespace}")
        stop.set()
        server.join(10)


def _wait_until_called(api: Api) -> None:
    """Wait until the API server uses the new configuration."""
    invalid = build_minimal_job("probe", launcher={"colocate": True, "template": {}})

    def is_refused() -> bool:
        try:
            api.request("POST", build_job_path(api), {"dryRun": "All"}, invalid)
        except (ClusterError, JobError) as error:
            return "admission webhook" in str(error)
        return False

    wait_for(is_refused, "the API server to call the webhook", 30)


def test_the_webhook_names_all_mistakes(hooked_api: Api) -> None:
    invalid = build_minimal_job(
        "bad", launcher={"colocate": True, "template": {}}, checkpoint={"claimName": "c", "path": "../x"}
    )
    invalid["spec"]["template"]["spec"]["containers"][0] |= {"image": None, "command": "python train.py"}
    with pytest.raises(JobError) as refused:
        create_job(hooked_api, invalid)
    for words in (
        "the job has 4 mistakes",
        "spec.launcher.template: has no effect when colocate is true",
        "spec.checkpoint.path: '../x' leaves the claim",
        "spec.template.spec.containers[0].image: is required",
        "spec.template.spec.containers[0].command: is not a list",
    ):
        assert words in str(refused.value)


def test_the_webhook_refuses_changes_of_fixed_fields(hooked_api: Api) -> None:
    job = create_job(hooked_api, build_minimal_job("fixed"))
    path = build_job_path(hooked_api, "fixed")
    kind = "application/merge-patch+json"
    with pytest.raises(JobError, match=r"spec\.workers: cannot be changed from 2 to 3"):
        hooked_api.request("PATCH", path, body={"spec": {"workers": 3}}, content=kind)
    template = copy.deepcopy(job["spec"]["template"])
    template["spec"]["nodeSelector"] = {"zone": "b"}
    with pytest.raises(JobError, match="only while the job is suspended"):
        hooked_api.request("PATCH", path, body={"spec": {"template": template}}, content=kind)
    hooked_api.request("PATCH", path, body={"spec": {"runPolicy": {"suspend": True}}}, content=kind)
    hooked_api.request(
        "PATCH", path, body={"spec": {"template": template, "runPolicy": {"suspend": False}}}, content=kind
    )
    set_status(hooked_api, "fixed", phase="Running")  # not the webhook's business
    hooked_api.request("PATCH", path, body={"metadata": {"labels": {"a": "b"}}}, content=kind)


def test_the_webhooks_warnings_reach_people(hooked_api: Api) -> None:
    job = build_minimal_job("warned")
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "trainer:latest"
    answer = hooked_api.request("POST", build_job_path(hooked_api), body=job)
    expected = (
        "spec.template.spec.containers[0].image: trainer:latest may name another image after a restart: "
        "use a fixed version"
    )
    assert set(answer.warnings) == {expected}, (
        "each warning is the expected one, though an installed webhook may repeat it"
    )
