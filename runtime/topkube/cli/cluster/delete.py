"""`topkube delete`: delete jobs, and wait until their pods are gone too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from topkube.cli.cluster.api import Api, ClusterLocation, connect, ignore_missing
from topkube.cli.cluster.jobs import SOME_PODS, build_job_path, find_job, list_some_pods, print_line
from topkube.errors import ClusterError

_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class DeleteOptions:
    """The options of the command line."""

    jobs: list[str]
    location: ClusterLocation
    wait: bool = True
    timeout_seconds: float = 300.0


def delete_jobs(options: DeleteOptions, report: Callable[[str], None] = print_line) -> int:
    """Delete the jobs, and `report` what was done. If one name is wrong, no job is deleted. Raises ClusterError."""
    api = connect(options.location)
    jobs = [find_job(api, name) for name in options.jobs]
    for job in jobs:
        metadata = job["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        with ignore_missing():
            api.request("DELETE", build_job_path(api, metadata["name"]), body=body)
        report(f"trainingjob.topkube.dev/{metadata['name']} deleted")
    if options.wait:
        deadline = time.monotonic() + options.timeout_seconds
        for job in jobs:
            _wait_until_gone(api, job["metadata"]["name"], job["metadata"]["uid"], deadline, options.timeout_seconds)
    return 0


def _wait_until_gone(api: Api, name: str, uid: str, deadline: float, seconds: float) -> None:
    while remaining := _find_remaining(api, name, uid):
        if time.monotonic() >= deadline:
            raise ClusterError(
                f"after {seconds:g} s these still exist: {', '.join(remaining)}",
                cause="a lost node cannot report that its pods have ended, or a finalizer keeps the object",
                next_step=f"kubectl get tj,pods -n {api.namespace} -l topkube.dev/job-name={name}; "
                "`topkube delete --no-wait` does not wait",
            )
        time.sleep(_CHECK_SECONDS)


def _find_remaining(api: Api, name: str, uid: str) -> list[str]:
    try:
        return _list_remaining(api, name, uid)
    except ClusterError as error:
        if not error.passing:
            raise
        return [f"objects of {name} (no answer: {error.what})"]


def _list_remaining(api: Api, name: str, uid: str) -> list[str]:
    remaining = []
    with ignore_missing():
        if api.get(build_job_path(api, name))["metadata"].get("uid") == uid:
            remaining.append(f"the job {name}")
    pods = list_some_pods(api, name, uid)
    more = ["perhaps more pods"] if len(pods) >= SOME_PODS else []
    return remaining + [f"pod {pod['metadata']['name']}" for pod in pods] + more
