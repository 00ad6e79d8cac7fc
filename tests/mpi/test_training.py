"""Training on real ranks: each world starts once and runs all cases of `training_cases.py`; each case is a test of
its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "training_cases.py").read_text(), re.MULTILINE)
WORLDS = ("2", "2,2", "2,1")
"""Ranks of each node."""


def start(world: str, report: Path, *arguments: str) -> dict[str, list[str]]:
    """Runs the cases file on `world`; case -> problems."""
    ranks = sum(map(int, world.split(",")))
    environment = {**os.environ, "TOPKUBE_RANKS_PER_NODE": world, "TOPKUBE_DEADLINE_SECONDS": "30"}
    environment.pop("TOPKUBE_CHECKPOINT_DIRECTORY", None)
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec), "-n", str(ranks), sys.executable, str(HERE / "training_cases.py"), str(report), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    lines = report.read_text().splitlines() if report.exists() else []
    outcome = {entry["case"]: entry["problems"] for entry in map(json.loads, lines)}
    if result.returncode:
        outcome[""] = [f"mpiexec ended with {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"]
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    return {}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_case(
    world: str, case: str, outcomes: dict[str, dict[str, list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if world not in outcomes:
        outcomes[world] = start(world, tmp_path_factory.mktemp("world") / "report.jsonl")
    outcome = outcomes[world]
    problems = outcome.get(case, outcome.get("", ["the case did not run"]))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world", ["2,1"])
def test_an_interrupted_run_goes_on_bit_for_bit(world: str, tmp_path: Path) -> None:
    outcome = start(world, tmp_path / "report.jsonl", "uninterrupted_and_interrupted_runs_are_equal", str(tmp_path))
    assert outcome == {"uninterrupted_and_interrupted_runs_are_equal": []}, outcome


def test_another_world_takes_up_what_residuals_owe(tmp_path: Path) -> None:
    first = start("2,2", tmp_path / "first.jsonl", "leave_residuals", str(tmp_path / "checkpoints"))
    assert first == {"leave_residuals": []}, first
    for i, world in enumerate(("2", "1,1,1")):  # from two nodes to one, and to three; from shards of 2 to 2 and 1
        second = start(world, tmp_path / f"second{i}.jsonl", "take_up_residuals", str(tmp_path / "checkpoints"))
        assert second == {"take_up_residuals": []}, second
