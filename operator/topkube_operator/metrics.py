"""The operator's metrics: what it does (counters, by event) and how its jobs are (read from the watch cache at every
scrape, so that a job's series end with the job and nothing has to be forgotten).

Per-job series carry the job's own `namespace`: Prometheus keeps it only with `honor_labels`.

The series of jobs are written as text here: prometheus_client makes several objects of each sample, which for a
thousand jobs takes longer than all the rest of a scrape.
"""

from __future__ import annotations

import datetime
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
from topkube.job.status import Phase
from topkube.telemetry.metrics import BUILD, PROGRESS, Metric

PHASES: tuple[str, ...] = get_args(Phase)
FINISHED = ("Succeeded", "Failed")
OUTCOMES = ("changed", "unchanged", "error")
"""Of a reconcile: it wrote something, there was nothing to do, it raised."""
REASONS = ("Error", "OOMKilled", "Evicted", "Preempted", "NodeLost", "Deleted", "Stalled", "RendezvousTimeout", "Other")
"""Of a restart: what ended the attempt before. "Other" stands for every reason that is not listed, so that the label
stays bounded."""
JOB = ("namespace", "training_job")

_START_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

JOBS = Metric("topkube_jobs", "gauge", f"TrainingJobs by phase: {', '.join(PHASES)}.", ("namespace", "phase"))
JOB_PHASE = Metric(
    "topkube_job_phase",
    "gauge",
    f"1 for the phase that an unfinished job is in: {', '.join(one for one in PHASES if one not in FINISHED)}.",
    (*JOB, "phase"),
)
JOB_PHASE_SINCE = Metric(
    "topkube_job_phase_timestamp_seconds", "gauge", "When an unfinished job entered its phase.", JOB
)
JOB_RESTARTS = Metric("topkube_job_restarts", "gauge", "Restarts of an unfinished job, disruptions included.", JOB)
JOB_PROGRESS = Metric(
    PROGRESS.name, "gauge", "Share of an unfinished job's steps that is finished, 0 to 1, as its status says.", JOB
)
JOB_FAILURE = Metric(
    "topkube_job_first_failure_info",
    "gauge",
    "1 for a job with a failed attempt: the pod and rank that failed first, and the reason.",
    (*JOB, "pod", "rank", "reason"),
)
_OF_JOBS = (JOBS, JOB_PHASE, JOB_PHASE_SINCE, JOB_RESTARTS, JOB_PROGRESS, JOB_FAILURE)
TRANSITIONS = Metric(
    "topkube_job_transitions_total", "counter", f"Jobs that entered a phase: {', '.join(PHASES)}.", ("phase",)
)
RESTARTS = Metric("topkube_job_restarts_total", "counter", f"Restarts by reason: {', '.join(REASONS)}.", ("reason",))
START_SECONDS = Metric(
    "topkube_job_start_seconds",
    "histogram",
    "Seconds from a job's start to phase Running, of first attempts.",
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
    """All metrics of one operator. `jobs` gives the stored TrainingJobs, as plain data, from the watch cache; it is
    called at every scrape."""

    def __init__(self, jobs: Callable[[], Iterable[Mapping[str, Any]]] = tuple) -> None:
        disable_created_metrics()  # a series of its own beside each counter, which nothing here asks for
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
        """What /metrics answers, in Prometheus's text format."""
        return generate_latest(self._events) + _jobs_text(self._jobs()).encode()

    def _counter(self, metric: Metric, values: tuple[str, ...]) -> Counter:
        counter = Counter(metric.name, metric.help, metric.labels, registry=self._events)
        for value in values:
            counter.labels(value)  # from 0 on: a rate sees the first increase
        return counter

    def _histogram(self, metric: Metric, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=self._events)

    def entered(self, phase: str) -> None:
        """A job has entered `phase`."""
        self._transitions.labels(phase).inc()

    def restarted(self, reason: str) -> None:
        """An attempt has ended for `reason` and another follows."""
        self._restarts.labels(reason if reason in REASONS else "Other").inc()

    def started(self, seconds: float) -> None:
        """A job runs, `seconds` after its creation or resumption."""
        self._start.observe(seconds)

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile is over; `outcome` is one of OUTCOMES."""
        assert outcome in OUTCOMES, outcome
        self._reconciles.labels(outcome).inc()
        self._reconcile.observe(seconds)

    def leads(self, leader: bool) -> None:
        """Whether this replica acts."""
        self._leader.set(leader)


def _jobs_text(jobs: Iterable[Mapping[str, Any]]) -> str:
    """The series of all jobs, from what is stored now. Finished jobs are counted, and have no series of their own but
    the failure of those that failed."""
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
        if phase in FINISHED:
            continue
        restarts = (status.get("restarts") or 0) + (status.get("disruptions") or 0)
        lines[JOB_PHASE].append(_line(JOB_PHASE, (*name, phase), 1))
        lines[JOB_RESTARTS].append(_line(JOB_RESTARTS, name, restarts))
        if (entered := _entered(metadata, status)) is not None:
            lines[JOB_PHASE_SINCE].append(_line(JOB_PHASE_SINCE, name, entered))
        done = status.get("progress") or {}
        if done.get("totalSteps"):
            ratio = min(1.0, (done.get("step") or 0) / done["totalSteps"])
            lines[JOB_PROGRESS].append(_line(JOB_PROGRESS, name, ratio))
    for namespace in sorted({namespace for namespace, _ in counts}):
        lines[JOBS] += [_line(JOBS, (namespace, phase), counts[namespace, phase]) for phase in PHASES]
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(found)}"
        for metric, found in lines.items()
    )


def _line(metric: Metric, values: Sequence[str], value: float) -> str:
    """A sample in Prometheus's text format."""
    labels = ",".join(f'{name}="{_escaped(one)}"' for name, one in zip(metric.labels, values, strict=True))
    return f"{metric.name}{{{labels}}} {float(value)!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _entered(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
    """When the job entered its phase, as Unix time: the last change of any condition, or else its creation."""
    conditions = status.get("conditions") or []
    times = [one.get("lastTransitionTime") for one in conditions if isinstance(one, Mapping)]
    newest = max((time for time in times if time), default=metadata.get("creationTimestamp"))
    try:
        return datetime.datetime.fromisoformat(str(newest)).timestamp()
    except ValueError:
        return None
