"""`topkube submit`: check a job as `topkube run` does, then apply it to a cluster, with the code of this machine."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.cli.cluster import sync
from topkube.cli.cluster.api import APPLY, FIELD_MANAGER, Api, ClusterLocation, connect
from topkube.cli.cluster.jobs import (
    FINISHED_PHASES,
    TIMEOUT_CODE,
    build_job_path,
    find_exit_code,
    find_waiting_reason,
    read_phase,
    show_control_characters,
)
from topkube.cli.cluster.watches import JobWatch
from topkube.cli.script_job import Target, load_job
from topkube.errors import ClusterError, JobError, TopKubeError
from topkube.job import TrainingJob
from topkube.job.base.reading import format_yaml
from topkube.source.packing import PackedSource, pack_source

_WRITTEN_METADATA = ("name", "namespace", "labels", "annotations")
"""The fields of the metadata that people write."""


@dataclass(frozen=True)
class SubmitOptions:
    """The options of the command line."""

    target: Target
    location: ClusterLocation
    requirements: Path | None = None
    """A file with pip requirements for spec.setup."""
    dry_run: bool = False
    manifest: bool = False
    """Print the objects as YAML and submit nothing."""
    force_conflicts: bool = False
    wait: bool = False
    follow: bool = False
    timeout_seconds: float | None = None
    json: bool = False


def submit_job(options: SubmitOptions) -> int:
    """Submit the job and return the exit code: the job's own with --wait or --follow."""
    job, packed = _load_job(options)
    own = job.metadata.namespace
    if own and options.location.namespace and own != options.location.namespace:
        raise JobError(
            f"{options.target.program} is for namespace {own}, but --namespace is {options.location.namespace}",
            next_step="remove one of the two",
        )
    if options.manifest:
        return _print_manifests(job, packed, own or options.location.namespace)
    api = connect(options.location)
    api.namespace = own or api.namespace
    before = read_stored(api, job.name)
    applied = apply_job(api, job, packed, dry_run=options.dry_run, force_conflicts=options.force_conflicts)
    if options.json:
        print(json.dumps(applied, indent=1))
    else:
        note = " (dry run on the server)" if options.dry_run else ""
        if packed is not None:
            print(f"{packed.files} files of {options.target.root}, {len(packed.data):,} bytes packed", file=sys.stderr)
        print(f"trainingjob.topkube.dev/{job.name} {_describe_change(before, applied)}{note}", flush=True)
    if options.dry_run:
        return 0
    if options.follow:
        from topkube.cli.cluster import logs
        from topkube.cli.cluster.log_options import LogOptions

        location = ClusterLocation(options.location.kubeconfig, options.location.context, api.namespace)
        return logs.show_logs(LogOptions(job.name, location, timeout_seconds=options.timeout_seconds))
    return wait_for_end(api, job.name, options.timeout_seconds) if options.wait else 0


def _load_job(options: SubmitOptions) -> tuple[TrainingJob, PackedSource | None]:
    """Return the job of the command line and its packed code. Raises JobError, SourceError."""
    target = options.target
    is_script = not target.is_job_file and not target.is_module
    if is_script and target.root is None and target.image is None:
        raise JobError(
            f"the pods would not have {target.program}",
            cause="TopKube's runtime image does not contain your code",
            next_step="send the folder of the code: --sync .; or name an image that contains it: --image IMAGE",
        )
    job = load_job(target)
    packed = pack_source(target.root) if target.root is not None else None
    requirements = _read_requirements(options.requirements) if options.requirements is not None else ()
    return sync.add_code(job, packed, requirements), packed


def _read_requirements(path: Path) -> tuple[str, ...]:
    """Return the requirements in a file of pip, without comments. Raises JobError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise JobError(
            f"{path} cannot be read: {error}", next_step="pass a file with pip requirements: --requirements FILE"
        ) from None
    lines = text.replace("\\\n", " ").splitlines()
    words = [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]
    for line in words:
        if re.search(r"(^|\s)--?[A-Za-z]", line):
            raise JobError(
                f"{path} has the line {line!r}, which contains an option of pip",
                cause="spec.setup takes requirements only",
                next_step="write out the lines of other files, and leave hashes out; for an index, set PIP_INDEX_URL "
                "in the env of a job's file",
            )
    return tuple(words)


def _print_manifests(job: TrainingJob, packed: PackedSource | None, namespace: str | None) -> int:
    """Print what `submit` would apply. kubectl cannot make the job own the ConfigMap, because it has no uid yet."""
    data = _select_written_fields(job)
    if namespace:
        data["metadata"]["namespace"] = namespace
    if packed is not None:
        print(format_yaml(sync.build_config_map(job, packed, namespace)) + "---")
        print("note: the ConfigMap outlives the job if kubectl applies it; topkube submit deletes it", file=sys.stderr)
    print(format_yaml(data), end="")
    return 0


def _select_written_fields(job: TrainingJob) -> dict[str, Any]:
    """Return the part of a job that people write."""
    data = job.to_dict()
    data.pop("status", None)
    data["metadata"] = {key: value for key, value in data["metadata"].items() if key in _WRITTEN_METADATA}
    return data


def apply_job(
    api: Api,
    job: TrainingJob,
    packed: PackedSource | None = None,
    *,
    dry_run: bool = False,
    force_conflicts: bool = False,
) -> dict[str, Any]:
    """Apply the job in the connection's namespace, with the ConfigMap of its code, and return the stored job.

    The ConfigMap exists before the job, so that no pod waits for it, and then belongs to the job. If the job is
    refused, a ConfigMap that did not exist before is deleted again. Raises ClusterError, JobError.
    """
    data = _select_written_fields(job)
    data["metadata"]["namespace"] = api.namespace
    if packed is None:
        return _send_job(api, data, dry_run, force_conflicts)
    code = sync.build_config_map(job, packed, api.namespace)
    existed = sync.has_config_map(api, code)
    sync.apply_config_map(api, code, dry_run)
    try:
        applied = _send_job(api, data, dry_run, force_conflicts)
    except TopKubeError:
        if not existed and not dry_run:
            sync.delete_config_map(api, code)
        raise
    if not dry_run:
        sync.apply_config_map(api, sync.build_config_map(job, packed, api.namespace, applied["metadata"]["uid"]))
    return applied


def read_stored(api: Api, name: str) -> dict[str, Any] | None:
    """Return the stored job of this name, or None if there is none. Raises ClusterError."""
    try:
        return api.get(build_job_path(api, name))
    except ClusterError as error:
        if error.status != 404 or error.unknown_kind:
            raise
        return None


def _send_job(api: Api, data: dict[str, Any], dry_run: bool, force_conflicts: bool) -> dict[str, Any]:
    query = {"fieldManager": FIELD_MANAGER, "force": force_conflicts, "dryRun": "All" if dry_run else None}
    try:
        answer = api.request("PATCH", build_job_path(api, data["metadata"]["name"]), query, data, APPLY)
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


def _describe_change(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    if before is None:
        return "created"
    same = before["metadata"].get("resourceVersion") == after["metadata"].get("resourceVersion")
    return "unchanged" if same or before.get("spec") == after.get("spec") else "configured"


def wait_for_end(api: Api, name: str, seconds: float | None) -> int:
    """Wait for the job's end, with a line per phase on stderr. Return the exit code."""
    printed = ""
    try:
        for job in JobWatch(api, name, seconds).read_states():
            if job is None:
                raise ClusterError(f"the job {name} was deleted before it ended", status=404)
            state = ": ".join(part for part in (read_phase(job), find_waiting_reason(job)) if part)
            if state != printed:
                printed = state
                print(show_control_characters(f"{name}: {state}"), file=sys.stderr, flush=True)
            if read_phase(job) in FINISHED_PHASES:
                failure = (job.get("status") or {}).get("firstFailure") or {}
                if read_phase(job) == "Failed" and failure.get("message"):
                    print(show_control_characters(f"{name}: {failure['message']}"), file=sys.stderr)
                return find_exit_code(job)
    except TimeoutError:
        print(
            f"{name} is still {printed} after {seconds:g} s and continues; next: topkube status {name}", file=sys.stderr
        )
    return TIMEOUT_CODE
