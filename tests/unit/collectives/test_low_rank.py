"""Low-rank exchanges on one rank: nothing is lost in many steps, and the kept factors continue in another
world. The cases of several
nodes are in tests/mpi/ranks/allreduce_definitions.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topkube
from topkube.algorithms import find_algorithm
from topkube.collectives import Request, load
from topkube.collectives.error_feedback import Residual
from topkube.collectives.request import Matrix

NAMES = ("powersgd", "acpsgd")


def send(name: str, values: Any, residual: Residual, matrices: tuple[Matrix, ...], rank: int) -> Any:
    """Return what the algorithm delivers of `values`, with the residual of earlier steps."""
    x = values.copy()
    residual.prepare()
    request = Request(x, "mean", residual=residual, matrix_rank=rank, matrices=matrices)
    assert load(find_algorithm(name)).run(topkube.init(), request)
    residual.accept()
    residual.commit()
    return x


def place_matrices(shapes: list[tuple[int, int]]) -> tuple[tuple[Matrix, ...], int]:
    matrices, end = [], 0
    for rows, columns in shapes:
        matrices.append(Matrix(end, rows * columns, columns))
        end += rows * columns
    return tuple(matrices), end


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_nothing_is_lost_in_many_steps(name: str, shapes: list[tuple[int, int]], rank: int, seed: int) -> None:
    matrices, length = place_matrices(shapes)
    rng, residual = np.random.default_rng(seed), Residual(length)
    sum_of_inputs, received = np.zeros(length), np.zeros(length)
    for _ in range(5):
        values = rng.standard_normal(length).astype(np.float32)
        sum_of_inputs += values
        received += send(name, values, residual, matrices, rank)
    np.testing.assert_allclose(received + residual.current, sum_of_inputs, rtol=0, atol=1e-4)


def test_acpsgd_keeps_p_and_q_in_turn() -> None:
    matrices, length = place_matrices([(9, 5)])
    residual, kept = Residual(length), []
    for _ in range(4):
        send("acpsgd", np.ones(length, np.float32), residual, matrices, 2)
        kept.append((float(residual.factors[0][0]), residual.factors[0].size))
    assert kept == [(1, 1 + 2 * 9), (0, 1 + 2 * 5)] * 2


@pytest.mark.parametrize("steps", [3, 4])
def test_the_kept_factor_continues_in_a_world_of_more_nodes(steps: int) -> None:
    """A checkpoint that continues with more nodes divides the kept factor by their number. P and Q still alternate."""
    matrices, length = place_matrices([(9, 5), (6, 6)])
    values = np.random.default_rng(1).standard_normal(length).astype(np.float32)
    residual = Residual(length)
    for _ in range(steps):
        send("acpsgd", values, residual, matrices, 2)
    resumed = Residual(length)
    resumed.current[:] = residual.current
    resumed.factors = [factor / 3 for factor in residual.factors]
    expected = send("acpsgd", values, residual, matrices, 2)
    np.testing.assert_allclose(send("acpsgd", values, resumed, matrices, 2), expected, rtol=0, atol=1e-5)
    fresh = send("acpsgd", values, Residual(length), matrices, 2)
    assert np.abs(fresh - expected).max() > 0.1


def test_a_factor_of_powersgd_does_not_disturb_acpsgd() -> None:
    matrices, length = place_matrices([(8, 8)])
    values, residual = np.random.default_rng(2).standard_normal(length).astype(np.float32), Residual(length)
    sum_of_inputs, received = np.zeros(length), np.zeros(length)
    for name in ("powersgd", "acpsgd", "acpsgd", "powersgd", "acpsgd"):
        sum_of_inputs += values
        received += send(name, values, residual, matrices, 2)
    np.testing.assert_allclose(received + residual.current, sum_of_inputs, rtol=0, atol=1e-4)
