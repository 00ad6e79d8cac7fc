"""The operator's metrics: what the operator does (counters, by event) and the state of its jobs.

The state of jobs is read from the watch cache at every scrape, so that a job's series end with the job. Per-job series
have the job's own `namespace`. Prometheus keeps this label only with `honor_labels`.

The series of jobs are written as text here, because prometheus_client makes several objects of each sample. For a
thousand jobs that would take longer than the rest of a scrape.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from topkube import __version__
from topkube.job.failure_policy import AVOIDED_NODE_NEEDED, PENDING_TIMEOUT
from topkube.job.status import Phase
from topkube.telemetry.metrics import BUILD, PROGRESS, Metric
from topkube.timestamps import parse_timestamp
from topkube_operator.model.status import CHECKPOINT_FAILED

PHASES: tuple[str, ...] = get_args(Phase)
FINISHED = ("Succeeded", "Failed")
OUTCOMES = ("changed", "unchanged", "error")
"""Outcomes of a reconcile: it wrote something, there was nothing to do, it raised an error."""
REASONS = (
    *("Error", "OOMKilled", "HardwareFault", "Evicted", "Preempted", "NodeLost", "Deleted", "Stalled"),
    *("RendezvousTimeout", PENDING_TIMEOUT, AVOIDED_NODE_NEEDED, "Other"),
)
"""Reasons of a restart: why the attempt before it ended. "Other" stands for all reasons that are not listed, so that
the label stays bounded."""
JOB = ("namespace", "training_job")

_START_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

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
JOB_PROGRESS = Metric(
    PROGRESS.name, "gauge", "Finished share of an unfinished job's steps, from 0 to 1, according to its status.", JOB
)
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
_OF_JOBS = (
    *(JOBS, JOB_PHASE, JOB_PHASE_SINCE, JOB_RESTARTS, JOB_PROGRESS, JOB_FAILURE, JOB_FAILED_AT),
    *(JOB_CHECKPOINT_FAILED, JOB_CHECKPOINT_AT, JOB_AVOIDED_NODE),
)
TRANSITIONS = Metric(
    "topkube_job_transitions_total", "counter", f"Jobs that entered a phase: {', '.join(PHASES)}.", ("phase",)
)
RESTARTS = Metric("topkube_job_restarts_total", "counter", f"Restarts by reason: {', '.join(REASONS)}.", ("reason",))
START_SECONDS = Metric(
    "topkube_job_start_seconds",
    "histogram",
    "Seconds from a job's start to phase Running, for first attempts.",
)
RECONCILES = Metric(
    "topkube_reconciles_total", "counter", f"Reconciles by outcome: {', '.join(OUTCOMES)}.", ("outcome",)
)
RECONCILE_SECONDS = Metric("topkube_reconcile_seconds", "histogram", "Seconds of one reconcile, calls included.")
LEADER = Metric("topkube_leader", "gauge", "1 on the replica that acts, 0 on those that stand by.")

METRICS = (
    *_OF_JOBS,
    *(TRANSITIONS, RESTARTS, START_SECONDS, RECONCILES, RECONCILE_SECONDS, LEADER),
)


class OperatorMetrics:
    """All metrics of one operator. `jobs` returns the stored TrainingJobs, as plain data, from the watch cache. It is
    called at every scrape."""

    def __init__(self, jobs: Callable[[], Iterable[Mapping[str, Any]]] = tuple) -> None:
        disable_created_metrics()  # they would add a series to each counter, which nobody reads
        self._jobs = jobs
        self._events = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._events)  # processor time and memory
        build = Gauge(BUILD.name, BUILD.help, BUILD.labels, registry=self._events)
        build.labels("operator", __version__).set(1)
        self._transitions = self._counter(TRANSITIONS, PHASES)
        self._restarts = self._counter(RESTARTS, REASONS)
        self._reconciles = self._counter(RECONCILES, OUTCOMES)
        self._start = self._histogram(START_SECONDS, _START_BUCKETS)
        self._reconcile = self._histogram(RECONCILE_SECONDS, _RECONCILE_BUCKETS)
        self._leader = Gauge(LEADER.name, LEADER.help, registry=self._events)

    def text(self) -> bytes:
        """Return the answer of /metrics, in Prometheus's text format."""
        return generate_latest(self._events) + _jobs_text(self._jobs()).encode()

    def _counter(self, metric: Metric, values: tuple[str, ...]) -> Counter:
        counter = Counter(metric.name, metric.help, metric.labels, registry=self._events)
        for value in values:
            counter.labels(value)  # starts at 0, so that a rate includes the first increase
        return counter

    def _histogram(self, metric: Metric, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=self._events)

    def count_transition(self, phase: str) -> None:
        """Count a job that has entered `phase`."""
        self._transitions.labels(phase).inc()

    def count_restart(self, reason: str) -> None:
        """Count an attempt that ended for `reason` and is followed by another."""
        self._restarts.labels(reason if reason in REASONS else "Other").inc()

    def observe_start(self, seconds: float) -> None:
        """Observe a job that runs `seconds` after its creation or resumption."""
        self._start.observe(seconds)

    def observe_reconcile(self, seconds: float, outcome: str) -> None:
        """Observe a reconcile that took `seconds`. `outcome` is one of OUTCOMES."""
        assert outcome in OUTCOMES, outcome
        self._reconciles.labels(outcome).inc()
        self._reconcile.observe(seconds)

    def set_leader(self, leader: bool) -> None:
        """Set if this replica acts."""
        self._leader.set(leader)


def _jobs_text(jobs: Iterable[Mapping[str, Any]]) -> str:
    """Return the series of all stored jobs. Finished jobs are counted; only failed jobs among them have a series of
    their own, with their failure."""
    lines: dict[Metric, list[str]] = {metric: [] for metric in _OF_JOBS}
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
            lines[JOB_FAILURE].append(_line(JOB_FAILURE, values, 1))
        if phase == "Failed" and (failed := parse_timestamp(status.get("completionTime"))) is not None:
            lines[JOB_FAILED_AT].append(_line(JOB_FAILED_AT, name, failed.timestamp()))
        if phase in FINISHED:
            continue
        if (job.get("spec") or {}).get("checkpoint"):
            for metric, value in _checkpoint_values(status, phase):
                lines[metric].append(_line(metric, name, value))
        restarts = (status.get("restarts") or 0) + (status.get("disruptions") or 0)
        lines[JOB_PHASE].append(_line(JOB_PHASE, (*name, phase), 1))
        for entry in status.get("avoidedNodes") or ():
            lines[JOB_AVOIDED_NODE].append(
                _line(JOB_AVOIDED_NODE, (*name, entry["name"], entry.get("reason") or ""), 1)
            )
        lines[JOB_RESTARTS].append(_line(JOB_RESTARTS, name, restarts))
        if (entered := _phase_entered_at(metadata, status)) is not None:
            lines[JOB_PHASE_SINCE].append(_line(JOB_PHASE_SINCE, name, entered))
        progress = status.get("progress") or {}
        if progress.get("totalSteps"):
            ratio = min(1.0, (progress.get("step") or 0) / progress["totalSteps"])
            lines[JOB_PROGRESS].append(_line(JOB_PROGRESS, name, ratio))
    for namespace in sorted({namespace for namespace, _ in counts}):
        lines[JOBS] += [_line(JOBS, (namespace, phase), counts[namespace, phase]) for phase in PHASES]
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(samples)}"
        for metric, samples in lines.items()
    )


def _checkpoint_values(status: Mapping[str, Any], phase: str) -> Iterable[tuple[Metric, float]]:
    """Yield the series about the checkpoints of an unfinished job."""
    conditions = [entry for entry in status.get("conditions") or () if isinstance(entry, Mapping)]
    has_failed = any(entry.get("type") == CHECKPOINT_FAILED and entry.get("status") == "True" for entry in conditions)
    yield JOB_CHECKPOINT_FAILED, float(has_failed)
    progress = status.get("progress") or {}
    saved = parse_timestamp(progress.get("checkpointAt")) or parse_timestamp(status.get("startTime"))
    if phase == "Running" and saved is not None:
        yield JOB_CHECKPOINT_AT, saved.timestamp()


def _line(metric: Metric, values: Sequence[str], value: float) -> str:
    """Return a sample in Prometheus's text format."""
    labels = ",".join(f'{name}="{_escape(text)}"' for name, text in zip(metric.labels, values, strict=True))
    return f"{metric.name}{{{labels}}} {float(value)!r}\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _phase_entered_at(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
    """Return when the job entered its phase, as Unix time: the last change of a condition of the phase, or
    else its creation."""
    conditions = status.get("conditions") or []
    times = [
        condition.get("lastTransitionTime")
        for condition in conditions
        if isinstance(condition, Mapping) and condition.get("type") != CHECKPOINT_FAILED
    ]
    newest = max((time for time in times if time), default=metadata.get("creationTimestamp"))
    entered = parse_timestamp(newest)
    return entered.timestamp() if entered is not None else None
