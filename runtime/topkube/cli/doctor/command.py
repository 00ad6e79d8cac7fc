"""The order of the checks, and the report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.doctor.check import Check
from topkube.cli.doctor.cluster import check_cluster
from topkube.cli.doctor.gpu_checks import check_gpus
from topkube.cli.doctor.machine import check_disk, check_memory, check_processor, check_shared_memory
from topkube.cli.doctor.mpi import check_mpi
from topkube.cli.doctor.software import (
    check_algorithms,
    check_cuda_kernels,
    check_kernels,
    check_python,
    check_torch,
)
from topkube.cli.script_job import IMAGE
from topkube.errors import TopKubeError

CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_kernels,
    check_cuda_kernels,
    check_algorithms,
    check_processor,
    check_mpi,
    check_torch,
    check_memory,
    check_shared_memory,
    check_disk,
    check_gpus,
)


def run_doctor(
    json_output: bool, location: ClusterLocation | None = None, probes_network: bool = False, image: str | None = None
) -> int:
    """Print the report on this machine and on the cluster at `location` (None: kubectl's default). Return 1 if
    something essential fails. With `probes_network`, the network policies of the cluster are probed with pods of
    `image` (None: TopKube's)."""
    from rich.console import Console

    checks: list[Check] = []
    console = Console(highlight=False)
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in run_checks(location or ClusterLocation(), probes_network, image):
        checks.append(check)
        if not json_output:
            console.print(
                f"[{colours[check.state]}]{check.state:>4}[/]  [bold]{check.name:<14}[/] ", end="", soft_wrap=True
            )
            console.print(check.message, markup=False, soft_wrap=True)
            if check.next_step:
                console.print(f"{'':22}next: {check.next_step}", markup=False, soft_wrap=True)
    failed = any(check.state == "fail" for check in checks)
    if json_output:
        print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    return 1 if failed else 0


def run_checks(location: ClusterLocation, probes_network: bool, image: str | None) -> Iterator[Check]:
    """Yield all checks; a check comes after those that it depends on. An exception in a check becomes a failed
    check."""

    checks = [(check.__name__.removeprefix("check_").replace("_", " "), check) for check in CHECKS]
    checks.append(("cluster", lambda: check_cluster(location)))
    if probes_network:
        from topkube.cli.doctor.network_policy import check_network_policies

        checks.append(("network policy", lambda: check_network_policies(location, image or IMAGE)))
    for name, check in checks:
        try:
            yield from check()
        except TopKubeError as error:
            yield Check(
                name, "fail", error.what + (f" (likely cause: {error.cause})" if error.cause else ""), error.next_step
            )
        except Exception as error:  # the report is for machines on which anything may be broken
            yield Check(name, "fail", f"could not be checked: {type(error).__name__}: {error}", "report this as a bug")
