"""TrainingClient against a simulated API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_answers import Answer, Answers, build_status

from topkube.errors import ClusterError, JobError
from topkube.sdk import TrainingClient


def train() -> None:
    print("trained")


def build_job(name: str, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "worker", "image": "i", "command": ["python", "a.py"]}]}}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "spec": {"template": template, **spec},
    }


@pytest.fixture
def client(start_server: Callable[[Answers], Path]) -> TrainingClient:
    """A client for a server with two valid jobs and one that was stored while the webhook did not answer."""
    jobs = {job["metadata"]["name"]: job for job in (build_job("a"), build_job("bad", workers=0), build_job("c"))}

    def answer(method: str, path: str) -> Answer:
        name = path.partition("?")[0].rsplit("/", 1)[-1]
        return 200, json.dumps(jobs.get(name, {"items": list(jobs.values())})).encode(), {}

    return TrainingClient(kubeconfig=start_server(answer), namespace="team")


def test_an_invalid_stored_job_is_left_out_of_the_list_and_named(client: TrainingClient) -> None:
    with pytest.warns(UserWarning, match="left out: the stored job team/bad has a mistake") as warned:
        assert [job.name for job in client.list()] == ["a", "c"]
    assert "spec.workers: 0 is not a whole number" in str(warned[0].message)
    assert warned[0].filename == __file__, "the warning names the line that called list()"


def test_the_error_of_an_invalid_stored_job_has_its_name(client: TrainingClient) -> None:
    with pytest.raises(JobError, match="the stored job team/bad has a mistake"):
        client.get("bad")
    with pytest.raises(JobError, match="the stored job team/bad has a mistake"):
        client.wait("bad", show=False)
    assert client.get("a").name == "a"


def test_a_job_is_submitted_without_a_list_of_all_jobs(start_server: Callable[[Answers], Path]) -> None:
    """The list of a namespace may be large, and this account may not read it."""

    def answer(method: str, path: str) -> Answer:
        if path.endswith("/trainingjobs"):
            return build_status(403, "trainingjobs is forbidden: no", kind="trainingjobs")
        if method == "PATCH" or path.endswith("/taken"):
            return 200, json.dumps(build_job("new")).encode(), {}
        return build_status(404, "not found", name="new", kind="trainingjobs")

    client = TrainingClient(kubeconfig=start_server(answer), namespace="team")
    assert client.train(train, name="new") == "new"
    with pytest.raises(ClusterError, match="there is a job taken in namespace team already"):
        client.train(train, name="taken")
