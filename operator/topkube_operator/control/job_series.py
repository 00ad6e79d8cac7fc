"""The series of jobs: their phases, restarts, failures and checkpoints, read from the stored objects at every scrape.

Only the leading replica serves these series, so that each series has one producer. Their label `namespace` is the
namespace of the job. Prometheus keeps this label only with `honor_labels`.

The series are written as text here, because prometheus_client creates several Python objects for each sample. For a
thousand jobs, that would take longer than the rest of a scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, get_args

from topkube.job.status import Phase
from topkube.telemetry.metrics import Metric
from topkube.timestamps import parse_timestamp
from topkube_operator.model.status import CHECKPOINT_FAILED

PHASES: tuple[str, ...] = get_args(Phase)
FINISHED = ("Succeeded", "Failed")
_JOB_LABELS = ("namespace", "training_job")

JOBS = Metric("topkube_jobs", "gauge", f"TrainingJobs by phase: {', '.join(PHASES)}.", ("namespace", "phase"))
JOB_PHASE = Metric(
    "topkube_job_phase",
    "gauge",
    f"1 for the phase that an unfinished job is in: {', '.join(phase for phase in PHASES if phase not in FINISHED)}.",
    (*_JOB_LABELS, "phase"),
)
JOB_PHASE_SINCE = Metric(
    "topkube_job_phase_timestamp_seconds",
    "gauge",
    "Time of the newest change of a condition of an unfinished job, except CheckpointFailed. If there is no such "
    "condition, the time when the job was created. This is about the time when the job entered its phase.",
    _JOB_LABELS,
)
JOB_RESTARTS = Metric(
    "topkube_job_restarts", "gauge", "Restarts of an unfinished job, disruptions included.", _JOB_LABELS
)
JOB_FAILURE = Metric(
    "topkube_job_first_failure_info",
    "gauge",
    "1 for a job that has not succeeded and has a failed attempt: the pod and rank that failed first in the last "
    "failed attempt, and the reason.",
    (*_JOB_LABELS, "pod", "rank", "reason"),
)
JOB_AVOIDED_NODE = Metric(
    "topkube_job_avoided_node_info",
    "gauge",
    "1 for each node that new pods of an unfinished job avoid, with the node's condition or the reason of a failure.",
    (*_JOB_LABELS, "node", "reason"),
)
JOB_FAILED_AT = Metric(
    "topkube_job_failed_timestamp_seconds", "gauge", "When a failed job failed. Absent for other jobs.", _JOB_LABELS
)
JOB_CHECKPOINT_FAILED = Metric(
    "topkube_job_checkpoint_failed",
    "gauge",
    "1 if the condition CheckpointFailed of an unfinished job is true: a checkpoint could not be written, and there is "
    "no newer checkpoint. Absent without spec.checkpoint.",
    _JOB_LABELS,
)
JOB_CHECKPOINT_AT = Metric(
    "topkube_job_last_checkpoint_timestamp_seconds",
    "gauge",
    "When the newest checkpoint of a running job was first reported, or when the job started or was resumed if that is "
    "later. Absent without spec.checkpoint.",
    _JOB_LABELS,
)
METRICS = (
    JOBS,
    JOB_PHASE,
    JOB_PHASE_SINCE,
    JOB_RESTARTS,
    JOB_FAILURE,
    JOB_FAILED_AT,
    JOB_CHECKPOINT_FAILED,
    JOB_CHECKPOINT_AT,
    JOB_AVOIDED_NODE,
)

_Sample = tuple[Metric, tuple[str, ...], float]
"""A metric of one job, the values of its labels after _JOB_LABELS, and its value."""


def render_jobs(jobs: Iterable[Mapping[str, Any]]) -> str:
    """Return the series of all stored jobs in Prometheus's text format. All jobs are counted by phase. A succeeded job
    has no series of its own. A failed job has only the series about its failure."""
    lines: dict[Metric, list[str]] = {metric: [] for metric in METRICS}
    counts: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        namespace, name = _read_job_labels(job)
        phase = _read_phase(job)
        counts[namespace, phase] += 1
        samples = _list_failure_samples(job, phase)
        if phase not in FINISHED:
            samples = chain(samples, _list_unfinished_samples(job, phase))
        for metric, labels, value in samples:
            lines[metric].append(_format_line(metric, (namespace, name, *labels), value))
    for namespace in sorted({namespace for namespace, _ in counts}):
        lines[JOBS] += [_format_line(JOBS, (namespace, phase), counts[namespace, phase]) for phase in PHASES]
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(metric_lines)}"
        for metric, metric_lines in lines.items()
    )


def _read_job_labels(job: Mapping[str, Any]) -> tuple[str, str]:
    """Return the values of _JOB_LABELS."""
    metadata = job.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))


def _read_phase(job: Mapping[str, Any]) -> str:
    return str((job.get("status") or {}).get("phase") or "Pending")


def _list_failure_samples(job: Mapping[str, Any], phase: str) -> Iterator[_Sample]:
    """Yield the samples about the failures of a job, finished or not."""
    status = job.get("status") or {}
    first_failure = status.get("firstFailure") or {}
    if first_failure and phase != "Succeeded":
        rank = "" if first_failure.get("rank") is None else str(first_failure["rank"])
        yield JOB_FAILURE, (first_failure.get("pod") or "", rank, first_failure.get("reason") or ""), 1
    if phase == "Failed" and (failed_at := parse_timestamp(status.get("completionTime"))) is not None:
        yield JOB_FAILED_AT, (), failed_at.timestamp()


def _list_unfinished_samples(job: Mapping[str, Any], phase: str) -> Iterator[_Sample]:
    """Yield the samples that only an unfinished job has."""
    status = job.get("status") or {}
    if (job.get("spec") or {}).get("checkpoint"):
        yield from _list_checkpoint_samples(status, phase)
    yield JOB_PHASE, (phase,), 1
    for avoided in status.get("avoidedNodes") or ():
        yield JOB_AVOIDED_NODE, (avoided["name"], avoided.get("reason") or ""), 1
    yield JOB_RESTARTS, (), (status.get("restarts") or 0) + (status.get("disruptions") or 0)
    if (phase_start := _find_phase_start(job.get("metadata") or {}, status)) is not None:
        yield JOB_PHASE_SINCE, (), phase_start


def _list_checkpoint_samples(status: Mapping[str, Any], phase: str) -> Iterator[_Sample]:
    """Yield the samples about the checkpoints of an unfinished job that writes checkpoints."""
    has_failed = any(
        condition.get("type") == CHECKPOINT_FAILED and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
        if isinstance(condition, Mapping)
    )
    yield JOB_CHECKPOINT_FAILED, (), float(has_failed)
    progress = status.get("progress") or {}
    times = (parse_timestamp(progress.get("checkpointAt")), parse_timestamp(status.get("startTime")))
    # The progress survives a suspension, and a resumed job has a new start.
    saved_or_started = max((time.timestamp() for time in times if time is not None), default=None)
    if phase == "Running" and saved_or_started is not None:
        yield JOB_CHECKPOINT_AT, (), saved_or_started


def _format_line(metric: Metric, label_values: Sequence[str], value: float) -> str:
    """Return a sample in Prometheus's text format."""
    labels = ",".join(
        f'{name}="{_escape_label_value(text)}"' for name, text in zip(metric.labels, label_values, strict=True)
    )
    return f"{metric.name}{{{labels}}} {float(value)!r}\n"


def _escape_label_value(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _find_phase_start(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
    """Return about when the job entered its phase, as Unix time; None if no valid time is stored.

    The status does not store this time. The result is the newest change of any condition except CheckpointFailed, or
    the creation of the job if the job has no such condition. In Starting, the result is the time when all pods had a
    node. The phase itself starts later, when the containers of all pods have started. In Pending and Restarting, the
    result moves when pods are made or get a node."""
    conditions = status.get("conditions") or []
    times = [
        condition.get("lastTransitionTime")
        for condition in conditions
        if isinstance(condition, Mapping) and condition.get("type") != CHECKPOINT_FAILED
    ]
    # The operator writes all these times in UTC with the same length, so the newest time is the largest text.
    newest = max((time for time in times if time), default=metadata.get("creationTimestamp"))
    phase_start = parse_timestamp(newest)
    return phase_start.timestamp() if phase_start is not None else None
