"""The processes that connect a worker to mpiexec: Hydra's proxy (MPICH), PRRTE's prted (Open MPI 5), orted (Open MPI
4).

mpiexec, in the launcher, prints how it would start each of them. This module parses that into checked parameters. The
worker builds the command from them, with its own program and its own end of the tunnel.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from topkube.errors import LaunchError
from topkube.launch.connection.messages import ProxyParameters
from topkube.launch.mpi.mpi_library import Mpi

HYDRA_LINE = "HYDRA_LAUNCH: "
HYDRA_END = "HYDRA_LAUNCH_END"
_HYDRA_OPTIONS = {
    "rmk",
    "launcher",
    "demux",
    "iface",
    "pgid",
    "retries",
    "usize",
    "pmi-port",
    "gpus-per-proc",
    "gpu-subdevs-per-proc",
    "proxy-id",
    "topolib",
    "debug",
}
"""The options that Hydra of MPICH 3.4 to 5 passes to its proxies, without the control port."""
_HYDRA_FLAGS = {"debug"}
_NOT_FOR_WORKERS = {
    f"plm_{plm}_{name}" for plm in ("ssh", "rsh") for name in ("agent", "no_tree_spawn", "num_concurrent")
}
_CONTACTS = {"prte_hnp_uri", "orte_hnp_uri"}


def build_host_list(mpi: Mpi, hosts: list[str], slots: int) -> str:
    """Return the text of the file with the hosts (addresses) for mpiexec, each with `slots` ranks, in that order. In an
    argument, about 7,000 hosts would be longer than Linux accepts."""
    separator = ":" if mpi.implementation == "MPICH" else " slots="
    return "".join(f"{host}{separator}{slots}\n" for host in hosts)


def build_mpiexec_command(
    mpi: Mpi, host_list: Path, hosts: int, slots: int, agent: Path, program: list[str]
) -> list[str]:
    """Return the command line for `slots` ranks of `program` on each of the `hosts` in the file `host_list`. mpiexec
    starts nothing itself: Hydra prints the commands, and PRRTE calls `agent` (a shell script) with them."""
    ranks = str(hosts * slots)
    if mpi.implementation == "MPICH":
        options = ["-launcher", "manual", "-localhost", "127.0.0.1", "-f", str(host_list), "-genvnone", "-wdir", "/"]
        return [str(mpi.mpiexec), *options, "-bind-to", "none", "-n", ranks, *program]
    prefix, plm, no_lookup = mpi.parameter_option, "plm_ssh", "prte_do_not_resolve"
    if prefix == "--mca":
        plm, no_lookup = "plm_rsh", "opal_if_do_not_resolve"
    parameters = {
        f"{plm}_agent": f"/bin/sh {agent}",
        f"{plm}_no_tree_spawn": "1",
        # Every prted connects to mpiexec directly. Otherwise, beyond 64 nodes, they connect to each other.
        "routed_radix": str(hosts + 1),
        # By default, mpiexec refuses more than 128 agents with --leave-session-attached.
        f"{plm}_num_concurrent": str(hosts + 1),
        no_lookup: "1",
    }
    options = [word for name, value in parameters.items() for word in (prefix, name, value)]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    options += ["--leave-session-attached", "--wdir", "/", "--bind-to", "none", "--hostfile", str(host_list)]
    mapping = ["--map-by", ":OVERSUBSCRIBE"] if prefix == "--prtemca" else ["--oversubscribe"]
    return [str(mpi.mpiexec), *options, *mapping, "-n", ranks, *program]


AGENT = """#!/bin/sh
# mpiexec calls this script instead of ssh: HOST COMMAND WORDS. It writes them to a file for the launcher, with a mark
# at the end. It starts no other program: with 256 of these scripts, that would take the most time.
umask 077
printf '%s\\0' "$@" "$0.end" > "$0.$$.call"
"""


def parse_hydra_parameters(line: str) -> tuple[int, int, ProxyParameters]:
    """Return the proxy's number, mpiexec's control port, and the other parameters from a HYDRA_LAUNCH line. Raises
    LaunchError for an unknown option."""
    words = shlex.split(line.removeprefix(HYDRA_LINE))
    options: dict[str, str] = {}
    remaining = iter(words[1:])
    for word in remaining:
        name = word.removeprefix("--")
        if name == word or name not in _HYDRA_OPTIONS | {"control-port"}:
            raise _build_error("hydra_pmi_proxy", word)
        options[name] = "" if name in _HYDRA_FLAGS else next(remaining, "")
    port = re.fullmatch(r".*:(\d+)", options.pop("control-port", ""))
    if port is None or not options.get("proxy-id", "").isdigit():
        raise _build_error("hydra_pmi_proxy", line)
    return int(options["proxy-id"]), int(port[1]), ProxyParameters(mpi="MPICH", options=tuple(options.items()))


def parse_agent_parameters(call: bytes) -> tuple[int, int, ProxyParameters]:
    """Return the daemon's number, from 0, mpiexec's port, and the other parameters from a call of the launch agent.
    Raises LaunchError for an unknown option."""
    arguments = [word.decode(errors="replace") for word in call.split(b"\0")[:-1]]
    # The words after the host are for a remote shell. The options follow the word that ends in prted.
    words = shlex.split(" ".join(arguments[1:]))
    start = next((index for index, word in enumerate(words) if re.search(r"(^|[/;])(prted|orted)$", word)), None)
    if start is None:
        raise _build_error("prted", " ".join(words))
    options: list[tuple[str, str]] = []
    contact, number = "", -1
    remaining = iter(words[start + 1 :])
    for word in remaining:
        if word in ("--prtemca", "--pmixmca", "--mca", "-mca", "--gprtemca", "--gpmixmca"):
            name, value = next(remaining, ""), next(remaining, "")
            if name in _CONTACTS:
                contact = value
            elif name == "ess_base_vpid":
                number = int(value) - 1 if value.isdigit() else -1
                options.append((name, value))
            elif name not in _NOT_FOR_WORKERS:
                options.append((name, value))
        elif word not in ("--daemonize", "--leave-session-attached", "--allow-run-as-root", "--debug-daemons"):
            raise _build_error("prted", word)
    # prterun-host-17@0.0;tcp://192.0.2.2,10.10.0.1:46039:24,24;tcp6://[fd00::2]:45649:64
    match = re.fullmatch(r"([^;]+);tcp://[^:;]*:(\d+)(?:[:;].*)?", contact)
    if match is None or number < 0:
        raise _build_error("prted", contact or "no contact address")
    parameters = ProxyParameters(mpi="OpenMPI", options=tuple(options), contact=match[1])
    return number, int(match[2]), parameters


def _build_error(program: str, word: str) -> LaunchError:
    return LaunchError(
        f"mpiexec starts {program} with {word[:200]!r}, which TopKube does not support",
        cause="this release was not tested with this version of MPI",
        next_step="use MPICH 4.0 to 5.0 or Open MPI 4.1 to 5.0 in the image",
    )


def build_proxy_command(parameters: ProxyParameters, mpi: Mpi, port: int) -> list[str]:
    """Return the command that starts this worker's proxy. `port` is the worker's end of the tunnel, on loopback.

    Raises LaunchError if the parameters contain an unknown option, or if the program does not exist.
    """
    if parameters.mpi != mpi.implementation:
        raise LaunchError(
            f"the launcher uses {parameters.mpi}, this worker's image has {mpi}",
            cause="spec.mpiImplementation names another MPI than the image contains",
            next_step=f"set spec.mpiImplementation to {mpi.implementation}, or use an image with {parameters.mpi}",
        )
    if parameters.mpi == "MPICH":
        for name, _ in parameters.options:
            if name not in _HYDRA_OPTIONS:
                raise _build_error("hydra_pmi_proxy", name)
        options = [word for name, value in parameters.options for word in _build_hydra_option(name, value)]
        return [_find_program(mpi, ["hydra_pmi_proxy"]), "--control-port", f"127.0.0.1:{port}", *options]
    program = _find_program(mpi, ["prted", "orted"])
    is_version_4 = program.endswith("orted")
    prefix = "--mca" if is_version_4 else "--prtemca"
    options = [word for name, value in parameters.options for word in (prefix, name, value)]
    contact = f"{parameters.contact};tcp://127.0.0.1:{port}" + ("" if is_version_4 else ":8")
    options += [prefix, "orte_hnp_uri" if is_version_4 else "prte_hnp_uri", contact]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and not is_version_4 else []
    return [program, "--leave-session-attached", *root, *options]


def _build_hydra_option(name: str, value: str) -> Iterable[str]:
    return [f"--{name}"] if name in _HYDRA_FLAGS else [f"--{name}", value]


def _find_program(mpi: Mpi, names: list[str]) -> str:
    for name in names:
        program = shutil.which(name, path=str(mpi.mpiexec.parent)) or shutil.which(name)
        if program:
            return program
    raise LaunchError(
        f"there is no {' or '.join(names)} in the folder of {mpi.mpiexec}",
        exit_code=127,
        cause=f"the image's {mpi.implementation} is incomplete",
        next_step="install the complete MPI in the image",
    )
