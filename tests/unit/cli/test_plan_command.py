"""`topkube plan`: what it reads, predicts, advises and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from topkube.algorithms import Machines, find_algorithm
from topkube.cli.entry import run_app
from topkube.cli.plan.options import parse_link, parse_seconds
from topkube.planning.situation import Situation
from topkube.planning.step import predict_step
from topkube.planning.traced_profile import read_traced_profile

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"


def test_a_plan_counts_16_bits_and_a_period(tmp_path: Path, capsys: Any) -> None:
    options = ["--workers", "4", "--parameters", "10M", "--link", "1Gbit/s", "--compute", "0.1"]
    rows = {
        arguments: {row["algorithm"]: row for row in read_plan(*options, *arguments, capsys=capsys)["algorithms"]}
        for arguments in [(), ("--dense-wire", "bf16"), ("--period", "4")]
    }
    for name, arguments, factor in (("hierarchical", ("--dense-wire", "bf16"), 2), ("onebit", ("--period", "4"), 4)):
        assert rows[arguments][name]["sentBytes"] == pytest.approx(rows[()][name]["sentBytes"] / factor, rel=1e-6)
        assert rows[arguments][name]["stepSeconds"] < rows[()][name]["stepSeconds"]
        assert rows[arguments]["hitopk"] == rows[()]["hitopk"]
    job = tmp_path / "job.yaml"
    aggregation = "    algorithm: dense\n    denseWire: fp16\n    period: 3"
    job.write_text(SAMPLE.read_text().replace("    algorithm: hitopk", aggregation))
    plan = read_plan(str(job), capsys=capsys)
    assert (plan["denseWire"], plan["period"], plan["chosen"]) == ("fp16", 3, "hierarchical")


def test_the_plan_uses_only_periods_that_training_allows(tmp_path: Path, capsys: Any) -> None:
    """Training refuses diloco with a period of 1."""
    options = ["--workers", "4", "--parameters", "10M"]
    sent = {
        arguments: {
            row["algorithm"]: row["sentBytes"] for row in read_plan(*options, *arguments, capsys=capsys)["algorithms"]
        }
        for arguments in [(), ("--period", "2")]
    }
    assert sent[()]["diloco"] == sent["--period", "2"]["diloco"]
    assert sent[()]["localsgd"] == 2 * sent["--period", "2"]["localsgd"]
    assert run_app(["plan", *options, "--period", "1"]) == 0
    shown = capsys.readouterr()
    assert "diloco" not in shown.out
    assert "diloco is left out: the period of diloco is 1, but it must be at least 2" in shown.err
    job = tmp_path / "job.yaml"
    job.write_text(SAMPLE.read_text().replace("    algorithm: hitopk", "    algorithm: diloco\n    period: 32"))
    plan = read_plan(str(job), capsys=capsys)
    assert (plan["period"], plan["chosen"]) == (32, "diloco")
    assert run_app(["plan", str(job), "--period", "1"]) == 2
    assert "the period of diloco is 1" in capsys.readouterr().err


def test_auto_uses_16_bits_only_if_the_job_allows_them_and_the_link_is_slow(capsys: Any) -> None:
    options = ["--workers", "2", "--slots", "1", "--memory", "20GB/s"]
    wires = {
        (link, wire): read_plan(*options, "--link", link, *wire, capsys=capsys)["denseWire"]
        for link in ("1Gbit/s", "800Gbit/s")
        for wire in ((), ("--dense-wire", "bf16"))
    }
    slow, fast = "1Gbit/s", "800Gbit/s"
    allowed = ("--dense-wire", "bf16")
    assert wires == {(slow, ()): "fp32", (slow, allowed): "bf16", (fast, ()): "fp32", (fast, allowed): "fp32"}


def read_plan(*arguments: str, capsys: Any) -> dict[str, Any]:
    assert run_app(["plan", *arguments, "-o", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_plan_of_resnet_50_on_16_nodes_has_the_right_bytes_and_times(capsys: Any) -> None:
    """ResNet-50 over 16 nodes at 25 Gbit/s: 192 MB dense, 15 MB at 1%."""
    options = ["--workers", "16", "--slots", "8", "--parameters", "25.6M", "--link", "25Gbit/s", "--compute", "0.15"]
    plan = read_plan(*options, capsys=capsys)
    rows = {row["algorithm"]: row for row in plan["algorithms"]}
    assert plan["chosen"] == "hierarchical"
    assert rows["hierarchical"]["sentBytes"] == 192_000_000
    assert rows["hitopk"]["sentBytes"] == 15_360_000
    assert rows["hierarchical"]["betweenSeconds"] == pytest.approx(192e6 * 8 / 25e9, rel=0.03)
    assert all(0 < row["efficiency"] <= 1 for row in rows.values())


def test_options_that_are_not_passed_come_from_the_job(capsys: Any) -> None:
    plan = read_plan(str(SAMPLE), "--workers", "4", capsys=capsys)
    assert (plan["workers"], plan["slotsPerWorker"], plan["wanted"], plan["density"]) == (4, 2, "hitopk", 0.01)


def test_the_table_shows_the_cluster_and_the_chosen_algorithm(capsys: Any) -> None:
    command = ["plan", "--workers", "2", "--slots", "2", "--compute", "0.1"]
    for options, chosen, explanation in (
        (["--link", "100Gbit/s"], "hierarchical", "-> marks what auto takes."),
        (["--link", "100Mbit/s"], "int3", "-> marks what auto takes."),
        ([str(SAMPLE)], "hitopk", "-> marks the algorithm of the job."),
    ):
        assert run_app([*command, *options]) == 0
        out = capsys.readouterr().out
        assert "2 x 2 ranks, 25,600,000 parameters, density 0.01, bf16; link 10" in out
        [line] = [line for line in out.splitlines() if line.startswith("->") and "marks" not in line]
        assert line.split()[1] == chosen
        assert explanation in out


def test_without_the_time_of_a_step_what_auto_takes_is_unknown(tmp_path: Path, capsys: Any) -> None:
    command = ["--workers", "4", "--link", "100Mbit/s"]
    plan = read_plan(*command, capsys=capsys)
    assert plan["chosen"] is None
    assert not any(row["chosen"] for row in plan["algorithms"])
    assert run_app(["plan", *command]) == 0
    out = capsys.readouterr().out
    assert "->" not in out
    assert "What auto takes depends on the time of a step: add --compute or --trace." in out
    dense = tmp_path / "dense.yaml"
    dense.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: dense"))
    for options in ([str(dense)], ["--workers", "1"]):
        assert read_plan(*command, *options, capsys=capsys)["chosen"] == "hierarchical", "nothing else is possible"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--link", "fast"),
        ("--link", "1e-320bit/s"),
        ("--link", "25"),
        ("--link", "0"),
        ("--link", "1.2.3Gbit/s"),
        ("--link", "10GBPS"),
        ("--compute", "100m"),
        ("--compute", "100 minutes"),
        ("--parameters", "0"),
        ("--parameters", "0.5"),
        ("--parameters", "1e300"),
        ("--memory", "20Gbit/s"),
        ("--memory", "20Gb/s"),
        ("--memory", "20"),
        ("--memory", "20/s"),
        ("--memory", "0"),
        ("--density", "2"),
        ("--wire", "int8"),
        ("--dense-wire", "int8"),
        ("--compute", "0"),
    ],
)
def test_invalid_options_are_refused(option: str, value: str, capsys: Any) -> None:
    assert run_app(["plan", option, value]) == 2
    assert f"{option} is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20GB/s", 20e9),
        ("20 G", 20e9),
        ("7.2TB/s", 7.2e12),
        ("900 gB/s", 900e9),
        ("3e11B/s", 3e11),
        ("16GiB/s", 16 << 30),
        ("20mB/s", 20e6),
    ],
)
def test_memory_rates_are_read_in_every_unit(text: str, value: float, capsys: Any) -> None:
    rows = {memory: read_plan("--memory", memory, capsys=capsys)["algorithms"] for memory in (text, "1GB/s")}
    seconds = {memory: row[0]["insideSeconds"] for memory, row in rows.items()}
    assert seconds["1GB/s"] * 1e9 == pytest.approx(seconds[text] * value)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10Gbit/s", 10e9),
        ("100mbit", 100e6),
        ("25gbit/s", 25e9),
        ("25GBIT/S", 25e9),
        ("10G", 10e9),
        ("10gbps", 10e9),
        ("10Gb/s", 10e9),
        ("10GB/s", 80e9),
        ("1GiB/s", 8 * 2.0**30),
        ("1e9", 1e9),
        ("25000000", 25e6),
    ],
)
def test_rates_of_links_are_read_in_bits_or_bytes(text: str, bits: float) -> None:
    assert parse_link(text, "--link") * 8 == pytest.approx(bits)


@pytest.mark.parametrize(("text", "seconds"), [("0.1", 0.1), ("0.1s", 0.1), ("100ms", 0.1), ("100 MS", 0.1)])
def test_times_are_read_in_seconds_or_milliseconds(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--compute") == pytest.approx(seconds)


def test_a_refused_rate_lists_the_accepted_forms(capsys: Any) -> None:
    assert run_app(["plan", "--link", "25"]) == 2
    assert "write it as 10Gbit/s, 400Mbit, 10Gbps or 1.25GB/s" in " ".join(capsys.readouterr().err.split())


def test_the_memory_of_a_device_is_read_in_powers_of_1000_or_1024(capsys: Any) -> None:
    samples = [
        read_plan(*RESNET, "--device-memory", memory, capsys=capsys)["advice"]["largestBatchInMemory"]
        for memory in ("16GB", "16GiB", "16Gi", "16gib")
    ]
    assert samples[0] < samples[1] == samples[2] == samples[3]


@pytest.mark.parametrize(
    "option", ["--workers", "--slots", "--cores", "--network-cores", "--batch", "--data", "--spread"]
)
@pytest.mark.parametrize("value", ["9" * 400, "nan", "inf", "-1"])
def test_numbers_without_a_meaning_are_refused(option: str, value: str, capsys: Any) -> None:
    assert run_app(["plan", "--model", "gpt2", "--compute", "0.1", option, value]) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_the_network_takes_fewer_cores_than_a_node_has(capsys: Any) -> None:
    command = ["--model", "resnet50-96", "--compute", "0.1", "--device", "cpu", "--link", "25Gbit/s"]
    steps = {}
    for cores in ("0", "0.5"):
        plan = read_plan(*command, "--cores", "1", "--network-cores", cores, capsys=capsys)
        steps[cores] = {row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]}
    assert steps["0"]["hierarchical"] < steps["0.5"]["hierarchical"]
    assert run_app(["plan", *command, "--cores", "2", "--network-cores", "2"]) == 2
    assert "--network-cores is 2, but a node has 2 cores" in capsys.readouterr().err


RESNET = ["--model", "resnet50", "--workers", "16", "--slots", "8", "--link", "25Gbit/s", "--memory", "300GB/s"]
RESNET += ["--compute", "30TFLOP/s", "--batch", "64"]


def test_a_built_in_model_is_planned_for_2_to_4096_nodes(capsys: Any) -> None:
    plan = read_plan(str(SAMPLE), *RESNET, "--device-memory", "16GB", capsys=capsys)
    assert plan["parameters"] == 25_557_032
    assert plan["profile"]["forwardSeconds"] == pytest.approx(64 * 8.18e9 / 30e12, rel=0.01)
    assert [row["nodes"] for row in plan["nodes"]] == [2**power for power in range(1, 13)]
    rows = {row["algorithm"]: row for row in plan["algorithms"]}
    at_16 = next(row["algorithms"] for row in plan["nodes"] if row["nodes"] == 16)
    assert at_16["hitopk"]["stepSeconds"] == rows["hitopk"]["stepSeconds"] < rows["hierarchical"]["stepSeconds"]
    at_4096 = plan["nodes"][-1]["algorithms"]
    assert (
        at_4096["hitopk"]["stepSeconds"] > at_4096["hierarchical"]["stepSeconds"]
    )  # all to all: bytes grow with nodes
    advice = plan["advice"]
    assert (advice["algorithm"], advice["fastest"]) == ("hitopk", "hitopk")
    efficient = [row["nodes"] for row in plan["nodes"] if row["algorithms"]["hitopk"]["efficiency"] >= 0.8]
    assert advice["nodes"] == max(efficient)
    assert 1 < advice["batch"] < 64 < advice["largestBatchInMemory"]
    links = {
        name: math.inf if break_even["fasterOnAllLinks"] else break_even["linkBitsPerSecond"]
        for name, break_even in advice["breakEven"].items()
    }
    assert links["hitopk"] > links["int8"] > 25e9


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_recommendations_name_only_algorithms_for_training_on_the_device(device: str, capsys: Any) -> None:
    plan = read_plan("--compute", "0.3", "--workers", "4", "--link", "1Gbit/s", "--device", device, capsys=capsys)
    rows = {row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]}
    assert {"naive", "signsgd", "powersgd", "acpsgd"} < set(rows)
    named = set(plan["advice"]["breakEven"])
    assert {"int8", "onebit", "topk1bit"} < named
    assert not named & {"naive", "signsgd"}, "they are for comparisons"
    assert {"powersgd", "acpsgd", "gtopk", "oktopk"} & named == (
        {"powersgd", "acpsgd", "gtopk", "oktopk"} if device == "cpu" else set()
    )
    assert plan["advice"]["fastest"] == min(named, key=rows.__getitem__)


def test_a_faster_link_and_a_larger_batch_scale_better(capsys: Any) -> None:
    def predict_dense_efficiency(*options: str) -> float:
        plan = read_plan(*RESNET, *options, capsys=capsys)
        return float(next(row["efficiency"] for row in plan["algorithms"] if row["algorithm"] == "hierarchical"))

    usual = predict_dense_efficiency()
    assert predict_dense_efficiency("--link", "100Gbit/s") > usual
    assert predict_dense_efficiency("--batch", "256") > usual
    assert predict_dense_efficiency("--no-overlap") < usual
    assert predict_dense_efficiency("--spread", "0.1") < usual
    assert predict_dense_efficiency("--data", "1") >= 0.999  # every number of ranks waits for its input


def test_dear_is_predicted_and_compared_with_the_step_without_it(tmp_path: Path, capsys: Any) -> None:
    options = ["--model", "resnet50", "--compute", "0.3", "--device", "cpu", "--link", "2Gbit/s", "--workers", "4"]
    dense = tmp_path / "dense.yaml"
    dense.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: dense"))
    plain = read_plan(str(dense), *options, capsys=capsys)
    dear = read_plan(str(dense), *options, "--dear", capsys=capsys)
    assert (plain["overlap"], dear["overlap"]) == ("backward", "dear")
    steps = [{row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]} for plan in (plain, dear)]
    assert steps[1]["hierarchical"] < 0.95 * steps[0]["hierarchical"]
    assert steps[1]["int8"] < steps[0]["int8"]
    in_halves = ("hierarchical", "hitopk", "int8", "int4", "int3")
    assert all(steps[1][name] == seconds for name, seconds in steps[0].items() if name not in in_halves)
    compared = {"backward": steps[0]["hierarchical"], "dear": steps[1]["hierarchical"]}
    assert plain["advice"]["overlap"] == dear["advice"]["overlap"] == compared
    assert run_app(["plan", str(dense), *options, "--dear"]) == 0
    printed = capsys.readouterr().out
    assert ", overlap dear; link 2Gbit/s" in printed
    assert "overlap: a step of hierarchical takes " in printed
    assert read_plan(*options[:4], capsys=capsys)["advice"]["overlap"] is None  # on a GPU
    job = tmp_path / "job.yaml"
    job.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: dense\n    overlap: dear"))
    assert read_plan(str(job), *options, capsys=capsys)["overlap"] == "dear"
    assert read_plan(str(job), *options, "--no-dear", capsys=capsys)["overlap"] == "backward"


def test_auto_takes_the_bits_that_make_the_step_shorter(tmp_path: Path, capsys: Any) -> None:
    options = ["--model", "resnet50", "--compute", "0.3", "--device", "cpu", "--workers", "4", "--link"]
    for link, other_options, chosen in (
        ("100Mbit/s", (), "int3"),
        ("2Gbit/s", (), "int8"),
        ("100Gbit/s", (), "hierarchical"),
        ("100Mbit/s", ("--dear",), "int3"),
    ):
        plan = read_plan(*options, link, *other_options, capsys=capsys)
        assert (plan["wanted"], plan["chosen"]) == ("auto", chosen), (link, other_options)
    job, own = tmp_path / "job.yaml", tmp_path / "own.yaml"
    job.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: dense"))
    own.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: auto\n    nodeWeights: own"))
    assert read_plan(str(job), *options, "100Mbit/s", capsys=capsys)["chosen"] == "hierarchical"
    on_gpus = [*options[:3], "0.3", "--workers", "4", "--link", "100Mbit/s"]
    assert read_plan(*on_gpus, capsys=capsys)["chosen"] == "int3"
    assert read_plan(str(own), *on_gpus, capsys=capsys)["chosen"] == "onebit"


def test_a_delay_is_predicted_and_compared_with_the_step_without_it(tmp_path: Path, capsys: Any) -> None:
    options = ["--model", "resnet50", "--compute", "0.3", "--device", "cpu", "--link", "400Mbit/s", "--workers", "4"]
    plain = read_plan(*options, capsys=capsys)
    delayed = read_plan(*options, "--delay", "1", capsys=capsys)
    assert (plain["delay"], delayed["delay"]) == (0, 1)
    steps = [{row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]} for plan in (plain, delayed)]
    changed = {"onebit", "topk1bit", "localsgd", "diloco", "sparseloco"}
    assert {name for name, seconds in steps[0].items() if steps[1][name] != seconds} == changed
    assert steps[1]["onebit"] < 0.8 * steps[0]["onebit"]
    assert plain["advice"]["delay"] is None  # auto takes an algorithm without a delay
    job = tmp_path / "job.yaml"
    job.write_text(SAMPLE.read_text().replace("algorithm: hitopk", "algorithm: onebit\n    delay: 1"))
    plan_of_job = read_plan(str(job), *options, "--slots", "1", capsys=capsys)
    assert plan_of_job["delay"] == 1
    assert plan_of_job["advice"]["delay"] == {"0": steps[0]["onebit"], "1": steps[1]["onebit"]}
    assert read_plan(str(job), *options, "--delay", "0", capsys=capsys)["delay"] == 0
    assert run_app(["plan", str(job), *options]) == 0
    printed = capsys.readouterr().out
    assert ", delay 1; link 400Mbit/s" in printed
    assert "delay: a step of onebit takes " in printed


def test_a_low_rank_is_that_of_the_job(tmp_path: Path, capsys: Any) -> None:
    sent = []
    for rank in (4, 12):
        job = tmp_path / "job.yaml"
        job.write_text(SAMPLE.read_text().replace("algorithm: hitopk", f"algorithm: powersgd\n    matrixRank: {rank}"))
        rows = read_plan(str(job), "--parameters", "25.6M", capsys=capsys)["algorithms"]
        sent.append(next(row["sentBytes"] for row in rows if row["algorithm"] == "powersgd"))
    assert sent[1] == 3 * sent[0] > 0


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


def test_recommendations_for_a_slow_link_and_a_small_device_are_sentences(capsys: Any) -> None:
    options = ["--model", "resnet50", "--compute", "1ms", "--link", "100Mbit/s", "--workers", "4"]
    assert run_app(["plan", *options, "--device-memory", "100MB"]) == 0
    out = capsys.readouterr().out
    assert "workers for the same total batch: 1 rank keeps 80%\n" in out
    assert "batch: the model does not fit into 100MB, not even with one sample per rank\n" in out
    [factor] = [line.split()[1] for line in out.splitlines() if "x the present batch" in line]
    assert "e" not in factor
    assert float(factor.replace(",", "")) > 100


def test_the_plot_is_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert run_app(["plan", *RESNET, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "resnet99"], "--model is 'resnet99'"),
        (["--model", "gpt2", "--parameters", "7B"], "--model and --parameters both describe the model"),
        (["--compute", "30TFLOP/s"], "add --model and --batch"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--plot", "plan.png"], "--plot needs the time of a step"),
        (["--trace", "absent.json"], "the trace absent.json cannot be read"),
        (["--model", "gpt2", "--compute", "0.1", "--device-memory", "much"], "--device-memory is 'much'"),
        (["--model", "gpt2", "--compute", "0.1", "--device-memory", "16"], "--device-memory is '16'"),
        (["--model", "gpt2", "--device-memory", "16GB"], "the largest batch is unknown"),
        (["--compute", "0.1", "--device-memory", "16GB"], "the largest batch is unknown"),
        (["--model", "gpt2", "--compute", "0.1", "--dear"], "--dear is set, and the gradients are on a GPU"),
        (["--dear", "--no-overlap"], "--dear is set, and exchanges do not overlap"),
        (["--delay", "1", "--no-overlap"], "--delay is 1, and exchanges do not overlap"),
    ],
)
def test_options_that_contradict_or_miss_each_other_are_refused(options: list[str], message: str, capsys: Any) -> None:
    assert run_app(["plan", *options]) == 2
    assert message in capsys.readouterr().err


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
