"""What metrics cost: `python benchmarks/metrics.py` writes benchmarks/results/metrics.json.

Three measurements, each the median of many repetitions:
- one step's bookkeeping on a rank: counting, and the write of the rank's file, data cache included;
- one scrape of a worker with 8 ranks over HTTP, and its number of series;
- one scrape of the operator with 1,000 running jobs.
And one bound: norms are sampled so seldom that their share of the time stays below a constant of the code.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client import start_http_server

from topkube.data.watch import statistics as cache_statistics
from topkube.telemetry.endpoint import MetricsEndpoint
from topkube.telemetry.phases import PHASES, Snapshot
from topkube.telemetry.rank_file import CACHE, RankMetrics
from topkube.training.norms import MOST_OF_TIME
from topkube_operator.metrics import OperatorMetrics

RESULT = Path(__file__).parent / "results/metrics.json"
RANKS, JOBS = 8, 1000
GAUGES = {"step": 1, "total_steps": 100, "density": 0.01, "skipped_steps": 0, "last_step": 1e9, "gradient_norm": 1}
OWN = Snapshot(dict.fromkeys(PHASES, 0.001), intra_bytes=10, inter_bytes=10, dense_bytes=10)


def median_seconds(measured: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        measured()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        body: bytes = answer.read()
    return body


def series(body: bytes) -> int:
    return sum(not line.startswith(b"#") for line in body.splitlines())


def measure() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = [RankMetrics(directory, rank) for rank in range(RANKS)]

        def step() -> None:
            ranks[0].cache(cache_statistics())  # training looks once a second; here every step
            ranks[0].step(0.1, OWN, 8, GAUGES)

        step_seconds = median_seconds(step, 5000)
        for rank in ranks:
            rank.cache(dict.fromkeys(CACHE, 0.0))
            rank.step(0.1, OWN, 8, {**GAUGES, "loss": 1, "residual_norm": 1, "link_rate": 1})
        with MetricsEndpoint(lambda: directory, "job", 0, "127.0.0.1") as endpoint:
            worker_series = series(scraped(endpoint.port))
            worker_seconds = median_seconds(lambda: scraped(endpoint.port), 50)
    status = {"phase": "Running", "restarts": 1, "progress": {"step": 1, "totalSteps": 2}}
    jobs = [
        {
            "metadata": {"name": f"job-{n}", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "status": status,
        }
        for n in range(JOBS)
    ]
    server, thread = start_http_server(0, "127.0.0.1", OperatorMetrics(lambda: jobs).registry)
    operator_series = series(scraped(server.server_port))
    operator_seconds = median_seconds(lambda: scraped(server.server_port), 20)
    server.shutdown()
    server.server_close()
    thread.join()
    return {
        "command": "python benchmarks/metrics.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "step_bookkeeping_seconds": step_seconds,
        "share_of_a_10_ms_step": step_seconds / 0.01,
        "norms_at_most_share_of_time": MOST_OF_TIME,
        "worker": {"ranks": RANKS, "series": worker_series, "scrape_seconds": worker_seconds},
        "operator": {"jobs": JOBS, "series": operator_series, "scrape_seconds": operator_seconds},
    }


if __name__ == "__main__":
    found = measure()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
