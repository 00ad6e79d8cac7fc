"""The series of jobs: their phases, restarts, failures and checkpoints, read from the stored objects at every scrape.

Only the replica that acts serves them, so that each series has one producer. They carry the job's own `namespace`.
Prometheus keeps this label only with `honor_labels`.

They are written as text here, because prometheus_client makes several objects of each sample. For a thousand jobs that
would take longer than the rest of a scrape.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from topkube.job.status import Phase
from topkube.telemetry.metrics import Metric
from topkube.timestamps import parse_timestamp
from topkube_operator.model.status import CHECKPOINT_FAILED

PHASES: tuple[str, ...] = get_args(Phase)
FINISHED = ("Succeeded", "Failed")
JOB = ("namespace", "training_job")

JOBS = Metric("topkube_jobs", "gauge", f"TrainingJobs by phase: {', '.join(PHASES)}.", ("namespace", "phase"))
JOB_PHASE = Metric(
    "topkube_job_phase",
    "gauge",
    f"1 for the phase that an unfinished job is in: {', '.join(phase for phase in PHASES if phase not in FINISHED)}.",
    (*JOB, "phase"),
)
JOB_PHASE_SINCE = Metric(
    "topkube_job_phase_timestamp_seconds", "gauge", "When an unfinished job entered its phase.", JOB
)
JOB_RESTARTS = Metric("topkube_job_restarts", "gauge", "Restarts of an unfinished job, disruptions included.", JOB)
JOB_FAILURE = Metric(
    "topkube_job_first_failure_info",
    "gauge",
    "1 for a job with a failed attempt: the pod and rank that failed first, and the reason.",
    (*JOB, "pod", "rank", "reason"),
)
JOB_AVOIDED_NODE = Metric(
    "topkube_job_avoided_node_info",
    "gauge",
    "1 for each node that new pods of an unfinished job avoid, with the node's condition or the reason of a failure.",
    (*JOB, "node", "reason"),
)
JOB_FAILED_AT = Metric(
    "topkube_job_failed_timestamp_seconds", "gauge", "When a failed job failed. Absent for other jobs.", JOB
)
JOB_CHECKPOINT_FAILED = Metric(
    "topkube_job_checkpoint_failed",
    "gauge",
    "1 if the condition CheckpointFailed of an unfinished job is true: a checkpoint could not be written, and there is "
    "no newer checkpoint. Absent without spec.checkpoint.",
    JOB,
)
JOB_CHECKPOINT_AT = Metric(
    "topkube_job_last_checkpoint_timestamp_seconds",
    "gauge",
    "When a checkpoint of a running job was last reported, or when the job started if it has none. Absent without "
    "spec.checkpoint.",
    JOB,
)
METRICS = (
    *(JOBS, JOB_PHASE, JOB_PHASE_SINCE, JOB_RESTARTS, JOB_FAILURE, JOB_FAILED_AT),
    *(JOB_CHECKPOINT_FAILED, JOB_CHECKPOINT_AT, JOB_AVOIDED_NODE),
)


def render_jobs(jobs: Iterable[Mapping[str, Any]]) -> str:
    """Return the series of all stored jobs in Prometheus's text format. Finished jobs are counted by phase. Of them,
    only failed jobs also have series of their own, about their failure."""
    lines: dict[Metric, list[str]] = {metric: [] for metric in METRICS}
    counts: Counts[tuple[str, str]] = Counts()
    for job in jobs:
        metadata, status = job.get("metadata") or {}, job.get("status") or {}
        name = (str(metadata.get("namespace", "")), str(metadata.get("name", "")))
        phase = str(status.get("phase") or "Pending")
        counts[name[0], phase] += 1
        first = status.get("firstFailure") or {}
        if first and phase != "Succeeded":
            rank = "" if first.get("rank") is None else str(first["rank"])
            values = (*name, first.get("pod") or "", rank, first.get("reason") or "")
            lines[JOB_FAILURE].append(_format_line(JOB_FAILURE, values, 1))
        if phase == "Failed" and (failed := parse_timestamp(status.get("completionTime"))) is not None:
            lines[JOB_FAILED_AT].append(_format_line(JOB_FAILED_AT, name, failed.timestamp()))
        if phase in FINISHED:
            continue
        if (job.get("spec") or {}).get("checkpoint"):
            for metric, value in _list_checkpoint_values(status, phase):
                lines[metric].append(_format_line(metric, name, value))
        restarts = (status.get("restarts") or 0) + (status.get("disruptions") or 0)
        lines[JOB_PHASE].append(_format_line(JOB_PHASE, (*name, phase), 1))
        for entry in status.get("avoidedNodes") or ():
            lines[JOB_AVOIDED_NODE].append(
                _format_line(JOB_AVOIDED_NODE, (*name, entry["name"], entry.get("reason") or ""), 1)
            )
        lines[JOB_RESTARTS].append(_format_line(JOB_RESTARTS, name, restarts))
        if (entered := _find_phase_entry(metadata, status)) is not None:
            lines[JOB_PHASE_SINCE].append(_format_line(JOB_PHASE_SINCE, name, entered))
    for namespace in sorted({namespace for namespace, _ in counts}):
        lines[JOBS] += [_format_line(JOBS, (namespace, phase), counts[namespace, phase]) for phase in PHASES]
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(samples)}"
        for metric, samples in lines.items()
    )


def _list_checkpoint_values(status: Mapping[str, Any], phase: str) -> Iterable[tuple[Metric, float]]:
    """Yield the series about the checkpoints of an unfinished job."""
    conditions = [entry for entry in status.get("conditions") or () if isinstance(entry, Mapping)]
    has_failed = any(entry.get("type") == CHECKPOINT_FAILED and entry.get("status") == "True" for entry in conditions)
    yield JOB_CHECKPOINT_FAILED, float(has_failed)
    progress = status.get("progress") or {}
    saved = parse_timestamp(progress.get("checkpointAt")) or parse_timestamp(status.get("startTime"))
    if phase == "Running" and saved is not None:
        yield JOB_CHECKPOINT_AT, saved.timestamp()


def _format_line(metric: Metric, values: Sequence[str], value: float) -> str:
    """Return a sample in Prometheus's text format."""
    labels = ",".join(f'{name}="{_escape(text)}"' for name, text in zip(metric.labels, values, strict=True))
    return f"{metric.name}{{{labels}}} {float(value)!r}\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _find_phase_entry(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
    """Return when the job entered its phase, as Unix time: the last change of a condition of the phase, or the creation
    of the job if no condition has changed."""
    conditions = status.get("conditions") or []
    times = [
        condition.get("lastTransitionTime")
        for condition in conditions
        if isinstance(condition, Mapping) and condition.get("type") != CHECKPOINT_FAILED
    ]
    newest = max((time for time in times if time), default=metadata.get("creationTimestamp"))
    entered = parse_timestamp(newest)
    return entered.timestamp() if entered is not None else None
