"""The world before `init`, and the errors of `init`: no MPI, ranks without a connection, wrongly declared nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.environment import ProcessLaunch, read_process_launch
from topkube.errors import WorldError
from topkube.launch_check import VERSION, check_launch, check_versions
from topkube.mpi_start import plan_window
from topkube.topology import find_nodes_of_ranks, group_by_home, parse_declared_nodes


def test_accessors_before_init_name_the_call_to_make() -> None:
    program = "import topkube\ntry:\n topkube.rank()\nexcept topkube.errors.WorldError as error: print(error)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "call topkube.init()" in output


def test_without_mpi_the_error_names_the_command_to_install_it() -> None:
    """The library of mpi4py is missing, as on a machine without MPI."""
    program = "import sys; sys.modules['mpi4py.MPI'] = None; import topkube; topkube.init()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "WorldError: MPI could not be loaded" in done.stderr
    assert re.search(r"pip install .*\[mpich\]'", done.stderr)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ProcessLaunch()),
        ({"PMI_SIZE": "4"}, ProcessLaunch("MPICH's mpiexec", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ProcessLaunch("Open MPI's mpiexec", 2)),
        ({"PMI_SIZE": "many"}, ProcessLaunch()),
        ({"WORLD_SIZE": "8", "RANK": "3"}, ProcessLaunch(processes=8)),
        ({"WORLD_SIZE": "8"}, ProcessLaunch()),
        ({"WORLD_SIZE": "8", "RANK": "3", "PMI_SIZE": "4"}, ProcessLaunch("MPICH's mpiexec", 4, 8)),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], expected: ProcessLaunch) -> None:
    assert read_process_launch(environment) == expected


@pytest.mark.parametrize(
    ("size", "launched", "expected"),
    [
        (1, ProcessLaunch(), 0),
        (1, ProcessLaunch(processes=1), 0),  # torchrun with one process
        (4, ProcessLaunch(processes=4), 0),  # MPI found all that torchrun's variables count
        (4, ProcessLaunch("MPICH's mpiexec", 4, 2), 0),  # mpiexec, with variables of something else around it
        (1, ProcessLaunch("MPICH's mpiexec", 1, 4), 0),
        (1, ProcessLaunch(processes=2), 1),  # `topkube run`, or the operator, with one rank
        (2, ProcessLaunch(processes=2), 2),
    ],
)
def test_a_launch_that_agrees_with_mpi_is_accepted(size: int, launched: ProcessLaunch, expected: int) -> None:
    check_launch(size, "MPICH Version: 5", launched, expected)


@pytest.mark.parametrize(
    ("size", "launched", "expected", "message"),
    [
        (
            1,
            ProcessLaunch("MPICH's mpiexec", 2),
            0,
            "2 ranks were started, but MPI sees 1 (MPICH Version: 5; started by MPI",
        ),
        (1, ProcessLaunch(), 4, "started by topkube run"),
        (2, ProcessLaunch("MPICH's mpiexec", 2), 4, "4 ranks were started, but MPI sees 2"),
        (1, ProcessLaunch(processes=4), 0, "4 processes were started (WORLD_SIZE=4), but not by MPI"),
    ],
)
def test_ranks_that_would_train_alone_are_refused(
    size: int, launched: ProcessLaunch, expected: int, message: str
) -> None:
    with pytest.raises(WorldError, match=re.escape(message)):
        check_launch(size, "MPICH Version: 5", launched, expected)


def test_torchrun_is_refused_with_the_command_to_use() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))}
    environment |= {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    program = [sys.executable, "-c", "import topkube; topkube.init()"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "mpiexec -n 4 python" in done.stderr


@given(st.lists(st.integers(0, 600), min_size=1, max_size=4096))
def test_nodes_hold_every_rank_once_in_the_order_of_their_first_rank(homes: list[int]) -> None:
    nodes = group_by_home(homes)
    assert sorted(rank for ranks in nodes for rank in ranks) == list(range(len(homes)))
    assert [ranks[0] for ranks in nodes] == sorted(ranks[0] for ranks in nodes)
    assert all(list(ranks) == sorted(ranks) and len({homes[rank] for rank in ranks}) == 1 for ranks in nodes)
    assert [homes[nodes[number][0]] for number in find_nodes_of_ranks(nodes)] == homes


def test_declared_nodes_follow_rank_order() -> None:
    assert parse_declared_nodes("3,1", [0, 0, 0, 0]) == [0, 0, 0, 1]


def test_a_declared_node_must_share_memory() -> None:
    with pytest.raises(WorldError, match="share no memory"):
        parse_declared_nodes("2,2", [0, 2, 2, 0])


def test_different_versions_of_topkube_are_refused_and_named() -> None:
    assert check_versions([(0, VERSION), (0, VERSION), (2, VERSION)]) == [0, 0, 2]
    older = r"different versions of TopKube: 0\.2\.0 \(ranks 0, 2\), an older one \(rank 1\).*one image"
    with pytest.raises(WorldError, match=older):
        check_versions([(0, "0.2.0"), 0, (2, "0.2.0")])
    with pytest.raises(WorldError, match=r"0\.2\.0, messages 2 \(rank 0\), 0\.2\.0, messages 3 \(rank 1\)"):
        check_versions([(0, "0.2.0, messages 2"), (0, "0.2.0, messages 3")])


@pytest.mark.parametrize(
    ("ranks", "free_mib", "is_sub_world", "kib_per_rank"),
    [
        (2, 64, False, 1100),
        (8, 64, False, 1100),
        (8, 64, True, 300),
        (8, 1000, True, 1100),
        (8, 12, False, 300),
        (8, 6, False, 0),
        (64, 64, False, 320),
        (100, 1000, False, 300),
        (100, 30, False, 0),
    ],
)
def test_a_window_fits_into_the_free_shared_memory(
    ranks: int, free_mib: int, is_sub_world: bool, kib_per_rank: int
) -> None:
    planned = plan_window(ranks, free_mib << 20, is_sub_world)
    assert planned == ranks * kib_per_rank << 10
    assert planned <= free_mib << 20
