"""The data cache on real ranks. The cases are in ranks/data.py."""

from __future__ import annotations

import pytest
from worlds import list_parameters

LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(2,), (2, 2)], "openmpi": [(2, 1)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("data", LAYOUTS))
def test_data(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("data", mpi, layout, case)), problem
