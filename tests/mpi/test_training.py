"""Training on real ranks. The cases are in ranks/training/."""

from __future__ import annotations

from pathlib import Path

import pytest
import worlds
from worlds import parameters

CASES = "training.gradients,training.parameters,training.batches"
LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (2, 2), (2, 1)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), parameters(CASES, LAYOUTS))
def test_training(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(CASES, mpi, layout, case)), problem


def run(layout: tuple[int, ...], directory: Path, name: str, *arguments: Path) -> None:
    found = worlds.run_cases("mpich", layout, "training.runs", directory, name, *map(str, arguments))
    assert found == {name: ""}, "\n".join(found.values())


def test_a_run_that_was_told_to_stop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run((2, 1), tmp_path, "runs_that_were_told_to_stop_go_on_bit_for_bit", tmp_path)


def test_a_run_that_was_killed_while_saving_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for moment in ("a rank's file", "the manifest", "the rename"):
        found = worlds.run_cases("mpich", (1, 1), "training.runs", tmp_path, "be_killed", str(tmp_path), moment)
        assert "mpiexec ended with" in found.get("the world ends well", ""), found
    run((1, 1), tmp_path, "killed_runs_go_on_bit_for_bit", tmp_path)


def test_another_world_takes_up_what_residuals_owe(tmp_path: Path) -> None:
    run((2, 2), tmp_path, "leave_residuals", tmp_path / "checkpoints")
    for layout in ((2,), (1, 1, 1)):  # from two nodes to one, and to three; from shards of 2 to 2 and 1
        run(layout, tmp_path, "take_up_residuals", tmp_path / "checkpoints")
