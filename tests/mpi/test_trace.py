"""`topkube run --trace` on 2 x 2 real ranks: every event is there, in order, and nested as viewers require."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from topkube.algorithms import resolve
from topkube.planning.buckets import plan_bucket_lengths
from topkube.planning.traced_profile import read_traced_profile
from topkube.telemetry import trace

Event = dict[str, Any]
STEPS, RANKS = 2, 4
SCRIPT = """
import torch, topkube
topkube.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
with topkube.checkpointing(model, optimizer) as run:
    for x in run.progress([torch.randn(4, 64) for _ in range(STEPS)], samples=4):
        run.loss(model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LAYERS = {"0", "2"}
PARAMETERS = {"0.weight", "0.bias", "2.weight", "2.bias"}


def run_traced(
    directory: Path, steps: int, *options: str, ranks: int = RANKS, traced: bool = True
) -> subprocess.CompletedProcess[str]:
    script = directory / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(steps)))
    command = [sys.executable, "-m", "topkube.cli", "run", str(script), "--workers", str(ranks // 2), "--slots", "2"]
    command += ["--no-plot", "--run-directory", str(directory / "run"), *options]
    command += ["--trace", str(directory / "trace.json")] if traced else []
    environment = {**os.environ, "TOPKUBE_TRACE_STEPS": str(STEPS)}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=directory, env=environment)


@pytest.fixture(scope="module", params=["dense", "hitopk"])
def traced_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp(request.param)
    done = run_traced(directory, trace.WARM_STEPS + STEPS + 2, "--algorithm", request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trace.json" in done.stdout
    return request.param, json.loads((directory / "trace.json").read_text())


def split_into_steps(events: list[Event], rank: int) -> list[list[Event]]:
    """Return the events of each step of a rank, in order of time."""
    own = sorted((e for e in events if e["pid"] == rank and "ts" in e), key=lambda e: e["ts"])
    steps = [e for e in own if e["cat"] == trace.STEP]
    return [[e for e in own if step["ts"] <= e["ts"] < step["ts"] + step["dur"]] for step in steps]


def compute_end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def find_event(events: list[Event], category: str, name: str) -> Event:
    (event,) = [e for e in events if (e["cat"], e["name"]) == (category, name)]
    return event


def test_every_event_has_the_fields_of_the_format(traced_run: tuple[str, dict[str, Any]]) -> None:
    events = traced_run[1]["traceEvents"]
    for event in events:
        assert event["ph"] in "XibeM"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"node 0 rank 0", "node 0 rank 1", "node 1 rank 2", "node 1 rank 3"}
    assert min(e["ts"] for e in events if "ts" in e) == 0


def test_every_step_of_every_rank_has_every_event_in_order(traced_run: tuple[str, dict[str, Any]]) -> None:
    algorithm, content = traced_run
    for rank in range(RANKS):
        steps = split_into_steps(content["traceEvents"], rank)
        assert len(steps) == STEPS
        for events in steps:
            forward, backward = (
                find_event(events, trace.FORWARD, "forward"),
                find_event(events, trace.BACKWARD, "backward"),
            )
            data, optimizer = (
                find_event(events, trace.DATA, "data wait"),
                find_event(events, trace.OPTIMIZER, "optimizer"),
            )
            wait = find_event(events, trace.BACKWARD, "wait for exchanges")
            assert compute_end(data) <= forward["ts"]
            assert compute_end(forward) <= backward["ts"] + 0.01
            assert compute_end(backward) <= optimizer["ts"]
            for category in (trace.FORWARD, trace.BACKWARD):
                layers = [e for e in events if e["cat"] == category and e["name"] in LAYERS]
                assert [e["name"] for e in layers] == (["0", "2"] if category == trace.FORWARD else ["2", "0"])
                assert compute_end(layers[0]) <= layers[1]["ts"] + 0.01
            ready = {e["args"]["parameter"]: e["ts"] for e in events if e["cat"] == trace.GRADIENT}
            assert ready.keys() == PARAMETERS
            assert max(ready["2.weight"], ready["2.bias"]) <= min(ready["0.weight"], ready["0.bias"])
            assert max(ready.values()) <= wait["ts"]
            handed_over = {e["args"]["bucket"]: e["ts"] for e in events if e["cat"] == trace.BUCKET and e["ph"] == "i"}
            buckets = {e["args"]["bucket"]: e for e in events if e["cat"] == trace.BUCKET and e["ph"] == "X"}
            assert handed_over.keys() == buckets.keys() == set(range(len(buckets)))
            for number, bucket in buckets.items():
                assert handed_over[number] <= bucket["ts"]
                stages = {e["name"] for e in events if e["cat"] == trace.STAGE and e["args"].get("bucket") == number}
                assert (trace.SELECT in stages) == (bucket["args"]["algorithm"] == "hitopk")
                assert {trace.REDUCE, trace.GATHER} <= stages
                sent = [e for e in events if e["cat"] == trace.EXCHANGE and e["args"]["bucket"] == number]
                assert Counter(e["ph"] for e in sent)["b"] == Counter(e["ph"] for e in sent)["e"] >= 1
                assert bucket["ts"] <= min(e["ts"] for e in sent)
                assert max(e["ts"] for e in sent) <= compute_end(backward)
            expected = {"dense": "hierarchical"}.get(algorithm, algorithm)
            assert expected in {bucket["args"]["algorithm"] for bucket in buckets.values()}
            elements = sum(bucket["args"]["elements"] for bucket in buckets.values())
            assert elements == sum(e["args"]["elements"] for e in events if e["cat"] == trace.GRADIENT)


def test_events_of_a_track_nest(traced_run: tuple[str, dict[str, Any]]) -> None:
    """Viewers refuse two events of a track that overlap in part."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in traced_run[1]["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert len(tracks) == 2 * RANKS
    for events in tracks.values():
        enclosing: list[Event] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while enclosing and compute_end(enclosing[-1]) <= event["ts"] + 0.01:
                enclosing.pop()
            if enclosing:
                assert compute_end(event) <= compute_end(enclosing[-1]) + 0.01, (event, enclosing[-1])
            enclosing.append(event)


def test_asynchronous_events_are_pairs(traced_run: tuple[str, dict[str, Any]]) -> None:
    pairs: dict[str, list[Event]] = defaultdict(list)
    for event in traced_run[1]["traceEvents"]:
        if event["ph"] in "be":
            pairs[event["id"]].append(event)
    assert pairs
    for began, ended in pairs.values():
        assert (began["ph"], ended["ph"]) == ("b", "e")
        assert began["ts"] <= ended["ts"]


def test_without_the_option_nothing_is_recorded(tmp_path: Path) -> None:
    done = run_traced(tmp_path, trace.WARM_STEPS + STEPS + 2, ranks=2, traced=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "run" / "traces").exists()


def test_a_run_that_is_too_short_prints_a_message(tmp_path: Path) -> None:
    done = run_traced(tmp_path, 2, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no trace was written" in done.stdout
    assert "train for more steps" in done.stdout
    assert not (tmp_path / "trace.json").exists()


def test_the_planner_reads_the_trace_and_plans_the_same_buckets(traced_run: tuple[str, dict[str, Any]]) -> None:
    algorithm, content = traced_run
    profile = read_traced_profile(content)
    assert {gradient.name for gradient in profile.gradients} == PARAMETERS
    assert profile.elements == 64 * 1024 * 2 + 1024 + 64
    steps = [step for rank in range(RANKS) for step in split_into_steps(content["traceEvents"], rank)]
    processor = [find_event(events, trace.STEP, events[0]["name"])["args"]["compute_cpu_ms"] / 1e3 for events in steps]
    assert min(profile.forward, profile.backward, profile.update) > 0
    assert profile.serial <= 2 * max(processor)
    chosen = resolve(algorithm, 2, profile.elements, 0.01)
    planned = [bucket.elements for bucket in plan_bucket_lengths(profile, chosen, 2, RANKS)]
    for events in steps:
        buckets = [e["args"] for e in events if e["cat"] == trace.BUCKET and e["ph"] == "X"]
        assert planned == [args["elements"] for args in sorted(buckets, key=lambda args: args["bucket"])]
    assert chosen.name in profile.host
    if algorithm == "dense":  # with a named algorithm, ranks measure no link; the small bucket shows the latency
        assert profile.latency == content["otherData"]["latencySeconds"] > 0
