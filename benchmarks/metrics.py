"""Measure the cost of metrics: `python benchmarks/metrics.py` writes benchmarks/results/metrics.json.

There are three measurements, each the median of many repetitions:
- the bookkeeping of a step on a rank: counting, and the write of the rank's file, including the data cache;
- a scrape of a worker with 8 ranks over HTTP, and its number of series;
- a scrape of the operator with 1,000 running jobs.
There is one bound: norms are sampled so rarely that their share of the time stays below a constant of the code.
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

from topkube.data.base.open_datasets import sum_statistics
from topkube.telemetry.endpoint import MetricsEndpoint
from topkube.telemetry.phases import PHASES, Snapshot
from topkube.telemetry.rank_file import CACHE, RankMetrics
from topkube.training.reporting.norms import MOST_OF_TIME
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.http.probes import Probes

RESULT = Path(__file__).parent / "results/metrics.json"
RANKS, JOBS = 8, 1000
STEP_SECONDS = 0.01  # a short step: most steps are longer, and then the share of metrics is smaller
GAUGES = {"step": 1, "total_steps": 100, "density": 0.01, "skipped_steps": 0, "last_step": 1e9, "gradient_norm": 1}
OWN = Snapshot(dict.fromkeys(PHASES, 0.001), intra_bytes=10, inter_bytes=10, dense_bytes=10)


def measure_median(function: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        body: bytes = answer.read()
    return body


def count_series(body: bytes) -> int:
    return sum(not line.startswith(b"#") for line in body.splitlines())


def measure() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = [RankMetrics(directory, rank) for rank in range(RANKS)]

        def step() -> None:
            ranks[0].store_cache_counters(sum_statistics())  # in training once per second, here at every step
            ranks[0].count_step(0.1, OWN, 8, GAUGES)

        step_seconds = measure_median(step, 5000)
        for rank in ranks:
            rank.store_cache_counters(dict.fromkeys(CACHE, 0.0))
            rank.count_step(0.1, OWN, 8, {**GAUGES, "loss": 1, "residual_norm": 1, "link_rate": 1})
        with MetricsEndpoint(lambda: directory, "job", 0, "127.0.0.1") as endpoint:
            worker_series = count_series(scrape(endpoint.port))
            worker_seconds = measure_median(lambda: scrape(endpoint.port), 50)
    status = {"phase": "Running", "restarts": 1, "progress": {"step": 1, "totalSteps": 2}}
    jobs = [
        {
            "metadata": {"name": f"job-{n}", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "status": status,
        }
        for n in range(JOBS)
    ]
    probes = Probes(0, OperatorMetrics(lambda: jobs).render, str, str, "127.0.0.1")
    probes.start()
    operator_series = count_series(scrape(probes.port))
    operator_seconds = measure_median(lambda: scrape(probes.port), 50)
    probes.stop()
    share = step_seconds / STEP_SECONDS
    return {
        "command": "python benchmarks/metrics.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "step_bookkeeping_seconds": step_seconds,
        "step_seconds": STEP_SECONDS,
        "share_of_a_step": share,
        "norms_at_most_share_of_time": MOST_OF_TIME,
        "together_at_most": share + MOST_OF_TIME,
        "worker": {"ranks": RANKS, "series": worker_series, "scrape_seconds": worker_seconds},
        "operator": {"jobs": JOBS, "series": operator_series, "scrape_seconds": operator_seconds},
        "limits": {"share": 0.005, "worker_scrape_seconds": 0.05, "worker_series": 500, "operator_scrape_seconds": 0.1},
    }


if __name__ == "__main__":
    results = measure()
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
