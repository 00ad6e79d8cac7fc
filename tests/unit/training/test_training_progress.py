"""Progress records are read as they were written, while the file grows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import topkube
from topkube.settings import Settings
from topkube.telemetry.progress import PROGRESS_FILE, ProgressWriter, StepRecord, read_records
from topkube.telemetry.rank_file import read_ranks
from unit.training.one_rank import build_model, build_optimizer


def test_a_reader_follows_the_file_and_leaves_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE
    assert list(read_records(path)) == []
    first, second = StepRecord(1, 10, loss=2.5, seconds={"data": 0.25}, inter_bytes=7), StepRecord(2, 10)
    writer = ProgressWriter(tmp_path)
    writer.write(first)
    [(record, offset)] = read_records(path)
    assert record == first
    with path.open("a") as file:
        file.write(second.to_json()[:20])
    assert list(read_records(path, offset)) == []
    with path.open("a") as file:
        file.write(second.to_json()[20:] + "\n")
    assert [record for record, _ in read_records(path, offset)] == [second]


def test_a_loss_that_is_not_finite_stays_valid_json() -> None:
    line = StepRecord(1, None, loss=math.nan).to_json()
    assert json.loads(line)["loss"] is None


def test_fields_of_a_later_version_are_ignored() -> None:
    line = json.dumps({**json.loads(StepRecord(3, 5).to_json()), "colour": "blue"})
    assert StepRecord.from_json(line) == StepRecord(3, 5)


@pytest.mark.parametrize("is_finite", [True, False])
def test_the_counter_of_skipped_steps_begins_with_0_in_each_attempt(tmp_path: Path, is_finite: bool) -> None:
    """Prometheus takes a counter that falls to less than before for all new: the steps that a checkpoint contains would
    count again."""

    topkube.init()

    def train(attempt: int, steps: int, factor: float) -> tuple[int, float]:
        model = build_model()
        optimizer = build_optimizer(model)
        folder = str(tmp_path / "checkpoints")
        settings = Settings(run_directory=str(tmp_path), checkpoint_directory=folder, attempt=attempt)
        with topkube.checkpointing(model, optimizer, settings=settings) as run:
            for x in run.progress(torch.ones(6, 4, 20), total=steps):
                (model(x).square().mean() * factor).backward()
                optimizer.step()
                optimizer.zero_grad()
        [values] = read_ranks(tmp_path)
        return list(read_records(tmp_path / PROGRESS_FILE))[-1][0].skipped_steps, values["skipped_steps"]

    assert train(1, 3, math.nan) == (3, 3)
    assert train(2, 5, 1.0 if is_finite else math.nan) == ((3, 0) if is_finite else (5, 2))
