"""Lightning, the Trainer and accelerate with TopKube on two nodes x two ranks, compared with each library alone."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from local_runs import finish_run, start_run, write_job

from topkube import heartbeat
from topkube.telemetry.rank_file import ABSENT, RankValues, read_ranks

pytestmark = pytest.mark.timeout(900)  # four processes import large libraries, on a busy machine
FOLDER = Path(__file__).parent
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the socket of a process that forks ranks. This process has imported the modules that all ranks need, for
    an import takes ten times as long as the training. Each rank imports Lightning itself, because Lightning reads the
    rank when it is imported."""
    modules = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "topkube.training")
    libraries = [name for name in ("torchmetrics", "transformers", "accelerate") if importlib.util.find_spec(name)]
    trainer = ["transformers.trainer"] if "accelerate" in libraries and "transformers" in libraries else []
    with worlds.start_forks("mpich", tmp_path_factory.mktemp("forks"), (*modules, *libraries, *trainer)) as socket:
        yield socket


def run_script(name: str, folder: Path, forks: Path) -> Ranks:
    """Run a script on all ranks. Return the results of each rank."""
    command = ["python", *worlds.build_fork_arguments(forks, FOLDER / name), "."]
    job = write_job(folder, command, aggregation={"algorithm": "hitopk", "density": 0.1})
    ended = finish_run(start_run(job, folder, "--no-plot", environment=dict(os.environ)), seconds=840)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(4)]


def read_step_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "progress.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory: pytest.TempPathFactory, forks: Path) -> tuple[Ranks, Path]:
    pytest.importorskip("lightning", reason="needs topkube[lightning]")
    folder = tmp_path_factory.mktemp("lightning")
    return run_script("lightning_script.py", folder, forks), folder


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory: pytest.TempPathFactory, forks: Path) -> tuple[Ranks, Path]:
    pytest.importorskip("transformers", reason="needs topkube[transformers]")
    folder = tmp_path_factory.mktemp("trainer")
    return run_script("trainer_script.py", folder, forks), folder


def read_counted_steps(folder: Path, records: list[dict[str, Any]]) -> list[RankValues]:
    """Return the metrics of all ranks, which contain the steps of the last training with reports: those of
    `records`."""
    ranks = read_ranks(folder / "run")
    assert [values.rank for values in ranks] == [0, 1, 2, 3]
    for values in ranks:
        assert values["steps"] == sum(values.buckets) == len(records)
        assert (values["step"], values["total_steps"]) == (records[-1]["step"], records[-1]["total_steps"])
        assert values["samples"] == sum(record["samples"] for record in records) / 4
        assert values["last_step"] == pytest.approx(records[-1]["time"], abs=60)
        assert values["density"] == records[-1]["density"]
        assert values["loss"] == pytest.approx(records[-1]["loss"])
        assert values["link_rate"] == ABSENT
    for phase in ("forward", "select", "intra", "inter"):
        assert ranks[0][f"phase {phase}"] == pytest.approx(sum(record["seconds"].get(phase, 0.0) for record in records))
    for name in ("inter_bytes", "intra_bytes", "dense_bytes"):
        assert sum(values[name] for values in ranks) == sum(record[name] for record in records)
    return ranks


def count_signs_of_life(folder: Path) -> list[int]:
    """Return what the launcher reads: the number of heartbeats of each rank."""
    return [heartbeat.read(folder / "run", rank) for rank in range(4)]


def check_equal_weights(ranks: Ranks, read: Callable[[Any], torch.Tensor]) -> None:
    for results in ranks[1:]:
        assert torch.equal(read(results), read(ranks[0]))


def check_against_library(ranks: Ranks) -> None:
    """Compare training with TopKube and with the library alone. The dense exchange adds in another order, so bits
    differ. A missing or wrong gradient would cause a far larger difference."""
    for results in ranks:
        library, dense, sparse = results["library"], results["dense"], results["hitopk"]
        torch.testing.assert_close(dense["weights"], library["weights"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(dense["losses"], library["losses"], rtol=1e-3, atol=1e-4)
        assert len(sparse["losses"]) == len(library["losses"])
        assert sparse["losses"][1] == pytest.approx(library["losses"][1], rel=1e-3), "the first step is dense"
        assert sparse["losses"][-1] == pytest.approx(library["losses"][-1], rel=0.2)
        assert not torch.equal(sparse["weights"], library["weights"]), "the exchange was not sparse"


def check_each_sample_is_seen_once(ranks: Ranks, run: str) -> None:
    windows = torch.cat([batch for results in ranks for batch in results[run]["samples"]])
    assert len(torch.unique(windows, dim=0)) == len(windows) == 8 * 2 * 4


def test_lightning_with_topkube_trains_as_with_its_own_strategy(lightning_run: tuple[Ranks, Path]) -> None:
    ranks, _ = lightning_run
    for name in ranks[0]:
        check_equal_weights(ranks, lambda results, name=name: results[name]["weights"])
    check_against_library(ranks)
    for name in ("dense", "hitopk"):
        check_each_sample_is_seen_once(ranks, name)


def test_lightning_resumes_and_trains_in_bf16(lightning_run: tuple[Ranks, Path]) -> None:
    ranks, _ = lightning_run
    assert [results["resumed"]["step"] for results in ranks] == [12] * 4
    assert len(ranks[0]["resumed"]["losses"]) == 4, "the finished steps are not repeated"
    assert ranks[0]["resumed"]["losses"][0] < ranks[0]["hitopk"]["losses"][0]
    assert ranks[0]["bf16"]["losses"] != ranks[0]["hitopk"]["losses"]
    assert ranks[0]["bf16"]["losses"] == pytest.approx(ranks[0]["library"]["losses"], rel=0.2)


def test_the_steps_of_lightning_are_in_the_progress_of_the_run(lightning_run: tuple[Ranks, Path]) -> None:
    """Each record has the mean loss of all ranks and the bytes that TopKube's exchange sent."""
    ranks, folder = lightning_run
    records = read_step_records(folder)[-12:]
    assert [record["step"] for record in records] == [*range(1, 13)]
    assert {record["samples"] for record in records} == {8}
    assert records[-1]["total_steps"] == 12
    for index, record in enumerate(records[:8]):
        mean = sum(results["hitopk"]["losses"][index] for results in ranks) / 4
        assert record["loss"] == pytest.approx(mean, rel=1e-5)
    assert 0 < records[3]["inter_bytes"] < records[0]["inter_bytes"]
    assert [record["density"] for record in records[:8]] == [1.0] + [0.1] * 7, "the first step is dense"
    assert records[-1]["checkpoint_step"] == 8


def test_the_steps_of_lightning_are_in_the_metrics_of_each_rank(lightning_run: tuple[Ranks, Path]) -> None:
    _, folder = lightning_run
    records = read_step_records(folder)[-4:]  # of the resumed training
    read_counted_steps(folder, records)


def test_the_batches_of_an_evaluation_by_lightning_are_signs_of_life(lightning_run: tuple[Ranks, Path]) -> None:
    _, folder = lightning_run
    assert count_signs_of_life(folder) == [3 * 2, 0, 0, 0], "dense, bf16 and hitopk have 1 epoch with TopKube"


def test_the_trainer_with_topkube_trains_as_without_topkube(trainer_run: tuple[Ranks, Path]) -> None:
    ranks, _ = trainer_run
    assert [results["library"]["ranks"] for results in ranks] == [4] * 4, "each rank trained alone"
    for name in ("library", "dense", "hitopk"):
        check_equal_weights(ranks, lambda results, name=name: results[name]["weights"])
        check_each_sample_is_seen_once(ranks, name)
    check_against_library(ranks)


def test_the_steps_of_the_trainer_are_in_the_progress_of_the_run(trainer_run: tuple[Ranks, Path]) -> None:
    ranks, folder = trainer_run
    records = read_step_records(folder)[-8:]
    assert [(record["step"], record["total_steps"], record["samples"]) for record in records] == [
        (step, 8, 8) for step in range(1, 9)
    ]
    assert [record["loss"] for record in records] == pytest.approx(ranks[0]["hitopk"]["losses"])
    assert 0 < records[3]["inter_bytes"] < records[0]["inter_bytes"]
    assert [record["density"] for record in records[:8]] == [1.0] + [0.1] * 7, "the first step is dense"


def test_the_steps_of_the_trainer_are_in_the_metrics_of_each_rank(trainer_run: tuple[Ranks, Path]) -> None:
    _, folder = trainer_run
    read_counted_steps(folder, read_step_records(folder)[-8:])


def test_the_batches_of_an_evaluation_by_the_trainer_are_signs_of_life(trainer_run: tuple[Ranks, Path]) -> None:
    _, folder = trainer_run
    assert count_signs_of_life(folder) == [3 * 2, 0, 0, 0], "three trainings with TopKube, of two batches each"


def test_the_trainer_counts_the_samples_that_it_had(trainer_run: tuple[Ranks, Path]) -> None:
    """The last step of the epoch has one batch in place of two."""
    ranks, folder = trainer_run
    samples = [record["samples"] for record in read_step_records(folder)[-11:-8]]
    assert samples == [16, 16, 8]
    assert sum(samples) == sum(len(batch) for results in ranks for batch in results["uneven"]["samples"])


def test_accelerate_with_topkube_trains_as_without_topkube(trainer_run: tuple[Ranks, Path]) -> None:
    ranks, _ = trainer_run
    check_equal_weights(ranks, lambda results: results["accelerate dense"])
    torch.testing.assert_close(ranks[0]["accelerate dense"], ranks[0]["accelerate alone"])
