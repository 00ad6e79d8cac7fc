"""`topkube bench train` on real ranks. The cases are in ranks/bench_train.py."""

from __future__ import annotations

import pytest
from worlds import list_parameters

LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(1, 1), (1,)], "openmpi": [(2,)]}


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters("bench_train", LAYOUTS))
def test_bench_train(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome("bench_train", mpi, layout, case)), problem
