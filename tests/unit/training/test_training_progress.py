"""Progress records are read as they were written, while the file grows."""

from __future__ import annotations

import json
import math
from pathlib import Path

from topkube.telemetry.progress import PROGRESS_FILE, ProgressWriter, StepRecord, read_records


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
