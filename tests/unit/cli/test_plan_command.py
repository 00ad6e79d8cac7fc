"""The cost model and `topkube plan`: the formulas are the benchmarks', the choice is the runtime's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce import bounds
from topkube.algorithms import OWN, Machines, cost, find, resolve
from topkube.cli.app import run_app

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"
nodes, slots, lengths = st.integers(2, 200), st.integers(1, 8), st.integers(100_000, 10**9)


@given(nodes, slots, lengths, st.floats(0.0001, 1))
def test_bytes_are_those_of_the_benchmarks_bounds(m: int, n: int, d: int, density: float) -> None:
    machines = Machines(m, n, link=1e9, memory=1e10)
    sent = {algorithm.name: cost(algorithm, machines, d, density, "bf16").sent for algorithm in OWN}
    assert sent["flat"] == pytest.approx(bounds.ring(d, m, n))
    assert sent["hierarchical"] == sent["torus2d"] == pytest.approx(bounds.between_nodes(d, m))
    assert sent["hitopk"] == pytest.approx(bounds.hitopk_sent(d, m, n, density, 4))
    assert sent["naive"] == pytest.approx(bounds.everyone(d, m, n, density, 4))


@given(slots, lengths)
def test_one_node_sends_nothing(n: int, d: int) -> None:
    for algorithm in OWN:
        assert cost(algorithm, Machines(1, n, link=1e9, memory=1e10), d).sent == 0


@given(nodes, slots, lengths, st.floats(0.0001, 0.2))
def test_auto_never_sends_more_than_dense(m: int, n: int, d: int, density: float) -> None:
    machines = Machines(m, n, link=1e9, memory=1e10)
    chosen, dense = resolve("auto", m, d, density), find("hierarchical")
    assert cost(chosen, machines, d, density).sent <= cost(dense, machines, d, density).sent * 1.001 + 8 * m * n


@given(nodes, lengths, st.floats(0.0001, 1))
def test_the_choice_follows_from_the_declared_costs(m: int, d: int, density: float) -> None:
    """dense is hierarchical for every cluster. auto compresses if the entries at 8 bytes each are less than half of
    the dense bytes, which is a density below 1/(2m)."""
    assert resolve("dense", m, d, density).name == "hierarchical"
    if abs(density * 2 * m - 1) > 1e-3:
        assert resolve("auto", m, d, density).name == ("hitopk" if density * 2 * m < 1 else "hierarchical")


def test_auto_takes_dense_on_one_node_and_for_small_arrays() -> None:
    assert resolve("auto", 1, 10**9, 0.001).name == "hierarchical"
    assert resolve("auto", 8, (1 << 16) - 1, 0.001).name == "hierarchical"
    assert resolve("auto", 8, 1 << 16, 0.001).name == "hitopk"
    assert [resolve("auto", m, 10**8, 0.01).name for m in (49, 51)] == ["hitopk", "hierarchical"]


def planned(*arguments: str, capsys: Any) -> dict[str, Any]:
    assert run_app(["plan", *arguments, "-o", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_known_case(capsys: Any) -> None:
    """ResNet-50 over 16 nodes at 25 Gbit/s: 192 MB dense, 15 MB at 1%."""
    options = ["--workers", "16", "--slots", "8", "--parameters", "25.6M", "--link", "25Gbit/s", "--compute", "0.15"]
    plan = planned(*options, capsys=capsys)
    rows = {row["algorithm"]: row for row in plan["algorithms"]}
    assert plan["chosen"] == "hitopk"
    assert rows["hierarchical"]["sentBytes"] == 192_000_000
    assert rows["hitopk"]["sentBytes"] == 15_360_000
    assert rows["hierarchical"]["betweenSeconds"] == pytest.approx(192e6 * 8 / 25e9, rel=0.03)
    assert all(0 < row["efficiency"] <= 1 for row in rows.values())


def test_a_job_gives_what_is_not_said(capsys: Any) -> None:
    plan = planned(str(SAMPLE), "--workers", "4", capsys=capsys)
    assert (plan["workers"], plan["slotsPerWorker"], plan["wanted"], plan["density"]) == (4, 2, "hitopk", 0.01)


def test_the_table(capsys: Any) -> None:
    assert run_app(["plan", "--workers", "2", "--slots", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 x 2 ranks, 25,600,000 parameters, density 0.01, bf16; link 10Gbit/s" in out
    [chosen] = [line for line in out.splitlines() if line.startswith("->") and "is what" not in line]
    assert "hitopk" in chosen


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--link", "fast"),
        ("--parameters", "0"),
        ("--memory", "20GiB"),
        ("--density", "2"),
        ("--wire", "int8"),
        ("--compute", "0"),
    ],
)
def test_mistakes(option: str, value: str, capsys: Any) -> None:
    assert run_app(["plan", option, value]) == 2
    assert f"{option} is" in capsys.readouterr().err
