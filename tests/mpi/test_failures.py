"""Ranks that are missing, differ or raise an error: all ranks report which rank it is, before their deadline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worlds

DEADLINE = 3.0
"""For ranks that wait for an absent rank."""
LONG_DEADLINE = 60.0
"""For ranks that find out at once: on a busy machine, ranks may be seconds apart."""
FAILING = str(Path(__file__).with_name("failing.py"))
SLOW_SECONDS = 60.0
"""What a busy machine may need in addition to a deadline."""
MPIS = ["mpich", "openmpi"]

Reports = dict[int, dict[str, Any]]
FailingWorld = Callable[..., Reports]


@pytest.fixture
def failing_world(forks: Callable[[str], Path], tmp_path: Path) -> FailingWorld:
    """A function that runs a case of failing.py on the ranks of a layout, and returns the report of each rank."""

    def run_case(
        mpi: str,
        layout: str,
        case: str,
        absent: tuple[int, ...] = (),
        deadline: float = DEADLINE,
        links: str = "auto",
    ) -> Reports:
        settings = {
            "TOPKUBE_RANKS_PER_NODE": layout,
            "TOPKUBE_DEADLINE_SECONDS": str(deadline),
            "TOPKUBE_LINKS": links,
        }
        ranks = sum(map(int, layout.split(",")))
        ended = worlds.run(mpi, ranks, [FAILING, case, str(tmp_path)], settings, seconds=100, forks=forks(mpi))
        reports = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        expected = set(range(ranks)) - set(absent)
        assert set(reports) == expected, (
            f"{sorted(reports)} of {ranks} ranks ended, mpiexec with {ended.code}\n{ended.output}"
        )
        return reports

    return run_case


@pytest.mark.parametrize(
    ("mpi", "layout", "case", "absentee"),
    [
        ("mpich", "2,2", "absent-neighbour", 1),
        ("mpich", "2,2", "absent-on-another-node", 3),
        ("mpich", "1,1,1", "absent-from-a-ring", 2),
        ("mpich", "3", "absent-from-an-agreement", 1),
        ("mpich", "3", "absent-from-a-barrier", 1),
        ("mpich", "2,1", "absent-from-the-making-of-a-sub-world", 1),
        ("mpich", "1,1", "absent-from-a-delayed-exchange", 1),
        ("openmpi", "3", "absent-from-a-barrier", 1),
        ("openmpi", "2,2", "absent-on-another-node", 3),
    ],
)
def test_an_absent_rank_is_named(mpi: str, layout: str, case: str, absentee: int, failing_world: FailingWorld) -> None:
    for rank, report in failing_world(mpi, layout, case).items():
        if rank != absentee:
            assert report["error"] == "CollectiveTimeout", f"rank {rank}: {report}"
            assert report["missing"] == [absentee], f"rank {rank}: {report}"
            assert f"rank {absentee} never arrived" in report["message"]
            assert report["seconds"] < DEADLINE + SLOW_SECONDS


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_never_calls_init_is_named(mpi: str, failing_world: FailingWorld) -> None:
    for report in failing_world(mpi, "3", "absent-from-init", absent=(1,)).values():
        assert report["error"] == "CollectiveTimeout", report
        assert report["missing"] == [1], report
        assert "rank 1 did not call it" in report["message"]


def test_a_rank_that_waits_elsewhere_is_named_with_its_place(failing_world: FailingWorld) -> None:
    reports = failing_world("mpich", "2,1", "elsewhere")
    for rank in (0, 2):
        assert reports[rank]["missing"] == [1], reports
        assert "barrier() (call 1) did not complete within 3 s: rank 1 never arrived" in reports[rank]["message"]
        assert "rank 1 waited for all-reduce 'hitopk' (collective 1)" in reports[rank]["message"]
    assert reports[1]["missing"] == [0, 2], reports


def test_ranks_of_a_sub_world_are_named_as_in_the_world(failing_world: FailingWorld) -> None:
    reports = failing_world("mpich", "2,2", "absent-from-a-sub-world")
    assert [reports[rank]["error"] for rank in range(4)] == ["", "CollectiveTimeout", "", "CollectiveTimeout"]
    assert reports[1]["missing"] == reports[3]["missing"] == [2]
    assert "rank 2 never arrived" in reports[3]["message"]


@pytest.mark.parametrize(
    ("mpi", "layout", "case", "words"),
    [
        ("mpich", "2,2", "calls-differ", ["rank 2: barrier()", "ranks 0, 1, 3: allgather()", "dtype=int64"]),
        (
            "mpich",
            "2,2",
            "types-of-a-call-differ",
            ["rank 2: reduce(op=sum) float", "ranks 0, 1, 3: reduce(op=sum) int"],
        ),
        ("openmpi", "3", "calls-differ", ["rank 2: barrier()", "ranks 0, 1: allgather()"]),
        ("mpich", "3", "sub-worlds-differ", ["rank 2: new_world() ranks=[0, 1]", "ranks 0, 1: new_world() ranks=[0]"]),
        ("mpich", "2,2", "lengths-differ-between-nodes", ["ranks 0, 1:", "length=1000", "ranks 2, 3:", "length=1001"]),
        ("mpich", "2,2", "sizes-differ-between-nodes", ["ranks 0, 1:", "length=1000 ", "length=3000000"]),
        ("openmpi", "2,1", "sizes-differ-between-nodes", ["rank 2:", "length=1000 ", "length=3000000"]),
        ("mpich", "2,2", "lengths-differ-inside-a-node", ["length=1000", "length=1001"]),
        ("mpich", "2", "lengths-differ-inside-a-node", ["rank 0:", "rank 1:"]),
        ("mpich", "2,2", "lengths-differ-on-a-device", ["ranks 0, 1:", "length=1000", "ranks 2, 3:", "length=1001"]),
        ("mpich", "2,1", "lengths-differ-on-a-device", ["length=1000", "length=1001"]),
        ("mpich", "2,2", "types-differ", ["rank 1:", "float16"]),
        ("mpich", "2,2", "algorithms-differ", ["rank 0: flat", "hitopk"]),
        ("mpich", "2,1", "densities-differ", ["rank 2:", "density=0.01"]),
        ("mpich", "2", "densities-differ-in-the-last-digits", ["rank 0:", "density=0.010000001"]),
        ("mpich", "2", "shapes-differ", ["rank 0:", "matrices=4x6", "rank 1:", "matrices=6x4"]),
        ("mpich", "1,1", "shapes-differ", ["rank 0:", "matrices=4x6", "rank 1:", "matrices=6x4"]),
        ("mpich", "2,2", "residual-on-one-rank", ["rank 0:", "with residual; ranks 1, 2, 3: "]),
        ("mpich", "2", "long-types-differ", ["ranks made different calls", "rank 0:", "rank 1:", "hash of the whole"]),
        ("openmpi", "2,2", "lengths-differ-inside-a-node", ["length=1000", "length=1001"]),
    ],
)
def test_a_mismatch_is_shown_to_all(
    mpi: str, layout: str, case: str, words: list[str], failing_world: FailingWorld
) -> None:
    for rank, report in failing_world(mpi, layout, case, deadline=LONG_DEADLINE).items():
        assert report["error"] == "MismatchError", f"rank {rank}: {report}"
        for word in words:
            assert word in report["message"]
        assert report["seconds"] < LONG_DEADLINE


@pytest.mark.parametrize("layout", ["1,1", "2,2"])
def test_an_all_reduce_during_a_backward_is_refused(layout: str, failing_world: FailingWorld) -> None:
    for rank, report in failing_world("mpich", layout, "reduces-during-backward", deadline=LONG_DEADLINE).items():
        assert report["error"] == "CollectiveError", f"rank {rank}: {report}"
        assert "during a backward() that exchanges gradients" in report["message"]
        assert "topkube.new_world" in report["message"]
        assert report["seconds"] < LONG_DEADLINE


@pytest.mark.parametrize(
    ("mpi", "layout", "case", "absentee"),
    [
        ("mpich", "2,2", "absent-on-another-node", 3),
        ("mpich", "1,1", "absent-from-a-delayed-exchange", 1),
        ("openmpi", "1,1,1", "absent-neighbour", 1),
    ],
)
def test_an_absent_rank_is_named_on_links(
    mpi: str, layout: str, case: str, absentee: int, failing_world: FailingWorld
) -> None:
    for rank, report in failing_world(mpi, layout, case, links="tcp").items():
        if rank != absentee:
            assert report["error"] == "CollectiveTimeout", f"rank {rank}: {report}"
            assert report["missing"] == [absentee], f"rank {rank}: {report}"


@pytest.mark.parametrize(
    ("layout", "case", "words"),
    [
        ("2,2", "lengths-differ-between-nodes", ["ranks 0, 1:", "length=1000", "ranks 2, 3:", "length=1001"]),
        ("1,1", "sizes-differ-between-nodes", ["rank 0:", "length=1000 ", "length=3000000"]),
        ("1,1,1", "densities-differ", ["rank 2:", "density=0.01"]),
        (",".join(["1"] * 18), "densities-differ", ["rank 17:", "density=0.01"]),
    ],
)
def test_a_mismatch_is_shown_to_all_on_links(
    layout: str, case: str, words: list[str], failing_world: FailingWorld
) -> None:
    for rank, report in failing_world("mpich", layout, case, deadline=LONG_DEADLINE, links="tcp").items():
        assert report["error"] == "MismatchError", f"rank {rank}: {report}"
        for word in words:
            assert word in report["message"]


def test_a_lost_connection_is_reported_long_before_the_deadline(failing_world: FailingWorld) -> None:
    reports = failing_world("mpich", "1,1,1", "loses-its-connections", deadline=LONG_DEADLINE, links="tcp")
    for rank in (0, 2):
        assert reports[rank]["error"] == "CollectiveError", reports
        assert "rank 1 closed its connection" in reports[rank]["message"]
        assert "TOPKUBE_LINKS=mpi" in reports[rank]["message"]
        assert reports[rank]["seconds"] < LONG_DEADLINE


@pytest.mark.parametrize("links", ["mpi", "tcp"])
@pytest.mark.parametrize(
    ("case", "error"),
    [("goes-on-after-a-timeout", "CollectiveTimeout: all-reduce 'h"), ("goes-on-after-an-interrupt", "KeyboardInter")],
)
def test_a_rank_that_leaves_an_all_reduce_cannot_enter_another(
    case: str, error: str, links: str, failing_world: FailingWorld
) -> None:
    """Otherwise ranks would have different results, in silence: the others complete that all-reduce."""
    reports = failing_world("mpich", "1,1", case, links=links)
    assert reports[0]["error"] == "CollectiveError", reports
    assert "rank 0 has left a collective before its end" in reports[0]["message"]
    assert error in reports[0]["message"]
    assert (reports[1]["error"], reports[1]["missing"]) == ("CollectiveTimeout", [0]), reports


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("raises", "an error of rank 1"),
        ("raises-and-shuts-down", "an error of rank 1"),
        ("raises-in-a-thread", "an error in a thread"),
        ("raises-on-a-busy-rank", "the reason"),
    ],
)
def test_a_failing_rank_ends_all_ranks(mpi: str, case: str, message: str, tmp_path: Path) -> None:
    ended = worlds.run(mpi, 3, [FAILING, case, str(tmp_path)], {}, seconds=100)
    assert ended.code not in (0, None), ended.output
    assert f"ValueError: {message}" in ended.output


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("case", ["exits", "exits-by-raising", "exits-with-mpi4py-first"])
def test_a_rank_that_exits_with_a_status_ends_all_ranks(mpi: str, case: str, tmp_path: Path) -> None:
    ended = worlds.run(mpi, 3, [FAILING, case, str(tmp_path)], {}, seconds=100)
    assert ended.code == 9, ended.output


def test_an_exit_that_the_script_catches_ends_no_rank(tmp_path: Path) -> None:
    ended = worlds.run("mpich", 2, [FAILING, "exits-but-is-caught", str(tmp_path)], {}, seconds=100)
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("mpi", MPIS)
def test_a_forked_child_that_raises_ends_alone(mpi: str, tmp_path: Path) -> None:
    ended = worlds.run(mpi, 2, [FAILING, "ends-though-a-child-raises", str(tmp_path)], {}, seconds=100)
    assert ended.code == 0, ended.output


# The cases with a communication thread need torch. Forks of a process that has imported torch save seconds for each
# rank. With this setting they end as any Python process does.
WHOLE_END = {"FORKS_END_AS_PYTHON_DOES": "1"}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("layout", ["2", "1,1"])
def test_a_program_may_end_during_a_collective_of_its_communication_thread(
    mpi: str, layout: str, forks: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"TOPKUBE_RANKS_PER_NODE": layout, "TOPKUBE_DEADLINE_SECONDS": "30", **WHOLE_END}
    ended = worlds.run(mpi, 2, [FAILING, "ends-during-an-all-reduce", str(tmp_path)], settings, forks=forks(mpi))
    assert ended.code == 0, ended.output
    assert "SIGABRT" not in ended.output


def test_a_rank_that_shuts_down_serves_the_late_gathers_of_others(forks: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"TOPKUBE_RANKS_PER_NODE": "1,1", "TOPKUBE_LINKS": "tcp", "TOPKUBE_DEADLINE_SECONDS": "30", **WHOLE_END}
    command = [FAILING, "ends-with-a-shutdown-during-a-late-gather", str(tmp_path)]
    ended = worlds.run("mpich", 2, command, settings, forks=forks("mpich"))
    assert ended.code == 0, ended.output


def test_a_program_that_ends_during_a_collective_that_others_skip_reports_it(
    forks: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"TOPKUBE_DEADLINE_SECONDS": str(DEADLINE), **WHOLE_END}
    command = [FAILING, "ends-during-an-all-reduce-alone", str(tmp_path)]
    ended = worlds.run("mpich", 2, command, settings, forks=forks("mpich"))
    assert ended.code == 0, ended.output
    assert "rank 1 never arrived" in ended.output


@pytest.mark.parametrize("mpi", MPIS)
def test_an_exit_with_a_status_leaves_the_collective_of_the_communication_thread(
    mpi: str, forks: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"TOPKUBE_DEADLINE_SECONDS": "300", **WHOLE_END}
    ended = worlds.run(mpi, 2, [FAILING, "exits-during-an-all-reduce", str(tmp_path)], settings, forks=forks(mpi))
    assert ended.code == 9, ended.output
    assert "Aborted" not in ended.output


INIT = ["-c", "import topkube; topkube.init()"]


def test_a_library_of_another_mpi_than_that_of_mpiexec_is_reported(tmp_path: Path) -> None:
    """With MPICH's mpiexec and Open MPI's library, every process is a separate world."""
    script = [str(worlds.ENVIRONMENTS["openmpi"] / "bin" / "python"), *INIT]
    program = (
        "import os, sys; os.environ.setdefault('OMPI_ALLOW_RUN_AS_ROOT', '1'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    ended = worlds.run("mpich", 2, ["-c", program, *script], {}, seconds=100)
    assert "WorldError: 2 ranks were started, but MPI sees 1" in ended.output, ended.output
    assert "MPICH's mpiexec" in ended.output
    assert "Open MPI v" in ended.output


@pytest.mark.parametrize(
    ("declared", "message"),
    [("2,2", "declares 4 ranks, but there are 2"), ("two", "not a list of whole numbers"), ("2,0", "not a list")],
)
def test_wrong_nodes_are_refused(declared: str, message: str) -> None:
    ended = worlds.run("mpich", 2, INIT, {"TOPKUBE_RANKS_PER_NODE": declared}, seconds=100)
    assert f"WorldError: TOPKUBE_RANKS_PER_NODE={declared}" in ended.output.replace("'", "")
    assert message in ended.output
    assert ended.code != 0
