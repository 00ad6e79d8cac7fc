"""Scripts that were written for torchrun run unchanged: the launch layer sets torchrun's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import worlds
from local_runs import run_job, write_job

from topkube.environment import read_process_launch
from topkube.errors import WorldError
from topkube.launch.host.torch_environment import build_rank_variables, list_accelerate_variables
from topkube.launch_check import check_launch
from topkube.settings import Settings

SCRIPT = Path(__file__).parents[1] / "ddp_script.py"
CASES = [
    ("2,2", 4, 0, {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "WORLD_SIZE": "4"}),
    ("2,2", 4, 3, {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "WORLD_SIZE": "4"}),
    ("3,1", 4, 3, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}),
]


@pytest.mark.parametrize(("counts", "ranks", "rank", "expected"), CASES)
def test_a_rank_gets_the_variables_of_torchrun(counts: str, ranks: int, rank: int, expected: dict[str, str]) -> None:
    variables = build_rank_variables(rank, Settings(ranks_per_node=counts, expected_ranks=ranks))
    assert {name: variables[name] for name in expected} == expected


@pytest.mark.parametrize(("counts", "ranks"), [("", 0), ("", 4), ("2,2", 3), ("2,x", 2)])
def test_without_a_known_number_of_ranks_nothing_is_set(counts: str, ranks: int) -> None:
    assert build_rank_variables(0, Settings(ranks_per_node=counts, expected_ranks=ranks)) == {}


@pytest.mark.parametrize(
    ("device", "inherited", "expected"),
    [
        ("null", {}, {"ACCELERATE_USE_CPU": "true"}),
        ("null", {"ACCELERATE_USE_CPU": "false"}, {}),
        ("nvidia0", {}, {}),
        ("kfd", {}, {}),
        ("dri/renderD128", {}, {"ACCELERATE_USE_CPU": "true"}),
    ],
)
def test_accelerate_uses_the_cpu_only_without_a_device(
    tmp_path: Path, device: str, inherited: dict[str, str], expected: dict[str, str]
) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert list_accelerate_variables(inherited, tmp_path) == expected


def test_these_variables_do_not_count_as_torchrun() -> None:
    """Each process of torchrun is alone in MPI; the ranks of TopKube's launch layer are not."""
    variables = build_rank_variables(1, Settings(ranks_per_node="2,2", expected_ranks=4))
    launched = read_process_launch(variables)
    check_launch(4, "MPICH", launched, expected_ranks=4)
    with pytest.raises(WorldError, match="but not by MPI"):
        check_launch(1, "MPICH", launched)


def test_a_script_with_ddp_and_fsdp_runs_unchanged_on_two_nodes_as_under_torchrun(tmp_path: Path) -> None:
    """A stale RANK of the shell does no harm. Ranks are forks of a process that has imported torch."""
    environment = {**os.environ, "FORKS_END_AS_PYTHON_DOES": "1"}  # libc's exit cannot end FSDP's Python objects
    with worlds.start_forks("mpich", tmp_path, ("torch._dynamo", "torch.distributed.fsdp")) as socket:
        script = worlds.build_fork_arguments(socket, SCRIPT)
        job = write_job(tmp_path, ["python", *script, "--out", "topkube.pt"])
        stale = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere"}
        ended = run_job(job, tmp_path, environment={**environment, **stale})
        assert ended.returncode == 0, ended.stdout + ended.stderr
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python", sys.executable]
        command = [*torchrun, *script, "--out", "run.pt"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=280, capture_output=True, env=environment)
    weights, size = torch.load(tmp_path / "topkube.pt")
    reference, _ = torch.load(tmp_path / "run.pt")
    assert size == 4
    assert torch.equal(weights, reference)
