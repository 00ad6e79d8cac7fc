"""One /metrics per worker pod: all its ranks, through a restart, until the pod ends."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from pods import SimulatedJob, wait_until
from prometheus_client.parser import text_string_to_metric_families

from topkube.launch.contract import METRICS_PORT

TRAIN = """
import sys, time
from pathlib import Path
import topkube
from topkube.settings import Settings
from topkube.telemetry.phases import Snapshot
from topkube.telemetry.rank_file import RankMetrics
topkube.init()
settings = Settings.from_environment()
metrics = RankMetrics(settings.run_path, topkube.rank(), settings.attempt)
step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    gauges = {"step": step, "total_steps": 1000, "last_step": time.time()}
    metrics.count_step(0.1, Snapshot({"forward": 0.1}), 8, gauges)
    time.sleep(0.02)
"""


def read_series(address: str) -> dict[tuple[str, str], float]:
    """Return the values that a worker serves by (name, rank). The dictionary is empty if the worker does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError:
        return {}
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value for family in families for sample in family.samples
    }


def serves_attempt(address: str, attempt: int) -> bool:
    return read_series(address).get(("topkube_job_attempt", "")) == attempt


def test_each_worker_serves_its_ranks_of_the_attempt_that_runs(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with SimulatedJob(tmp_path, ["python", "-c", TRAIN, str(end)], workers=2, slots=2, lost_seconds=10.0) as job:
        job.start()
        first, second = job.choose_address(0), job.choose_address(1)
        wait_until(lambda: serves_attempt(first, 1), what=job.read_all_output())
        for address, ranks in ((first, {"0", "1"}), (second, {"2", "3"})):  # ranks do not begin at the same time
            wait_until(
                lambda address=address, ranks=ranks: {rank for _, rank in read_series(address) if rank} == ranks,
                what=f"ranks {ranks}",
            )
        assert ("topkube_job_step", "") not in read_series(second)
        count = len(read_series(first))
        job.workers[1].kill()
        assert job.launcher is not None
        assert job.launcher.wait() != 0
        job.attempts_made[1] = 2  # the launcher expects the new pod
        job.start_launcher()
        job.start_worker(1)
        wait_until(lambda: serves_attempt(first, 2), what="worker 0 in attempt 2")
        wait_until(lambda: len(read_series(first)) == count, what="as many series as before")
        end.touch()
        assert job.launcher.wait() == 0, job.read_all_output()
        for worker in job.workers.values():
            assert worker.wait() == 0
        assert read_series(first) == {}
