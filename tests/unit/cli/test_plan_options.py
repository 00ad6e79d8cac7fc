"""`topkube plan`: the numbers and units of its options, and those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from plans import RESNET, read_plan

from topkube.cli.entry import run_app
from topkube.cli.plan.options import parse_link, parse_seconds


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "resnet99"], "--model is 'resnet99'"),
        (["--model", "gpt2", "--parameters", "7B"], "--model and --parameters both describe the model"),
        (["--compute", "30TFLOP/s"], "add --model and --batch"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--plot", "plan.png"], "--plot needs the time of a step"),
        (["--model", "gpt2", "--compute", "0.1", "--plot", "plan.pgn"], "the ending names no format of a picture"),
        (["--model", "gpt2", "--compute", "0.1", "--plot", "/dev/null/plan.png"], "/dev/null is not a directory"),
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
