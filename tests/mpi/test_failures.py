"""What ranks meet when one of them is missing, different or raises: all of them learn which, in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import worlds

DEADLINE = 3.0
FAILING = str(Path(__file__).with_name("failing.py"))
MPIS = ["mpich", "openmpi"]


def fail(mpi: str, layout: str, case: str, directory: Path) -> dict[int, dict[str, Any]]:
    """What each rank met."""
    settings = {"TOPKUBE_RANKS_PER_NODE": layout, "TOPKUBE_DEADLINE_SECONDS": str(DEADLINE)}
    ranks = sum(map(int, layout.split(",")))
    ended = worlds.run(mpi, ranks, [FAILING, case, str(directory)], settings, seconds=60)
    met = {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}
    assert len(met) == ranks, f"{sorted(met)} of {ranks} ranks ended, mpiexec with {ended.code}\n{ended.output}"
    return met


@pytest.mark.parametrize(
    ("mpi", "layout", "case", "absentee"),
    [
        ("mpich", "2,2", "absent-neighbour", 1),
        ("mpich", "2,2", "absent-on-another-node", 3),
        ("mpich", "1,1,1", "absent-from-a-ring", 2),
        ("mpich", "3", "absent-from-an-agreement", 1),
        ("openmpi", "2,2", "absent-on-another-node", 3),
    ],
)
def test_an_absent_rank_is_named(mpi: str, layout: str, case: str, absentee: int, tmp_path: Path) -> None:
    for rank, met in fail(mpi, layout, case, tmp_path).items():
        if rank != absentee:
            assert met["error"] == "CollectiveTimeout", f"rank {rank}: {met}"
            assert met["missing"] == [absentee], f"rank {rank}: {met}"
            assert f"rank {absentee} never arrived" in met["message"]
            assert met["seconds"] < DEADLINE + 10


@pytest.mark.parametrize(
    ("mpi", "layout", "case", "words"),
    [
        ("mpich", "2,2", "lengths-differ-between-nodes", ["ranks 0, 1:", "length=1000", "ranks 2, 3:", "length=1001"]),
        ("mpich", "2,2", "lengths-differ-inside-a-node", ["length=1000", "length=1001"]),
        ("mpich", "2", "lengths-differ-inside-a-node", ["ranks 0:", "ranks 1:"]),
        ("mpich", "2,2", "types-differ", ["ranks 1:", "float16"]),
        ("mpich", "2,2", "algorithms-differ", ["ranks 0: flat", "hitopk"]),
        ("mpich", "2,1", "densities-differ", ["ranks 2:", "density=0.01"]),
        ("openmpi", "2,2", "lengths-differ-inside-a-node", ["length=1000", "length=1001"]),
    ],
)
def test_a_mismatch_is_shown_to_all(mpi: str, layout: str, case: str, words: list[str], tmp_path: Path) -> None:
    for rank, met in fail(mpi, layout, case, tmp_path).items():
        assert met["error"] == "MismatchError", f"rank {rank}: {met}"
        for word in words:
            assert word in met["message"]
        assert met["seconds"] < DEADLINE


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("case", "message"), [("raises", "rank one had enough"), ("raises-in-a-thread", "the thread had enough")]
)
def test_one_failing_rank_ends_all(mpi: str, case: str, message: str, tmp_path: Path) -> None:
    ended = worlds.run(mpi, 3, [FAILING, case, str(tmp_path)], {}, seconds=40)
    assert ended.code not in (0, None), ended.output
    assert f"ValueError: {message}" in ended.output


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("case", ["exits", "exits-by-raising", "exits-with-mpi4py-first"])
def test_a_rank_that_exits_with_a_status_ends_all(mpi: str, case: str, tmp_path: Path) -> None:
    ended = worlds.run(mpi, 3, [FAILING, case, str(tmp_path)], {}, seconds=40)
    assert ended.code == 9, ended.output


def test_an_exit_that_was_caught_does_not(tmp_path: Path) -> None:
    ended = worlds.run("mpich", 2, [FAILING, "exits-but-is-caught", str(tmp_path)], {}, seconds=40)
    assert ended.code == 0, ended.output


INIT = ["-c", "import topkube; topkube.init()"]


def test_two_different_mpis_are_told_apart(tmp_path: Path) -> None:
    """MPICH's mpiexec with Open MPI's library: every process is a world of its own."""
    script = [str(worlds.ENVIRONMENTS["openmpi"] / "bin" / "python"), *INIT]
    program = (
        "import os, sys; os.environ.setdefault('OMPI_ALLOW_RUN_AS_ROOT', '1'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    ended = worlds.run("mpich", 2, ["-c", program, *script], {}, seconds=40)
    assert "WorldError: 2 ranks were started, but MPI sees 1" in ended.output, ended.output
    assert "MPICH's mpiexec" in ended.output
    assert "Open MPI v" in ended.output


@pytest.mark.parametrize(
    ("declared", "message"),
    [("2,2", "declares 4 ranks, there are 2"), ("two", "not a list of whole numbers"), ("2,0", "not a list")],
)
def test_wrong_nodes_are_refused(declared: str, message: str) -> None:
    ended = worlds.run("mpich", 2, INIT, {"TOPKUBE_RANKS_PER_NODE": declared}, seconds=40)
    assert f"WorldError: TOPKUBE_RANKS_PER_NODE={declared}" in ended.output.replace("'", "")
    assert message in ended.output
    assert ended.code != 0
