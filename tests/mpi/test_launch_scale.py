"""mpiexec with many workers. benchmarks/launch_scale.py measures whole starts of this size."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pods import PYTHONS

from topkube.launch.connection.messages import ProxyParameters
from topkube.launch.host.arguments import check_arguments
from topkube.launch.mpi.mpi_library import find_mpi
from topkube.launch.mpi.mpiexec import Mpiexec


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
@pytest.mark.parametrize("workers", [65, 129, 256])  # Open MPI starts daemons differently above 64 and above 128 nodes
def test_mpiexec_asks_for_every_proxy_at_once(mpi: str, workers: int, tmp_path: Path) -> None:
    async def collect_proxies() -> dict[int, ProxyParameters]:
        hosts = [f"127.60.{index // 250}.{index % 250 + 2}" for index in range(workers)]
        mpiexec = Mpiexec(find_mpi(PYTHONS[mpi].parent), hosts, 1, ["/bin/true"], tmp_path)
        try:
            return {number: parameters async for number, _, parameters in mpiexec.iterate_proxies()}
        finally:
            await mpiexec.end()

    proxies = asyncio.run(collect_proxies())
    assert sorted(proxies) == list(range(workers))
    if mpi == "OpenMPI":
        assert all(("routed_radix", str(workers + 1)) in proxy.options for proxy in proxies.values()), (
            "no tree of daemons"
        )


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_the_hosts_of_ten_thousand_workers_do_not_make_an_argument_too_long(mpi: str, tmp_path: Path) -> None:
    hosts = [f"10.200.{index // 250}.{index % 250 + 2}" for index in range(10_000)]
    mpiexec = Mpiexec(find_mpi(PYTHONS[mpi].parent), hosts, 16, ["/bin/true"], tmp_path)
    check_arguments(mpiexec._command, {})
