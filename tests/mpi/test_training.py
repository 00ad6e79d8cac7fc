"""Training on real ranks. The cases are in ranks/training/."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import worlds
from worlds import list_parameters

CASES = (
    "training.gradients,training.gradient_memory,training.parameters,training.batches,training.normalization,"
    "training.mixed_precision,training.checkpoints,training.resumptions,training.parallel_tensor,coordination,"
    "training.phases"
)
SCRIPTS = "training.scripts,training.script_gradients,training.tensor_kinds,training.owed,training.refusals"
SCRIPT_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (2, 2)]}
LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (2, 2), (2, 1)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(CASES, LAYOUTS))
def test_training(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(CASES, mpi, layout, case)), problem


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(SCRIPTS, SCRIPT_LAYOUTS))
def test_scripts(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(SCRIPTS, mpi, layout, case)), problem


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("training.sharded", {"mpich": [(2, 2)]}))
def test_sharded_models(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("training.sharded", mpi, layout, case)), problem


DENSE = "training.tuning,training.tuning_owed,training.dear,training.dear_clipping,training.dear_compressed"
DENSE_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (3, 1)], "openmpi": [(2, 2)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(DENSE, DENSE_LAYOUTS))
def test_dense(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(DENSE, mpi, layout, case)), problem


EIGHT_NODES = (1,) * 8
"""From eight nodes on, onebit exchanges in two stages."""
SIMULATED: dict[str, list[tuple[int, ...]]] = {"mpich": [(1, 1), (1, 1, 1), EIGHT_NODES]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("training.simulated", SIMULATED))
def test_simulated_nodes(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("training.simulated", mpi, layout, case)), problem


ONEBIT = (
    "training.onebit,training.onebit_delay,training.onebit_weights,training.onebit_definition,"
    "training.onebit_checkpoints,training.onebit_optimizers,training.own_weights"
)
# One node, uneven nodes, and three nodes: from three nodes on, averages have two stages. With Open MPI, nodes of two
# ranks.
ONEBIT_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (2, 1), (1, 1, 1)], "openmpi": [(2, 2)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(ONEBIT, ONEBIT_LAYOUTS))
def test_onebit(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(ONEBIT, mpi, layout, case)), problem


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("training.two_stage", {"mpich": [EIGHT_NODES]}))
def test_onebit_in_two_stages(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("training.two_stage", mpi, layout, case)), problem


PRESETS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2, 1), (2, 2)], "openmpi": [(1, 1, 1)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("training.presets", PRESETS))
def test_presets(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("training.presets", mpi, layout, case)), problem


@pytest.fixture
def run(forks: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A function that runs a function of ranks/training/runs.py on all ranks, and returns its error."""

    def run_layout(layout: tuple[int, ...], name: str, *arguments: object) -> dict[str, str]:
        texts = map(str, arguments)
        return worlds.run_cases("mpich", layout, "training.runs", tmp_path, name, *texts, forks=forks("mpich"))

    return run_layout


Run = Callable[..., dict[str, str]]


def test_a_run_that_was_asked_to_stop_continues_bit_for_bit(run: Run, tmp_path: Path) -> None:
    name = "stop_and_resume_runs"
    assert run((2, 1), name, tmp_path) == {name: ""}


def test_a_run_that_was_killed_while_saving_continues_bit_for_bit(run: Run, tmp_path: Path) -> None:
    for moment in ("a rank's file", "the manifest", "the rename"):
        outcomes = run((1, 1), "end_by_sigkill", tmp_path, moment)
        assert "mpiexec ended with" in outcomes.get("the world ends well", ""), outcomes
    name = "resume_killed_runs"
    assert run((1, 1), name, tmp_path) == {name: ""}


def test_another_world_takes_over_the_residuals(run: Run, tmp_path: Path) -> None:
    assert run((2, 2), "leave_residuals", tmp_path / "checkpoints") == {"leave_residuals": ""}
    for layout in ((2,), (1, 1, 1)):  # from two nodes to one, and to three; from shards of 2 to 2 and 1
        assert run(layout, "take_up_residuals", tmp_path / "checkpoints") == {"take_up_residuals": ""}


def test_another_world_takes_up_the_weights_of_all_nodes(tmp_path: Path, forks: Callable[[str], Path]) -> None:
    def run(layout: tuple[int, ...], name: str, directory: Path) -> dict[str, str]:
        module = "training.onebit_checkpoints"
        return worlds.run_cases("mpich", layout, module, tmp_path, name, str(directory), forks=forks("mpich"))

    changes: dict[tuple[int, ...], list[tuple[int, ...]]] = {
        (2, 2): [(1,), (2, 1), (1, 1, 1)],
        (2, 1): [EIGHT_NODES],
        EIGHT_NODES: [(2, 1), (2,) + (1,) * 7],
    }
    for before, worlds_after in changes.items():
        checkpoints = tmp_path / f"left-{len(before)}-{before[-1]}"
        assert run(before, "leave_checkpoint", checkpoints) == {"leave_checkpoint": ""}
        for after in worlds_after:
            directory = shutil.copytree(checkpoints, checkpoints.with_name(f"{checkpoints.name}-{len(after)}"))
            assert run(after, "take_up", directory) == {"take_up": ""}
