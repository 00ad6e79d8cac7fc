"""Every all-reduce algorithm on real ranks, under MPICH and Open MPI. The cases are in ranks/."""

from __future__ import annotations

import pytest
from worlds import list_parameters

ALLREDUCE = "allreduce,allreduce_definitions"


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(ALLREDUCE))
def test_allreduce(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(ALLREDUCE, mpi, layout, case)), problem


SMALL_ARRAYS = "small_arrays"
SMALL_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(3, 1), (2, 2), (1,) * 7], "openmpi": [(1, 1, 1, 1)]}
"""With seven nodes, the room for greetings is not a round number."""


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(SMALL_ARRAYS, SMALL_LAYOUTS))
def test_small_arrays(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(SMALL_ARRAYS, mpi, layout, case)), problem


LIFETIMES = "lifetimes"
LIFETIMES_LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2, 1), (1, 1)], "openmpi": [(2,)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(LIFETIMES, LIFETIMES_LAYOUTS))
def test_lifetimes(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(LIFETIMES, mpi, layout, case)), problem
