"""Files of traces: the recorded steps, the merged ranks, and the files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topkube.telemetry import phases, trace
from topkube.telemetry.trace import Trace
from topkube.telemetry.trace_files import MOST_READ, TraceError, list_rank_files, merge_traces, read_trace

FACTS = {"nodes": 2, "ranksPerNode": [1, 1], "algorithm": "dense", "device": "cpu"}


@pytest.fixture(autouse=True)
def no_active_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "active", None)


def record_trace(directory: Path, rank: int, steps: int = 2, **facts: object) -> Trace:
    """Run all steps of a trace, and one step more."""
    recorder = trace.active = Trace(directory, rank, rank, steps, {**FACTS, **facts})
    for _ in range(trace.WARM_STEPS + steps + 1):
        with phases.current.timed("data"):
            pass
        recorder.end_step()
    return recorder


def test_a_trace_records_the_requested_steps_and_then_nothing(tmp_path: Path) -> None:
    recorder = record_trace(tmp_path, 0)
    assert trace.active is None
    assert not recorder.recording
    events = read_trace(tmp_path / "rank-0.json")["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == trace.STEP] == ["step 3", "step 4"]
    assert len([e for e in events if e.get("cat") == trace.DATA]) == 2
    before = (tmp_path / "rank-0.json").read_bytes()
    recorder.close()
    assert (tmp_path / "rank-0.json").read_bytes() == before


def test_a_rank_that_ends_early_keeps_its_whole_steps(tmp_path: Path) -> None:
    recorder = trace.active = Trace(tmp_path, 0, 0, 100, FACTS)
    for _ in range(trace.WARM_STEPS + 3):
        recorder.end_step()
    recorder.close()
    assert len([e for e in read_trace(tmp_path)["traceEvents"] if e.get("cat") == trace.STEP]) == 3


def test_ranks_are_aligned_by_their_clocks(tmp_path: Path) -> None:
    for rank in (0, 1):
        record_trace(tmp_path, rank)
        path = tmp_path / f"rank-{rank}.json"
        content = json.loads(path.read_text())
        content["otherData"]["originUnixNanoseconds"] = 10**18 + rank * 5_000_000
        for event in content["traceEvents"]:
            if "ts" in event:
                event["ts"] = 100.0
        path.write_text(json.dumps(content))
    merged = merge_traces(tmp_path)
    assert {e["ts"] for e in merged["traceEvents"] if "ts" in e and e["pid"] == 0} == {0.0}
    assert {e["ts"] for e in merged["traceEvents"] if "ts" in e and e["pid"] == 1} == {5000.0}
    assert merged["otherData"]["tracedRanks"] == 2


def test_traces_of_different_runs_are_refused(tmp_path: Path) -> None:
    record_trace(tmp_path, 0)
    record_trace(tmp_path, 1, algorithm="hitopk")
    with pytest.raises(TraceError, match="different runs"):
        read_trace(tmp_path)


def test_few_of_many_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(MOST_READ + 10):
        record_trace(tmp_path, rank, steps=1)
    (tmp_path / "rank-notes.json").write_text("{}")
    assert len(list_rank_files(tmp_path)) == MOST_READ + 10
    assert read_trace(tmp_path)["otherData"]["tracedRanks"] == MOST_READ


def test_a_disk_that_refuses_the_file_does_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    record_trace(blocked / "traces", 0)
    assert "the trace of rank 0 is lost" in capsys.readouterr().err


def test_phases_count_the_same_with_and_without_a_trace(tmp_path: Path) -> None:
    counted = phases.Phases()
    with counted.timed("select"):
        pass
    plain = counted.take().seconds
    trace.active = Trace(tmp_path, 0, 0, 1, FACTS)
    with counted.timed("select", "a stage", 3):
        pass
    assert counted.take().seconds.keys() == plain.keys() == {"select"}
