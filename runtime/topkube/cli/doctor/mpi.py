"""The lines of `topkube doctor` about MPI: mpiexec, the library, and two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from topkube.cli.doctor.check import Check, report_ok
from topkube.environment import copy_environment, drop_launch_variables
from topkube.errors import TopKubeError
from topkube.launch.mpi import mpi_library

HELLO_SECONDS = 60
_END_SECONDS = 10
"""The time that mpiexec has to end its ranks. Then all are killed."""
_HELLO = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(f'hello {c.allreduce(1)} {c.size}')"


def check_mpi() -> Iterator[Check]:
    """Compare mpiexec with the library that mpi4py loads, and start two ranks."""
    try:
        mpi = mpi_library.find_mpi()
        yield report_ok("mpiexec", f"{mpi} ({mpi.mpiexec})")
    except TopKubeError as error:
        yield Check("mpiexec", "fail", error.what, error.next_step)
        return
    try:
        loaded = mpi_library.read_library()
        mpi_library.check_same_mpi(mpi, loaded)
        yield report_ok("mpi library", f"{loaded}, the same as mpiexec's")
    except TopKubeError as error:
        yield Check("mpi library", "fail", error.what, error.next_step)
        return
    yield start_two_ranks(mpi)


def start_two_ranks(mpi: mpi_library.Mpi) -> Check:
    """Start two ranks that add 1 + 1, and report whether they formed one world."""
    command = mpi.build_command(2, [sys.executable, "-P", "-c", _HELLO])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**drop_launch_variables(copy_environment()), **mpi.build_environment()},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=HELLO_SECONDS)
    except subprocess.TimeoutExpired:
        _end_ranks(process)
        next_step = f"run it by hand: {' '.join(command[:-1])} '{_HELLO}'; check if a firewall or VPN blocks loopback"
        return Check("two ranks", "fail", f"no answer within {HELLO_SECONDS} s", next_step)
    if text.count("hello 2 2") == 2:
        return report_ok("two ranks", "started, and added 1 + 1")
    output = " ".join(text.split())[-300:]
    return Check(
        "two ranks",
        "fail",
        f"they did not form one world: {output}",
        "keep one MPI in this environment, and reinstall mpi4py",
    )


def _end_ranks(process: subprocess.Popen[str]) -> None:
    """End mpiexec, which then ends its ranks; kill its session if that takes too long."""
    process.terminate()
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # Do not read the output to its end: a rank that has left the session may keep the pipe open
