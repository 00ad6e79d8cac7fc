"""All parts of a training on 32 and 16 real ranks, as 2, 8 and 16 nodes: ranks/scale.py. benchmarks/ranks.py measures
larger worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import worlds


@pytest.mark.parametrize(("mpi", "ranks"), [("mpich", 32), ("openmpi", 16)])
def test_many_ranks_train_as_2_8_and_16_nodes_and_resume_from_2_ranks(
    mpi: str, ranks: int, forks: Callable[[str], Path], tmp_path: Path
) -> None:
    own, former, socket = str(tmp_path / "own"), str(tmp_path / "former"), forks(mpi)
    outcomes = worlds.run_cases(mpi, (1, 1), "scale", tmp_path, "leave_checkpoint", former, forks=socket)
    layout = (1,) * ranks
    name = "run_all_layouts"
    outcomes |= worlds.run_cases(mpi, layout, "scale", tmp_path, name, own, former, forks=socket, seconds=250)
    assert outcomes == {"leave_checkpoint": "", name: ""}, "\n".join(outcomes.values())
