"""`topkube plan --trace`: what it reads from a trace, and which files it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import SAMPLE, read_plan

from topkube.algorithms import Machines, find_algorithm
from topkube.cli.entry import run_app
from topkube.planning.situation import Situation
from topkube.planning.step import predict_step
from topkube.planning.traced_profile import read_traced_profile


def test_a_trace_with_dear_has_its_updates_in_forward(tmp_path: Path, capsys: Any) -> None:
    """The updates within forward count as updates, not as forward. The time of forward is divided among the layers as
    in the trace."""
    content = build_trace()
    forward = next(event for event in content["traceEvents"] if event["cat"] == "forward")
    parts = [("optimizer", "optimizer", 2.0, 1.0), ("forward", "first", 3.0, 2.0), ("forward", "last", 6.0, 5.0)]
    content["traceEvents"] += [
        {**forward, "cat": category, "name": name, "ts": at * 1e3, "dur": 1.2e3 * time, "tdur": 1e3 * time}
        for category, name, at, time in parts
    ]
    content["otherData"]["overlap"] = "dear"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    profile = read_plan("--trace", str(path), capsys=capsys)["profile"]
    assert profile["forwardSeconds"] == pytest.approx(0.009)
    assert profile["updateSeconds"] == pytest.approx(0.003)
    assert read_traced_profile(content).forward_seconds == pytest.approx((0.009 * 5 / 7, 0.009 * 2 / 7))


def test_a_trace_describes_the_step(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(build_trace()))
    plan = read_plan("--trace", str(path), "--workers", "2", "--link", "100Mbit/s", capsys=capsys)
    assert plan["parameters"] == 3_000_000
    profile = plan["profile"]
    assert profile["latencySeconds"] == 50e-6  # the default
    assert profile["forwardSeconds"] == pytest.approx(0.010)
    assert profile["backwardSeconds"] == pytest.approx(0.030)
    assert profile["updateSeconds"] == pytest.approx(0.002)
    assert profile["otherSeconds"] == pytest.approx(0.008)
    rows = {row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]}
    assert rows["hierarchical"] > 12e6 * 8 / 100e6
    content = build_trace()
    content["otherData"]["latencySeconds"] = 20e-6
    path.write_text(json.dumps(content))
    faster = read_plan("--trace", str(path), "--compute", "0.004", "--link", "100Mbit/s", capsys=capsys)
    assert faster["profile"]["latencySeconds"] == 20e-6
    assert faster["profile"]["forwardSeconds"] == pytest.approx(0.001)


def test_a_trace_of_onebit_measures_the_exchange_of_weights() -> None:
    content = build_trace()
    content["otherData"] |= {"nodes": 2, "ranksPerNode": [1, 1], "algorithm": "onebit"}
    profile = read_traced_profile(content)
    step = {
        delay: predict_step(profile, Situation(Machines(2, 1, 1e15, 20e9), delay=delay), find_algorithm("onebit")).step
        for delay in (0, 1)
    }
    agreement = 2 * 50e-6
    assert step[0] == pytest.approx(0.050 + 0.003 + agreement)  # a part travels while the others are packed and added
    assert step[1] == pytest.approx(0.050 + 0.0015 + agreement)  # what is added to the weights is not hidden


def test_measured_steps_are_not_compared_with_bounds(tmp_path: Path, capsys: Any) -> None:
    """The thread of the traced algorithm takes 100 ms for a bucket: far longer than any bound."""
    paths = {}
    for algorithm in ("hierarchical", "int8"):
        content = build_trace()
        [step] = [event for event in content["traceEvents"] if event["cat"] == "step"]
        step["args"]["communication_cpu_ms"] = 100.0
        args = {"bucket": 0, "elements": 3_000_000, "itemsize": 4, "algorithm": algorithm}
        place = {"name": "bucket 0", "pid": 0, "tid": 2, "ts": 50e3, "dur": 1e3, "tdur": 1e3}
        content["traceEvents"].append({"ph": "X", "cat": "bucket", **place, "args": args})
        content["otherData"] |= {"nodes": 2, "ranksPerNode": [1, 1]}
        paths[algorithm] = tmp_path / f"{algorithm}.json"
        paths[algorithm].write_text(json.dumps(content))
    dense = tmp_path / "dense.yaml"
    dense.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: dense"))
    options = [str(dense), "--slots", "1", "--link", "10Gbit/s", "--trace", str(paths["hierarchical"])]
    for others, measured in (([], {"hierarchical"}), (["--trace", str(paths["int8"])], {"hierarchical", "int8"})):
        plan = read_plan(*options, *others, capsys=capsys)
        steps = {row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]}
        assert {row["algorithm"] for row in plan["algorithms"] if row["measured"]} == measured
        assert steps["int4"] < steps["hierarchical"], "a bound is shorter"
        assert plan["advice"]["fastest"] in measured
        assert {name for name, row in plan["advice"]["breakEven"].items() if row["comparable"]} == measured & {"int8"}
    assert run_app(["plan", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('With "bound", ') for line in lines)
    rows = {name: next(line.split() for line in lines if f" {name} " in line) for name in ("hierarchical", "int8")}
    assert (rows["hierarchical"][-1], rows["int8"][-1]) == ("measured", "bound")
    [break_even] = [line for line in lines if line.startswith("break-even: int8 ")]
    assert break_even.endswith("(compares a measured step with a bound)")


def build_trace() -> dict[str, Any]:
    """Return the trace of a step of 60 ms, of which the thread computes 50 ms."""

    def build_span(category: str, name: str, start: float, milliseconds: float, **args: Any) -> dict[str, Any]:
        times = {"ts": start * 1e3, "dur": milliseconds * 1.2e3, "tdur": milliseconds * 1e3}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 1, **times, "args": args}

    def build_ready_mark(name: str, elements: int, at: float) -> dict[str, Any]:
        args = {"parameter": name, "elements": elements, "itemsize": 4, "small": False}
        return {
            "ph": "i",
            "cat": "gradient",
            "name": "gradient ready",
            "pid": 0,
            "tid": 1,
            "ts": at * 1e3,
            "args": args,
        }

    events = [
        {**build_span("step", "step 3", 0, 50, step=3, compute_cpu_ms=50.0, communication_cpu_ms=3.0), "dur": 60e3},
        build_span("forward", "forward", 1, 10),
        build_span("backward", "backward", 14, 30),
        build_span("backward", "last", 14, 20),
        build_ready_mark("last.weight", 2_000_000, 38),
        build_span("backward", "first", 38, 10),
        build_ready_mark("first.weight", 1_000_000, 50),
        build_span("optimizer", "optimizer", 55, 2),
    ]
    return {"otherData": {"nodes": 1, "ranksPerNode": [1], "cores": 2, "threads": 1}, "traceEvents": events}


def test_files_that_are_not_traces_are_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    for content, message in [
        ("[1, 2", "cannot be read"),
        ("{}", "has no traceEvents"),
        ('{"traceEvents": []}', "has no whole training step"),
        ('{"traceEvents": [{"ts": 1, "cat": "step", "ph": "X", "pid": 0, "dur": 5}]}', "contains no gradients"),
        ('{"traceEvents": [7]}', "cannot be used"),
        ('{"traceEvents": [], "otherData": []}', "is not a trace"),
        ('{"traceEvents": ' + "[" * 100_000, "cannot be read"),
    ]:
        path.write_text(content)
        assert run_app(["plan", "--trace", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert run_app(["plan", "--trace", str(tmp_path / "..")]) == 2
    assert "contains no trace of a rank" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text('{"otherData": {"originUnixNanoseconds": 1}, "traceEvents": []}')
    assert run_app(["plan", "--trace", str(tmp_path)]) == 2
    assert "has no whole training step" in capsys.readouterr().err
