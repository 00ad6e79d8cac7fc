"""`topkube plan`: what it predicts and advises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from plans import RESNET, SAMPLE, read_plan

from topkube.cli.entry import run_app


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


def test_the_network_takes_fewer_cores_than_a_node_has(capsys: Any) -> None:
    command = ["--model", "resnet50-96", "--compute", "0.1", "--device", "cpu", "--link", "25Gbit/s"]
    steps = {}
    for cores in ("0", "0.5"):
        plan = read_plan(*command, "--cores", "1", "--network-cores", cores, capsys=capsys)
        steps[cores] = {row["algorithm"]: row["stepSeconds"] for row in plan["algorithms"]}
    assert steps["0"]["hierarchical"] < steps["0.5"]["hierarchical"]
    assert run_app(["plan", *command, "--cores", "2", "--network-cores", "2"]) == 2
    assert "--network-cores is 2, but a node has 2 cores" in capsys.readouterr().err


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
