"""`topkube submit`: check a job as `topkube run` does, then apply it to a cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.cli.cluster.api import APPLY, FIELD_MANAGER, Api, Where, connect
from topkube.cli.cluster.jobs import OVER, WAIT_CODE, Watch, exit_code, job_path, phase, waiting_reason
from topkube.errors import ClusterError, JobError
from topkube.job import TrainingJob

_WRITTEN = ("name", "namespace", "labels", "annotations")


@dataclass(frozen=True)
class SubmitOptions:
    """The options of the command line."""

    job: Path
    where: Where
    dry_run: bool = False
    force_conflicts: bool = False
    wait: bool = False
    follow: bool = False
    timeout_seconds: float | None = None
    json: bool = False


def submit_job(options: SubmitOptions) -> int:
    """Submit the job and return the exit code: the job's own with --wait or --follow."""
    job = TrainingJob.from_yaml(options.job)
    api = connect(options.where)
    own = job.metadata.namespace
    if own and options.where.namespace and own != options.where.namespace:
        raise JobError(
            f"{options.job} is for namespace {own}, but --namespace is {options.where.namespace}",
            next_step="remove one of the two",
        )
    api.namespace = own or api.namespace
    before = _stored(api, job.name)
    data = job.to_dict()
    data.pop("status", None)
    data["metadata"] = {key: value for key, value in data["metadata"].items() if key in _WRITTEN}
    data["metadata"]["namespace"] = api.namespace
    applied = _apply(api, data, options)
    if options.json:
        print(json.dumps(applied, indent=1))
    else:
        note = " (dry run on the server)" if options.dry_run else ""
        print(f"trainingjob.topkube.dev/{job.name} {_verb(before, applied)}{note}", flush=True)
    if options.dry_run:
        return 0
    if options.follow:
        from topkube.cli.cluster import logs

        where = Where(options.where.kubeconfig, options.where.context, api.namespace)
        return logs.show_logs(logs.LogOptions(job.name, where, timeout_seconds=options.timeout_seconds))
    return wait(api, job.name, options.timeout_seconds) if options.wait else 0


def _stored(api: Api, name: str) -> dict[str, Any] | None:
    try:
        return api.get(job_path(api, name))
    except ClusterError as error:
        if error.status != 404 or error.unknown_kind:
            raise
        return None


def _apply(api: Api, data: dict[str, Any], options: SubmitOptions) -> dict[str, Any]:
    query = {
        "fieldManager": FIELD_MANAGER,
        "force": options.force_conflicts,
        "dryRun": "All" if options.dry_run else None,
    }
    try:
        answer = api.request("PATCH", job_path(api, data["metadata"]["name"]), query, data, APPLY)
    except ClusterError as error:
        if error.status != 409:
            raise
        raise ClusterError(
            error.what,
            status=409,
            cause="kubectl or another tool set these fields",
            next_step="change the job with that tool, or take the fields over: --force-conflicts",
        ) from None
    for warning in answer.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return answer.data


def _verb(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    if before is None:
        return "created"
    same = before["metadata"].get("resourceVersion") == after["metadata"].get("resourceVersion")
    return "unchanged" if same or before.get("spec") == after.get("spec") else "configured"


def wait(api: Api, name: str, seconds: float | None) -> int:
    """Wait for the job's end, with a line per phase on stderr. Return the exit code."""
    printed = ""
    try:
        for job in Watch(api, name, seconds).states():
            if job is None:
                raise ClusterError(f"the job {name} was deleted before it ended", status=404)
            state = ": ".join(part for part in (phase(job), waiting_reason(job)) if part)
            if state != printed:
                printed = state
                print(f"{name}: {state}", file=sys.stderr, flush=True)
            if phase(job) in OVER:
                failure = (job.get("status") or {}).get("firstFailure") or {}
                if phase(job) == "Failed" and failure.get("message"):
                    print(f"{name}: {failure['message']}", file=sys.stderr)
                return exit_code(job)
    except TimeoutError:
        print(
            f"{name} is still {printed} after {seconds:g} s and continues; next: topkube status {name}", file=sys.stderr
        )
    return WAIT_CODE
