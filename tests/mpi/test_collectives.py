"""Every all-reduce algorithm on real ranks, under MPICH and Open MPI. The cases are in ranks/."""

from __future__ import annotations

import pytest
from worlds import parameters


@pytest.mark.parametrize(("mpi", "layout", "case"), parameters("allreduce"))
def test_allreduce(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("allreduce", mpi, layout, case)), problem
