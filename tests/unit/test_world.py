"""The world before and without ranks: what `init` says where MPI is missing or nodes are declared wrongly."""

from __future__ import annotations

import subprocess
import sys

import pytest

from topkube import world
from topkube.errors import WorldError
from topkube.settings import launched_ranks


def test_accessors_before_init_say_what_to_call() -> None:
    program = "import topkube\ntry:\n topkube.rank()\nexcept topkube.errors.WorldError as error: print(error)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "call topkube.init()" in output


def test_no_mpi_says_what_to_install() -> None:
    """mpi4py whose library is not there, as on a machine without MPI."""
    program = "import sys; sys.modules['mpi4py.MPI'] = None; import topkube; topkube.init()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "WorldError: MPI could not be loaded" in done.stderr
    assert "pip install 'topkube[mpich]'" in done.stderr


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, ("", 0)),
        ({"PMI_SIZE": "4"}, ("MPICH's mpiexec", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("Open MPI's mpiexec", 2)),
        ({"PMI_SIZE": "many"}, ("", 0)),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], wanted: tuple[str, int]) -> None:
    assert launched_ranks(environment) == wanted


def test_declared_nodes_follow_rank_order() -> None:
    assert world._declared("3,1", [0, 0, 0, 0]) == [0, 0, 0, 1]


def test_a_declared_node_must_share_memory() -> None:
    with pytest.raises(WorldError, match="share no memory"):
        world._declared("2,2", [0, 2, 2, 0])
