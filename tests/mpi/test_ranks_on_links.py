"""Messages between nodes over own TCP connections (TOPKUBE_LINKS=tcp). Nodes of one machine use MPI otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import worlds
from worlds import list_parameters

COLLECTIVES = "allreduce,allreduce_definitions,small_arrays"
CONNECTIONS = {(2, 2): 3, (1, 1): 2}
"""The connections between two ranks, of layouts that have several."""
COLLECTIVE_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(1, 1), (2, 1), (2, 2, 2)], "openmpi": [(2, 2)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(COLLECTIVES, COLLECTIVE_LAYOUTS))
def test_collectives(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    connections = CONNECTIONS.get(layout, 1)
    assert not (problem := outcome(COLLECTIVES, mpi, layout, case, links="tcp", connections=connections)), problem


MANY_NODES = [
    ("allreduce", "every_algorithm_matches_float64", "mpi"),
    ("allreduce", "an_array_of_several_pieces_has_exact_sums", "tcp"),
    ("allreduce", "same_inputs_same_bits_on_all_ranks", "tcp"),
    ("allreduce", "every_algorithm_matches_float64", "tcp"),
    ("allreduce", "dense_values_of_16_bits_are_sums_in_float32", "tcp"),
    ("allreduce", "the_declared_bytes_are_those_of_the_messages", "tcp"),
    ("allreduce", "every_algorithm_reports_values_that_are_not_finite", "tcp"),
    ("allreduce_definitions", "hitopk_is_hitopkcomm", "tcp"),
    ("training.dear", "updates_come_with_the_next_forward", "tcp"),
    ("training.dear", "ranks_that_wait_for_slower_ones_gather_what_these_have_begun", "tcp"),
]


@pytest.mark.parametrize(("module", "case", "links"), MANY_NODES)
def test_many_nodes(module: str, case: str, links: str, forks: Callable[[str], Path], tmp_path: Path) -> None:
    """From 17 nodes on, exchanges have several rounds, and only neighbours connect at the start. Each has two
    connections to another."""
    outcome = worlds.run_cases(
        "mpich",
        (1,) * 18,
        module,
        tmp_path,
        f"case_{case}",
        forks=forks("mpich"),
        environment={"TOPKUBE_LINKS": links, "TOPKUBE_CONNECTIONS": "2"},
    )
    assert not any(outcome.values()), outcome


DENSE = "training.tuning,training.tuning_owed,training.dear,training.dear_clipping,training.dear_compressed"
TRAINING = f"{DENSE},training.gradients"
TRAINING_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(1, 1), (2, 2)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(TRAINING, TRAINING_LAYOUTS))
def test_training(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    connections = 3 if layout == (2, 2) else 1
    assert not (problem := outcome(TRAINING, mpi, layout, case, links="tcp", connections=connections)), problem


DEVICES = "device,device_engine"


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(DEVICES, {"mpich": [(2, 2)]}))
def test_devices(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    """What a GPU sends through host memory."""
    assert not (problem := outcome(DEVICES, mpi, layout, case, links="tcp", connections=3)), problem


ONEBIT = "training.onebit,training.onebit_delay,training.own_weights"


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(ONEBIT, {"mpich": [(2, 1), (1, 1, 1)]}))
def test_onebit(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(ONEBIT, mpi, layout, case, links="tcp")), problem
