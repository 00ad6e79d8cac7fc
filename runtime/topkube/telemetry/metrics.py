"""The metrics of the runtime: name, kind, labels and help text. The endpoint, the reference page and the tests of
dashboards and alerts use these definitions.

Units are seconds and bytes; ratios are from 0 to 1. `training_job` is the name of the TrainingJob. Prometheus adds the
namespace and the pod if it finds its targets through Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topkube.telemetry.phases import PHASES

Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """A metric family. `name` is the name in queries, with `_total` or `_info`; the name of a histogram is without
    `_bucket`, `_sum` and `_count`. A `job_wide` metric is the same on all ranks; only rank 0 reports it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    job_wide: bool = False

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores the metric."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


RANK = ("training_job", "rank")
JOB = ("training_job",)
LEVELS = ("intra", "inter")
"""Inside a node, and between nodes."""
STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the step histogram, seconds."""

STEP_SECONDS = Metric("topkube_step_seconds", "histogram", "Seconds from one finished step to the next.", RANK)
PHASE_SECONDS = Metric(
    "topkube_step_phase_seconds_total",
    "counter",
    f"Seconds of steps by phase: {', '.join(PHASES)}. select, intra and inter are the exchange, which overlaps with "
    "backward, or with update if nodes exchange weights.",
    (*RANK, "phase"),
)
SAMPLES = Metric("topkube_samples_total", "counter", "Samples that this rank has trained on.", RANK)
SENT_BYTES = Metric(
    "topkube_sent_bytes_total",
    "counter",
    "Gradient bytes that this rank has sent, by level: intra (inside the node), inter (between nodes).",
    (*RANK, "level"),
)
DENSE_BYTES = Metric(
    "topkube_dense_equivalent_bytes_total",
    "counter",
    "Bytes that a dense ring all-reduce of the same gradients would have sent from this rank.",
    RANK,
)
BOUND_SECONDS = Metric(
    "topkube_exchange_bound_seconds_total",
    "counter",
    "Shortest time in which the bytes sent between nodes can cross the link, at the rate measured at the start. The "
    "ratio to phase inter shows how much of the link's rate the exchange reaches. Absent if the link was not measured.",
    RANK,
)
LINK_RATE = Metric(
    "topkube_link_bytes_per_second",
    "gauge",
    "Bytes per second from this rank to another node while all ranks of its node send, measured at the start. "
    "Absent if there is one node.",
    RANK,
)
RESIDUAL_NORM = Metric(
    "topkube_residual_norm",
    "gauge",
    "Euclidean norm of the residuals of error feedback on this rank, in units of the mean gradient; sampled. Absent "
    "if there are no residuals.",
    RANK,
)
UNSENT = Metric(
    "topkube_unsent_ratio",
    "gauge",
    "Norm of what nodes keep of the changes of their weights, divided by the norm of what they send; sampled. Absent "
    "for algorithms without weights of each node.",
    JOB,
    job_wide=True,
)
WEIGHT_SPREAD = Metric(
    "topkube_weight_spread_ratio",
    "gauge",
    "Distance of the nodes' own weights from the weights that all nodes agree on, after an exchange, "
    "divided by the norm of those; sampled. Absent for algorithms without weights of each node.",
    JOB,
    job_wide=True,
)
PERIOD = Metric(
    "topkube_exchange_period_steps",
    "gauge",
    "Steps from one exchange of weights to the next. The guard halves it if nodes keep too much. Absent for algorithms "
    "without weights of each node.",
    JOB,
    job_wide=True,
)
PREDICTED_EXCHANGE = Metric(
    "topkube_exchange_predicted_seconds",
    "gauge",
    "Predicted seconds of one step's exchange with the algorithm that auto or dense chose. Absent if the job names its "
    "algorithm, and with one node.",
    JOB,
    job_wide=True,
)
MEASURED_EXCHANGE = Metric(
    "topkube_exchange_measured_seconds",
    "gauge",
    "Seconds of one step's exchange in the first steps, with which the prediction was compared.",
    JOB,
    job_wide=True,
)
LAST_STEP = Metric(
    "topkube_last_step_timestamp_seconds", "gauge", "Time at which this rank finished its last step.", RANK
)
LAST_ACTIVITY = Metric(
    "topkube_last_activity_timestamp_seconds",
    "gauge",
    "Time at which this rank last showed a sign of life: it entered a collective of TopKube. With Lightning or the "
    "Trainer: rank 0 finished a batch of an evaluation. Absent before the first sign.",
    RANK,
)
STEP = Metric("topkube_job_step", "gauge", "Finished steps of the job.", JOB, job_wide=True)
PROGRESS = Metric(
    "topkube_job_progress_ratio", "gauge", "Share of the job's steps that are finished, 0 to 1.", JOB, job_wide=True
)
LOSS = Metric("topkube_loss", "gauge", "Mean loss over all samples of the last step.", JOB, job_wide=True)
GRADIENT_NORM = Metric(
    "topkube_gradient_norm",
    "gauge",
    "Euclidean norm of the aggregated gradient, before clipping; sampled.",
    JOB,
    job_wide=True,
)
DENSITY = Metric(
    "topkube_density_ratio",
    "gauge",
    "Share of the gradient's entries that are sent between nodes, 0 to 1. It falls during warm-up; dense is 1.",
    JOB,
    job_wide=True,
)
SKIPPED = Metric(
    "topkube_skipped_steps_total",
    "counter",
    "Steps that all ranks skipped because a gradient was NaN or infinite.",
    JOB,
    job_wide=True,
)
DIFFERING_RANKS = Metric(
    "topkube_differing_ranks",
    "gauge",
    "Ranks whose weights differed from those of most ranks at the last comparison. Above 0 only with "
    "TOPKUBE_CHECK_WEIGHTS=warn; by default the job fails.",
    JOB,
    job_wide=True,
)
ATTEMPT = Metric("topkube_job_attempt", "gauge", "Number of the current attempt, from 1.", JOB, job_wide=True)
BUILD = Metric(
    "topkube_runtime_build_info",
    "info",
    "Always 1. `version` is the version of the package in the pod.",
    ("version",),
)

TIERS = ("memory", "disk")
SOURCES = ("memory", "disk", "peer", "remote")
"""The sources of bytes: the node's memory and disk tiers, other nodes of the job (peer), and the remote store."""
TIER_STATES = ("open", "frozen", "dropped")
TIER = ("training_job", "tier")
CACHE_REQUESTS = Metric(
    "topkube_cache_requests_total", "counter", "Samples requested from a tier of the data cache: memory, disk.", TIER
)
CACHE_HITS = Metric("topkube_cache_hits_total", "counter", "Requested samples that the tier had: memory, disk.", TIER)
CACHE_READ_BYTES = Metric(
    "topkube_cache_read_bytes_total",
    "counter",
    "Bytes of the dataset by source: memory, disk (this node), peer (other nodes), remote (the store).",
    ("training_job", "source"),
)
CACHE_FETCHES = Metric("topkube_cache_fetches_total", "counter", "Shards fetched from the remote store.", JOB)
CACHE_FETCH_SECONDS = Metric(
    "topkube_cache_fetch_seconds_total",
    "counter",
    "Seconds of fetching shards, summed over processes and threads.",
    JOB,
)
CACHE_WAIT_SECONDS = Metric(
    "topkube_cache_wait_seconds_total", "counter", "Seconds of waiting for shards that another process fetches.", JOB
)
CACHE_TAKEOVERS = Metric(
    "topkube_cache_takeovers_total",
    "counter",
    "Shards fetched because the process that had begun made no progress.",
    JOB,
)
CACHE_EVICTIONS = Metric("topkube_cache_evictions_total", "counter", "Datasets removed to make room.", JOB)
CACHE_CORRUPTIONS = Metric(
    "topkube_cache_corruptions_total",
    "counter",
    "Shards with a wrong checksum, which were quarantined and fetched again.",
    JOB,
)
CACHE_MEMORY_USED = Metric("topkube_cache_memory_used_bytes", "gauge", "Bytes in this node's memory tier.", JOB)
CACHE_TIER_STATE = Metric(
    "topkube_cache_tier_state",
    "gauge",
    "1 for the current state of a tier (memory, disk): open (takes shards), frozen (takes no more shards), dropped (no "
    "longer used).",
    (*TIER, "state"),
)
CACHE = (
    *(CACHE_REQUESTS, CACHE_HITS, CACHE_READ_BYTES, CACHE_FETCHES, CACHE_FETCH_SECONDS, CACHE_WAIT_SECONDS),
    *(CACHE_TAKEOVERS, CACHE_EVICTIONS, CACHE_CORRUPTIONS, CACHE_MEMORY_USED, CACHE_TIER_STATE),
)
"""Sums over the ranks of the pod. Absent if a job uses no CachedDataset."""

METRICS = (
    *(STEP_SECONDS, PHASE_SECONDS, SAMPLES, LAST_STEP, LAST_ACTIVITY, STEP, PROGRESS, ATTEMPT, LOSS),
    *(GRADIENT_NORM, RESIDUAL_NORM, UNSENT, WEIGHT_SPREAD, PERIOD, PREDICTED_EXCHANGE, MEASURED_EXCHANGE),
    *(SKIPPED, DIFFERING_RANKS, DENSITY, SENT_BYTES, DENSE_BYTES, BOUND_SECONDS, LINK_RATE, BUILD),
)
