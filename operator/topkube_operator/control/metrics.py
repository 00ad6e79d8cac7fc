"""The operator's metrics: what the operator does, counted by event, and the state of its jobs (`job_series`).

Series about jobs carry the job's own `namespace`. Series about the operator itself carry the namespace and the
`release` of the operator, so that the series of two releases in one cluster stay apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
from topkube.job.fields.failure_policy import AVOIDED_NODE_NEEDED, PENDING_TIMEOUT
from topkube.telemetry.metrics import Metric
from topkube_operator.control import job_series
from topkube_operator.control.job_series import PHASES, render_jobs
from topkube_operator.http.webhook import REVIEW_OUTCOMES
from topkube_operator.watch.work_queue import WorkQueue

OUTCOMES = ("changed", "unchanged", "error")
"""Outcomes of a reconcile: it wrote something, there was nothing to do, it raised an error."""
REASONS = (
    *("Error", "OOMKilled", "HardwareFault", "Evicted", "Preempted", "NodeLost", "Deleted", "Stalled"),
    *("RendezvousTimeout", PENDING_TIMEOUT, AVOIDED_NODE_NEEDED, "Other"),
)
"""Reasons of a restart: why the attempt before it ended. "Other" stands for all reasons that are not listed, so that
the label stays bounded."""
OWN = ("namespace", "release")
"""The labels of series about the operator itself."""
UNREACHABLE = "unreachable"
"""The label `code` of a call that the API server did not answer."""

_START_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
_FORGET_SECONDS = 3600.0
"""The counters of a namespace end after this time without a job. Otherwise, in a cluster with many short-lived
namespaces, the counters would fill the memory."""

TRANSITIONS = Metric(
    "topkube_job_transitions_total",
    "counter",
    f"Jobs that entered a phase: {', '.join(PHASES)}.",
    ("namespace", "phase"),
)
RESTARTS = Metric(
    "topkube_job_restarts_total", "counter", f"Restarts by reason: {', '.join(REASONS)}.", ("namespace", "reason")
)
START_SECONDS = Metric(
    "topkube_job_start_seconds",
    "histogram",
    "Seconds from a job's start to phase Running, for first attempts.",
    ("namespace",),
)
BUILD = Metric("topkube_operator_build_info", "info", "Always 1. `version` is the operator's.", (*OWN, "version"))
LEADER = Metric("topkube_leader", "gauge", "1 on the replica that acts, 0 on those that stand by.", OWN)
RECONCILES = Metric(
    "topkube_reconciles_total", "counter", f"Reconciles by outcome: {', '.join(OUTCOMES)}.", (*OWN, "outcome")
)
RECONCILE_SECONDS = Metric("topkube_reconcile_seconds", "histogram", "Seconds of one reconcile, calls included.", OWN)
QUEUE_WAITING = Metric("topkube_work_queue_waiting", "gauge", "Jobs that are due and wait for a thread.", OWN)
QUEUE_WORKING = Metric("topkube_work_queue_working", "gauge", "Jobs that a thread reconciles now.", OWN)
QUEUE_OLDEST = Metric(
    "topkube_work_queue_oldest_seconds",
    "gauge",
    "Seconds for which the oldest job has been waiting or in work; 0 if there is none.",
    OWN,
)
QUEUE_SECONDS = Metric(
    "topkube_work_queue_seconds", "histogram", "Seconds from the time when a job is due to its reconcile.", OWN
)
API_REQUESTS = Metric(
    "topkube_api_requests_total",
    "counter",
    "Calls to the API server by HTTP method and status code. Calls without an answer have the code unreachable.",
    (*OWN, "method", "code"),
)
API_SECONDS = Metric(
    "topkube_api_request_seconds", "histogram", "Seconds of a call to the API server, without watches.", OWN
)
JOBS_CREATED = Metric(
    "topkube_jobs_created_total", "counter", "New TrainingJobs that this replica has seen since its start.", OWN
)
REVIEWS = Metric(
    "topkube_admission_reviews_total",
    "counter",
    "Reviews of the validating webhook by outcome: allowed, denied, refused (the request is no review), error (the "
    "webhook could not answer). Absent without the webhook.",
    (*OWN, "outcome"),
)
REVIEW_SECONDS = Metric("topkube_admission_review_seconds", "histogram", "Seconds of one review.", OWN)
PUBLISHED = Metric(
    "topkube_admission_published",
    "gauge",
    "1 if the webhook's caBundle is in its ValidatingWebhookConfiguration, 0 if it could not be written. Absent with "
    "cert-manager.",
    OWN,
)
EXPIRY = Metric(
    "topkube_admission_certificate_expiry_timestamp_seconds",
    "gauge",
    "When the certificate expires that the webhook serves.",
    OWN,
)

METRICS = (
    *job_series.METRICS,
    *(TRANSITIONS, RESTARTS, START_SECONDS, JOBS_CREATED, LEADER, RECONCILES, RECONCILE_SECONDS),
    *(QUEUE_WAITING, QUEUE_WORKING, QUEUE_OLDEST, QUEUE_SECONDS, API_REQUESTS, API_SECONDS),
    *(REVIEWS, REVIEW_SECONDS, PUBLISHED, EXPIRY, BUILD),
)


class OperatorMetrics:
    """All metrics of one operator of `release` in `namespace`. `jobs` returns the TrainingJobs that this replica acts
    for, as plain data, from the watch cache. It is called at every scrape."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
        *,
        namespace: str = "topkube-system",
        release: str = "topkube",
    ) -> None:
        disable_created_metrics()  # they would add an unused series to each counter
        self._jobs, self._own = jobs, (namespace, release)
        self._queue: WorkQueue | None = None
        self._namespaces: dict[str, float] = {}
        """When each namespace was last seen to have a job."""
        self._events = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._events)  # processor time and memory
        self._add_gauge(BUILD).labels(*self._own, __version__).set(1)
        self._transitions, self._restarts = self._add_counter(TRANSITIONS), self._add_counter(RESTARTS)
        self._start_seconds = self._add_histogram(START_SECONDS, _START_BUCKETS)
        self._reconciles = self._add_counter(RECONCILES, OUTCOMES)
        self._reconcile_seconds = self._add_histogram(RECONCILE_SECONDS, _CALL_BUCKETS).labels(*self._own)
        self._leader = self._add_gauge(LEADER).labels(*self._own)
        self._waiting, self._working, self._oldest = (
            self._add_gauge(metric).labels(*self._own) for metric in (QUEUE_WAITING, QUEUE_WORKING, QUEUE_OLDEST)
        )
        self._queue_seconds = self._add_histogram(QUEUE_SECONDS, _WAIT_BUCKETS).labels(*self._own)
        self._calls = self._add_counter(API_REQUESTS)
        self._call_seconds = self._add_histogram(API_SECONDS, _CALL_BUCKETS).labels(*self._own)
        self._created = self._add_counter(JOBS_CREATED).labels(*self._own)
        self._reviews = self._add_counter(REVIEWS)
        self._review_seconds = self._add_histogram(REVIEW_SECONDS, _CALL_BUCKETS)
        self._published, self._expiry = self._add_gauge(PUBLISHED), self._add_gauge(EXPIRY)

    def render(self) -> bytes:
        """Return the answer of /metrics, in Prometheus's text format."""
        jobs = list(self._jobs())
        self._update_namespaces({str((job.get("metadata") or {}).get("namespace", "")) for job in jobs})
        if self._queue is not None:
            waiting, working = self._queue.count_waiting(), self._queue.count_working()
            self._waiting.set(waiting)
            self._working.set(working)
            self._oldest.set(self._queue.measure_oldest_wait())
        return generate_latest(self._events) + render_jobs(jobs).encode()

    def _add_gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self._events)

    def _add_counter(self, metric: Metric, values: tuple[str, ...] = ()) -> Counter:
        """Return a counter. The series of `values` start at 0, so that a rate includes the first increase."""
        counter = Counter(metric.name, metric.help, metric.labels, registry=self._events)
        for value in values:
            counter.labels(*self._own, value)
        return counter

    def _add_histogram(self, metric: Metric, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=self._events)

    def _update_namespaces(self, present: set[str]) -> None:
        """Start the counters of new namespaces at 0. End the counters of namespaces that have had no job for long."""
        now = time.monotonic()
        for namespace in present - self._namespaces.keys():
            self._add_namespace(namespace)
        self._namespaces.update(dict.fromkeys(present, now))
        for namespace in [name for name, seen in self._namespaces.items() if now - seen > _FORGET_SECONDS]:
            del self._namespaces[namespace]
            for phase in PHASES:
                self._transitions.remove(namespace, phase)
            for reason in REASONS:
                self._restarts.remove(namespace, reason)
            self._start_seconds.remove(namespace)

    def _add_namespace(self, namespace: str) -> None:
        for phase in PHASES:
            self._transitions.labels(namespace, phase)
        for reason in REASONS:
            self._restarts.labels(namespace, reason)
        self._start_seconds.labels(namespace)
        self._namespaces[namespace] = time.monotonic()

    def watch_queue(self, queue: WorkQueue) -> None:
        """Serve the state of the work queue from now on."""
        self._queue = queue

    def count_transition(self, namespace: str, phase: str) -> None:
        """Count a job that has entered `phase`."""
        self._transitions.labels(namespace, phase).inc()

    def count_restart(self, namespace: str, reason: str) -> None:
        """Count an attempt that ended for `reason` and is followed by another."""
        self._restarts.labels(namespace, reason if reason in REASONS else "Other").inc()

    def observe_start(self, namespace: str, seconds: float) -> None:
        """Observe a job that runs `seconds` after its creation or resumption."""
        self._start_seconds.labels(namespace).observe(seconds)

    def count_created(self) -> None:
        """Count a job that has been created since this replica started."""
        self._created.inc()

    def observe_reconcile(self, seconds: float, outcome: str) -> None:
        """Observe a reconcile that took `seconds`. `outcome` is one of OUTCOMES."""
        assert outcome in OUTCOMES, outcome
        self._reconciles.labels(*self._own, outcome).inc()
        self._reconcile_seconds.observe(seconds)

    def observe_queued(self, seconds: float) -> None:
        """Observe a job that waited `seconds` in the work queue."""
        self._queue_seconds.observe(seconds)

    def observe_call(self, method: str, status: int, seconds: float | None) -> None:
        """Observe a call to the API server. `status` is 0 without an answer; `seconds` is None for a watch."""
        self._calls.labels(*self._own, method, str(status) if status else UNREACHABLE).inc()
        if seconds is not None:
            self._call_seconds.observe(seconds)

    def set_serving(self, expires_at: float, published: bool | None) -> None:
        """Set the state of the webhook. `published` is None if the operator writes no caBundle."""
        for outcome in REVIEW_OUTCOMES:
            self._reviews.labels(*self._own, outcome)
        self._expiry.labels(*self._own).set(expires_at)
        if published is not None:
            self._published.labels(*self._own).set(published)

    def observe_review(self, outcome: str, seconds: float) -> None:
        """Observe an answer of the webhook. `outcome` is one of REVIEW_OUTCOMES."""
        assert outcome in REVIEW_OUTCOMES, outcome
        self._reviews.labels(*self._own, outcome).inc()
        self._review_seconds.labels(*self._own).observe(seconds)

    def set_leader(self, leader: bool) -> None:
        """Set if this replica acts."""
        self._leader.set(leader)
