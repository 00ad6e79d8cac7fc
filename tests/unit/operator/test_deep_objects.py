"""Jobs that are nested thousands of levels deep: one of them must not end the operator for all users."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import kopf
import pytest
from simulated_cluster import SimulatedCluster
from simulated_job import build_job

from topkube_operator import handlers

SCRIPT = """
import json
import threading

from topkube_operator.__main__ import allow_deep_objects
from topkube_operator.http.webhook import answer_review

LIST = '{"items": [%s]}'
JOB = '{"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "deep"}, "spec": {"x": %s}}'
REVIEW = '{"request": {"uid": "u", "operation": "UPDATE", "object": %s, "oldObject": %s}}'


def nest(levels):
    return "[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels


def review(job, old):
    status, text = answer_review((REVIEW % (job, old)).encode())
    assert status == 200, text
    return json.loads(text)["response"]


def read_objects():
    for deep in nest(9_990):
        job = JOB % deep
        json.loads(LIST % job)
        assert "nested too deeply" in review(job, "null")["status"]["message"]
        assert review(job, job)["allowed"]
    for levels in (11_500, 1_000_000):  # from a caller that is no API server
        for deep in nest(levels):
            assert answer_review((REVIEW % (JOB % deep, JOB % deep)).encode())[0] in (200, 400)


allow_deep_objects()
read_objects()
thread = threading.Thread(target=read_objects)
thread.start()
thread.join()
print("end")
"""


def test_every_object_that_the_api_server_stores_can_be_read() -> None:
    """In a process of its own, because a stack that is too small would end the process."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("levels", [101, 400, 5_000])
def test_a_deep_job_is_invalid_and_its_status_says_so(levels: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    job = build_job()
    job["spec"]["template"]["spec"]["volumes"] = deep
    world = SimulatedCluster(build_job())
    assert world.job is not None
    world.job["spec"] = job["spec"]
    world.reconcile()
    assert world.status["phase"] == "Failed"
    assert "spec.template: is nested too deeply" in world.find_condition("Failed")["message"]


def test_kopf_neither_copies_objects_nor_reads_annotations() -> None:
    settings = kopf.OperatorSettings()
    handlers.configure(settings, is_clusterwide=True)
    storage = settings.persistence.diffbase_storage
    annotations = {"kopf.zalando.org/last-handled-configuration": "anything"}
    body = kopf.Body({"metadata": {"annotations": annotations}, "spec": {"workers": 2}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
    assert settings.watching.chunk_size, "all jobs of a cluster at once need too much memory"
