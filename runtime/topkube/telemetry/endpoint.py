"""/metrics: an endpoint for all ranks of a pod, or of a run on this machine. Every scrape reads the files of the
ranks."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from topkube import __version__, heartbeat
from topkube.errors import LaunchError
from topkube.telemetry import metrics
from topkube.telemetry.metrics import LEVELS, STEP_BUCKETS, Metric
from topkube.telemetry.phases import PHASES
from topkube.telemetry.rank_file import ABSENT, RankValues, read_ranks

_BY_RANK = {
    metrics.SAMPLES: "samples",
    metrics.DENSE_BYTES: "dense_bytes",
    metrics.LINK_RATE: "link_rate",
    metrics.RESIDUAL_NORM: "residual_norm",
    metrics.LAST_STEP: "last_step",
}
"""The metrics of each rank, and the fields of the rank's file that hold them."""
_BY_JOB = {
    metrics.STEP: "step",
    metrics.LOSS: "loss",
    metrics.GRADIENT_NORM: "gradient_norm",
    metrics.DENSITY: "density",
    metrics.SKIPPED: "skipped_steps",
    metrics.DIFFERING_RANKS: "differing_ranks",
    metrics.UNSENT: "unsent_ratio",
    metrics.WEIGHT_SPREAD: "weight_spread",
    metrics.PERIOD: "period",
    metrics.PREDICTED_EXCHANGE: "predicted_exchange",
    metrics.MEASURED_EXCHANGE: "measured_exchange",
}
"""The metrics of the whole job, and the fields of rank 0's file that hold them."""
_CACHE = {
    metrics.CACHE_FETCHES: "fetches",
    metrics.CACHE_FETCH_SECONDS: "fetch_seconds",
    metrics.CACHE_WAIT_SECONDS: "waits_seconds",
    metrics.CACHE_TAKEOVERS: "takeovers",
    metrics.CACHE_EVICTIONS: "evictions",
    metrics.CACHE_CORRUPTIONS: "corruptions",
}
"""The metrics of the data cache that are sums of one counter, and the names of the counters."""


_MOST_CONNECTIONS = 16
"""The most connections of the endpoint at a time. Each has a thread of the process that serves it."""
_SILENT_SECONDS = 10.0
"""A client that sends or takes nothing for so long loses its connection."""
_CLOSING_SECONDS = 1.0
"""The longest wait for the thread of a connection that was closed for a new one."""


class RunCollector(Collector):
    """Collects the series of all ranks that write to `directory`. The directory may change between attempts. The
    collector keeps no state between scrapes."""

    def __init__(self, directory: Callable[[], Path], job_name: str) -> None:
        self._directory, self._job = directory, job_name

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        build = InfoMetricFamily(metrics.BUILD.name.removesuffix("_info"), metrics.BUILD.help)
        build.add_metric((), {"version": __version__})
        yield build
        directory = self._directory()
        ranks = read_ranks(directory)
        if not ranks:
            return
        yield self._build_step_histogram(ranks)
        yield self._build_phase_family(ranks)
        yield self._build_sent_family(ranks)
        for metric, name in _BY_RANK.items():
            yield self._build_rank_family(metric, name, ranks)
        yield self._build_activity_family(directory, ranks)
        measured = [rank_values for rank_values in ranks if rank_values["link_rate"] != ABSENT]
        yield self._build_rank_family(metrics.BOUND_SECONDS, "bound_seconds", measured)
        if ranks[0].rank == 0:
            yield from self._collect_job_values(ranks[0])
        if any(rank_values["cache disk_state"] != ABSENT for rank_values in ranks):
            yield from self._collect_cache(ranks)

    def _collect_job_values(self, first: RankValues) -> Iterator[Family]:
        for metric, name in _BY_JOB.items():
            yield self._build_family(metric, [((self._job,), first[name])])
        yield self._build_family(metrics.ATTEMPT, [((self._job,), float(first.attempt))])
        if first["total_steps"] > 0 and first["step"] != ABSENT:
            yield self._build_family(metrics.PROGRESS, [((self._job,), min(1.0, first["step"] / first["total_steps"]))])

    def _collect_cache(self, ranks: list[RankValues]) -> Iterator[Family]:
        """Yield the families of the data cache: the sums over the ranks of this pod, and the worst state of a rank."""

        def list_values(name: str) -> list[float]:
            return [value for rank_values in ranks if (value := rank_values[f"cache {name}"]) != ABSENT]

        def add_up(name: str) -> float:
            return sum(list_values(name))

        requests = {tier: add_up(f"{tier}_requests") for tier in metrics.TIERS}
        misses = {tier: add_up(f"{tier}_misses") for tier in metrics.TIERS}
        yield self._build_family(
            metrics.CACHE_REQUESTS, [((self._job, tier), requests[tier]) for tier in metrics.TIERS]
        )
        hits = [((self._job, tier), requests[tier] - misses[tier]) for tier in metrics.TIERS]
        yield self._build_family(metrics.CACHE_HITS, hits)
        read = [((self._job, source), add_up(f"{source}_bytes")) for source in metrics.SOURCES]
        yield self._build_family(metrics.CACHE_READ_BYTES, read)
        for metric, name in _CACHE.items():
            yield self._build_family(metric, [((self._job,), add_up(name))])
        yield self._build_family(metrics.CACHE_MEMORY_USED, [((self._job,), max(list_values("memory_used_bytes")))])
        states = {tier: metrics.TIER_STATES[int(max(list_values(f"{tier}_state")))] for tier in metrics.TIERS}
        rows = [
            ((self._job, tier, state), float(state == states[tier]))
            for tier in metrics.TIERS
            for state in metrics.TIER_STATES
        ]
        yield self._build_family(metrics.CACHE_TIER_STATE, rows)

    def _build_step_histogram(self, ranks: list[RankValues]) -> Family:
        family = HistogramMetricFamily(metrics.STEP_SECONDS.name, metrics.STEP_SECONDS.help, labels=metrics.RANK)
        bounds = [*(str(bound) for bound in STEP_BUCKETS), "+Inf"]
        for rank_values in ranks:
            cumulated = list(zip(bounds, itertools.accumulate(rank_values.buckets), strict=True))
            family.add_metric((self._job, str(rank_values.rank)), cumulated, sum_value=rank_values["step_seconds"])
        return family

    def _build_phase_family(self, ranks: list[RankValues]) -> Family:
        rows = [
            ((self._job, str(rank_values.rank), phase), rank_values[f"phase {phase}"])
            for rank_values in ranks
            for phase in PHASES
        ]
        return self._build_family(metrics.PHASE_SECONDS, rows)

    def _build_sent_family(self, ranks: list[RankValues]) -> Family:
        rows = [
            ((self._job, str(rank_values.rank), level), rank_values[f"{level}_bytes"])
            for rank_values in ranks
            for level in LEVELS
        ]
        return self._build_family(metrics.SENT_BYTES, rows)

    def _build_activity_family(self, directory: Path, ranks: Iterable[RankValues]) -> Family:
        times = [(values.rank, heartbeat.read_time(directory, values.rank)) for values in ranks]
        rows = [((self._job, str(rank)), seconds) for rank, seconds in times if seconds is not None]
        return self._build_family(metrics.LAST_ACTIVITY, rows)

    def _build_rank_family(self, metric: Metric, name: str, ranks: Iterable[RankValues]) -> Family:
        return self._build_family(metric, [((self._job, str(values.rank)), values[name]) for values in ranks])

    @staticmethod
    def _build_family(metric: Metric, rows: Sequence[tuple[tuple[str, ...], float]]) -> Family:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
        for labels, value in rows:
            if value != ABSENT:
                family.add_metric(labels, value)
        return family


class _BoundedHandler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def get_environ(self) -> dict[str, Any]:
        assert isinstance(self.server, _BoundedServer)
        self.server.note_request(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class _BoundedServer(ThreadingWSGIServer):
    """A server with at most _MOST_CONNECTIONS connections. Anything that reaches the port could otherwise take all
    threads and open files of a worker, which also holds the connection to the launcher. If all are in use, a new
    connection takes the place of the oldest that has not sent its request; if there is none, the new one is closed."""

    def __init__(self, address: str, port: int) -> None:
        self._waiting: dict[socket.socket, None] = {}
        """The connections that have not sent their request, oldest first."""
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((str(found[0][4][0]), port), _BoundedHandler)

    def server_bind(self) -> None:
        """Bind the socket without the name of its address, for which http.server asks DNS, for 10 s if none answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            if len(self._open) >= _MOST_CONNECTIONS and self._waiting:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: oldest not in self._open, _CLOSING_SECONDS)
            if len(self._open) >= _MOST_CONNECTIONS:
                return False
            self._open.add(request)
            self._waiting[request] = None
            return True

    def note_request(self, connection: socket.socket) -> None:
        """Note that a connection has sent its request."""
        with self._changed:
            self._waiting.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._waiting.pop(request, None)
            self._open.discard(request)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about clients that send nothing, or that have gone."""


class MetricsEndpoint:
    """Serves /metrics for the ranks that write to `directory()`, which is called at every scrape. Use it in a `with`
    statement, or call `close`. Raises LaunchError if the port cannot be used.
    """

    def __init__(self, directory: Callable[[], Path], job_name: str, port: int, address: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(directory, job_name))
        try:
            self._server = _BoundedServer(address, port)
        except (OSError, OverflowError) as error:
            raise LaunchError(
                f"/metrics cannot be served on {address}:{port}: {getattr(error, 'strerror', None) or error}",
                exit_code=2,
                cause="another process uses the port",
                next_step="pass another port, or 0 for any free port",
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
