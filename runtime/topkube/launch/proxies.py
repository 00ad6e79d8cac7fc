"""The processes that join a worker to mpiexec: Hydra's proxy (MPICH), PRRTE's prted (Open MPI 5), orted (Open MPI 4).

mpiexec, in the launcher, says how it would start each of them; what it says is taken apart here into checked
parameters, and put together again in the worker, with the worker's own program and the worker's own end of the tunnel.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from topkube.errors import LaunchError
from topkube.launch.messages import ProxyParameters
from topkube.launch.mpi import Mpi

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
"""What Hydra of MPICH 3.4 to 5 tells its proxies, without the control port."""
_HYDRA_FLAGS = {"debug"}
_NOT_FOR_WORKERS = {
    f"plm_{plm}_{name}" for plm in ("ssh", "rsh") for name in ("agent", "no_tree_spawn", "num_concurrent")
}
_CONTACTS = {"prte_hnp_uri", "orte_hnp_uri"}


def mpiexec_command(mpi: Mpi, hosts: list[str], slots: int, agent: Path, program: list[str]) -> list[str]:
    """The command line that asks for `slots` ranks of `program` on each of `hosts` (addresses), in that order, without
    starting anything itself: Hydra prints how, PRRTE calls `agent` (a shell script)."""
    ranks = str(len(hosts) * slots)
    listed = ",".join(f"{host}:{slots}" for host in hosts)
    if mpi.implementation == "MPICH":
        options = ["-launcher", "manual", "-localhost", "127.0.0.1", "-hosts", listed, "-genvnone", "-wdir", "/"]
        return [str(mpi.mpiexec), *options, "-bind-to", "none", "-n", ranks, *program]
    prefix, plm, names = ("--prtemca", "plm_ssh", "prte_do_not_resolve")
    if mpi.version.split(".")[0].isdigit() and int(mpi.version.split(".")[0]) < 5:
        prefix, plm, names = "--mca", "plm_rsh", "opal_if_do_not_resolve"
    parameters = {
        f"{plm}_agent": f"/bin/sh {agent}",
        f"{plm}_no_tree_spawn": "1",
        # Every prted talks to mpiexec itself: otherwise beyond 64 nodes they go through each other.
        "routed_radix": str(len(hosts) + 1),
        # Beyond 128 it would wait for an agent to end, and with --leave-session-attached refuses to.
        f"{plm}_num_concurrent": str(len(hosts) + 1),
        names: "1",
    }
    options = [word for name, value in parameters.items() for word in (prefix, name, value)]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    options += ["--leave-session-attached", "--wdir", "/", "--bind-to", "none", "--host", listed]
    mapping = ["--map-by", ":OVERSUBSCRIBE"] if prefix == "--prtemca" else ["--oversubscribe"]
    return [str(mpi.mpiexec), *options, *mapping, "-n", ranks, *program]


AGENT = """#!/bin/sh
# mpiexec calls it instead of ssh: HOST COMMAND WORDS. Leaves them for the launcher, a mark last, and is done. Starts no
# other program: beside 256 of these that would take longest.
umask 077
printf '%s\\0' "$@" "$0.end" > "$0.$$.call"
"""


def hydra_parameters(line: str) -> tuple[int, int, ProxyParameters]:
    """Of one HYDRA_LAUNCH line: the proxy's number, mpiexec's control port, and the rest."""
    words = shlex.split(line.removeprefix(HYDRA_LINE))
    options: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        name = word.removeprefix("--")
        if name == word or name not in _HYDRA_OPTIONS | {"control-port"}:
            raise _unknown("hydra_pmi_proxy", word)
        options[name] = "" if name in _HYDRA_FLAGS else next(rest, "")
    port = re.fullmatch(r".*:(\d+)", options.pop("control-port", ""))
    if port is None or not options.get("proxy-id", "").isdigit():
        raise _unknown("hydra_pmi_proxy", line)
    return int(options["proxy-id"]), int(port[1]), ProxyParameters(mpi="MPICH", options=tuple(options.items()))


def agent_parameters(call: bytes) -> tuple[int, int, ProxyParameters]:
    """Of what the launch agent was called with: the daemon's number from 0, mpiexec's contact port, and the rest."""
    given = [word.decode(errors="replace") for word in call.split(b"\0")[:-1]]
    # The words behind the host are meant for a remote shell; the program's own follow the one that ends in prted.
    words = shlex.split(" ".join(given[1:]))
    start = next((i for i, word in enumerate(words) if re.search(r"(^|[/;])(prted|orted)$", word)), None)
    if start is None:
        raise _unknown("prted", " ".join(words))
    options: list[tuple[str, str]] = []
    contact, number = "", -1
    rest = iter(words[start + 1 :])
    for word in rest:
        if word in ("--prtemca", "--pmixmca", "--mca", "-mca", "--gprtemca", "--gpmixmca"):
            name, value = next(rest, ""), next(rest, "")
            if name in _CONTACTS:
                contact = value
            elif name == "ess_base_vpid":
                number = int(value) - 1 if value.isdigit() else -1
                options.append((name, value))
            elif name not in _NOT_FOR_WORKERS:
                options.append((name, value))
        elif word not in ("--daemonize", "--leave-session-attached", "--allow-run-as-root", "--debug-daemons"):
            raise _unknown("prted", word)
    # prterun-host-17@0.0;tcp://192.0.2.2,10.10.0.1:46039:24,24;tcp6://[fd00::2]:45649:64
    found = re.fullmatch(r"([^;]+);tcp://[^:;]*:(\d+)(?:[:;].*)?", contact)
    if found is None or number < 0:
        raise _unknown("prted", contact or "no contact address")
    parameters = ProxyParameters(mpi="OpenMPI", options=tuple(options), contact=found[1])
    return number, int(found[2]), parameters


def _unknown(program: str, word: str) -> LaunchError:
    return LaunchError(
        f"mpiexec wants {program} started with {word[:200]!r}, which is not known here",
        cause="an MPI of another version than those that this release was tried with",
        next_step="use MPICH 4.0 to 5.0 or Open MPI 4.1 to 5.0 in the image",
    )


def proxy_command(parameters: ProxyParameters, mpi: Mpi, port: int) -> list[str]:
    """The command that starts this worker's proxy; `port` is the worker's end of the tunnel, on its loopback.

    Raises LaunchError where the parameters ask for more than a proxy needs, or the program is not there.
    """
    if parameters.mpi != mpi.implementation:
        raise LaunchError(
            f"the launcher uses {parameters.mpi}, this worker's image has {mpi}",
            cause="spec.mpiImplementation names another MPI than the image holds",
            next_step=f"set spec.mpiImplementation to {mpi.implementation}, or use an image with {parameters.mpi}",
        )
    if parameters.mpi == "MPICH":
        for name, _ in parameters.options:
            if name not in _HYDRA_OPTIONS:
                raise _unknown("hydra_pmi_proxy", name)
        options = [word for name, value in parameters.options for word in _hydra_option(name, value)]
        return [_beside(mpi, ["hydra_pmi_proxy"]), "--control-port", f"127.0.0.1:{port}", *options]
    program = _beside(mpi, ["prted", "orted"])
    four = program.endswith("orted")
    prefix = "--mca" if four else "--prtemca"
    options = [word for name, value in parameters.options for word in (prefix, name, value)]
    contact = f"{parameters.contact};tcp://127.0.0.1:{port}" + ("" if four else ":8")
    options += [prefix, "orte_hnp_uri" if four else "prte_hnp_uri", contact]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and not four else []
    return [program, "--leave-session-attached", *root, *options]


def _hydra_option(name: str, value: str) -> Iterable[str]:
    return [f"--{name}"] if name in _HYDRA_FLAGS else [f"--{name}", value]


def _beside(mpi: Mpi, names: list[str]) -> str:
    for name in names:
        found = shutil.which(name, path=str(mpi.mpiexec.parent)) or shutil.which(name)
        if found:
            return found
    raise LaunchError(
        f"there is no {' or '.join(names)} beside {mpi.mpiexec}",
        exit_code=127,
        cause=f"the image's {mpi.implementation} is incomplete",
        next_step="install the whole of it in the image",
    )
