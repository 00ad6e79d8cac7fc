"""A job's dataset in its pods: plain files for scripts without TopKube, samples for `CachedDataset`, and the counters
that the launcher reports."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest
from pods import SimulatedJob, read_records

PLAIN = """
import json, os, pathlib, time
view = pathlib.Path(os.environ["TOPKUBE_DATASET_VIEW"])
while not (view / ".topkube-complete").exists():
    time.sleep(0.05)
files = [path for path in view.rglob("*.tar")]
print(json.dumps({"files": len(files), "bytes": sum(len(path.read_bytes()) for path in files)}))
"""
SAMPLES = """
import json, topkube
from topkube.data import CachedDataset
topkube.init()
dataset = CachedDataset("/data")
print(json.dumps({"samples": sum(len(sample["bin"]) for sample in map(dataset.__getitem__, range(len(dataset))))}))
"""
SHARDS, SAMPLES_EACH, SAMPLE_BYTES = 6, 5, 20_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    sample = folder / "sample"
    sample.write_bytes(bytes(range(250)) * (SAMPLE_BYTES // 250))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for number in range(SAMPLES_EACH):
                tar.add(sample, f"{shard}-{number}.bin")
    sample.unlink()
    return folder


def run_job(folder: Path, source: Path, script: str, workers: int) -> tuple[SimulatedJob, str]:
    """Run a job of one rank per worker to its end. Each worker is a separate node, whose cache outlives the job."""
    (folder / "run").mkdir(exist_ok=True)
    directory = folder / "run" / str(len(list((folder / "run").iterdir())))
    directory.mkdir()
    dataset = {"TOPKUBE_DATASET_URI": source.as_uri(), "TOPKUBE_DATASET_MOUNT": "/data"}
    with SimulatedJob(directory, [sys.executable, "-c", script], workers=workers, slots=1) as job:
        launcher = job.start_launcher()
        for index in range(workers):
            node = folder / f"node{index}"
            node_environment = {
                "TOPKUBE_CACHE_DIRECTORY": str(node / "cache"),
                "TOPKUBE_DATASET_VIEW": str(node / "view"),
                "TOPKUBE_CACHE_MEMORY_DIRECTORY": str(directory / f"shm{index}"),
                "TOPKUBE_NODE_NAME": f"node{index}",
            }
            job.start_worker(index, **dataset, **node_environment)
        assert launcher.wait() == 0, job.read_all_output()
        output = "".join(worker.output for worker in job.workers.values() if worker.wait() == 0)
    return job, output


def count_bytes(source: Path) -> int:
    return sum(path.stat().st_size for path in source.iterdir())


def test_a_plain_script_reads_files(tmp_path: Path, source: Path) -> None:
    job, output = run_job(tmp_path, source, PLAIN, workers=1)
    assert list(read_records(output)) == [{"files": SHARDS, "bytes": count_bytes(source)}]
    assert job.launcher is not None
    cache = job.launcher.ending.cache
    assert cache is not None
    assert [(node.name, node.cached_bytes) for node in cache.nodes] == [("node0", count_bytes(source))]
    assert cache.remote_bytes == count_bytes(source), "each byte came once"
    assert cache.hit_ratio is None, "nobody asked for samples"


def test_the_second_job_on_the_same_nodes_reads_nothing_from_the_remote(tmp_path: Path, source: Path) -> None:
    first, output = run_job(tmp_path, source, SAMPLES, workers=2)
    expected = [{"samples": SHARDS * SAMPLES_EACH * SAMPLE_BYTES}] * 2
    assert list(read_records(output)) == expected
    second, output = run_job(tmp_path, source, SAMPLES, workers=2)
    assert list(read_records(output)) == expected
    for job in (first, second):
        assert job.launcher is not None
        cache = job.launcher.ending.cache
        assert cache is not None
        assert [(node.name, node.cached_bytes) for node in cache.nodes] == [
            ("node0", count_bytes(source)),
            ("node1", count_bytes(source)),
        ]
        if job is first:
            assert cache.remote_bytes == count_bytes(source), "once per job, not once per node"
        else:
            assert (cache.hit_ratio, cache.remote_bytes) == ("1.0000", 0)
