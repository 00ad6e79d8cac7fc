"""Every all-reduce algorithm on real ranks, under MPICH and Open MPI. The cases are in ranks/."""

from __future__ import annotations

import pytest
from worlds import list_parameters

ALLREDUCE = "allreduce,allreduce_definitions"


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(ALLREDUCE))
def test_allreduce(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(ALLREDUCE, mpi, layout, case)), problem
