"""Worlds of ranks that wait for orders. There is one world per library; all are alive, so that contenders can
alternate.

A waiting rank sleeps in a socket read and takes no processor time from the world that is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from allreduce.network import Network

START_SECONDS = 90.0
ANSWER_SECONDS = 150.0
_AGENT = """#!/bin/sh
# agent [ssh options] HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in
NODES
esac
echo "no such node: $host" >&2; exit 1
"""
_PORTS = itertools.count(29500)
RANK = Path(__file__).with_name("rank.py")


@dataclass(frozen=True)
class Recipe:
    """The recipe of a world: its library, the Python in which it is installed, and carefully chosen settings."""

    name: str
    library: str  # mpich | openmpi | gloo
    python: Path
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    """Options for mpiexec."""
    script: Path = RANK
    """The program of every rank."""

    @property
    def settings_line(self) -> str:
        """The settings as one line."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment), *self.options])


class WorldFailed(RuntimeError):
    """A world did not start, did not answer in time, or one of its ranks raised."""


def write_agent(network: Network, directory: Path) -> Path:
    """Write the program that mpiexec calls instead of ssh: it enters the node and runs the command there."""
    nodes = [f'{node.address}) exec {shlex.join(node.wrap_command(["sh", "-c"]))} "$*" ;;' for node in network.nodes]
    path = directory / "agent.sh"
    path.write_text(_AGENT.replace("NODES", "\n".join(nodes)))
    path.chmod(0o755)
    return path


class RankWorld:
    """The ranks of one library: layout[i] ranks on node i; without a network, all ranks on this machine."""

    def __init__(self, recipe: Recipe, layout: tuple[int, ...], directory: Path, network: Network | None) -> None:
        self.recipe, self.layout, self.size = recipe, layout, sum(layout)
        self._log = directory / f"{recipe.name}.log"
        path = directory / f"{recipe.name}.socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(self.size)
            listener.settimeout(1.0)
            self._processes = self._start(path, directory, network)
            self._ranks = self._gather(listener)

    def _start(self, path: Path, directory: Path, network: Network | None) -> list[subprocess.Popen[str]]:
        recipe = self.recipe
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TOPKUBE_")},
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(directory),
            **dict(recipe.environment),
        }
        rank = [str(recipe.python), str(recipe.script), recipe.library, str(path), ",".join(map(str, self.layout))]
        binary = recipe.python.parent
        hosts = (
            []
            if network is None
            else [f"{node.address}:{slots}" for node, slots in zip(network.nodes, self.layout, strict=False)]
        )
        count = ["-n", str(self.size)]
        commands: list[list[str]]
        if recipe.library == "mpich":
            placement = [] if network is None else [
                "-localhost", network.control.address, "-launcher", "ssh", "-launcher-exec",
                str(write_agent(network, directory)), "-hosts", ",".join(hosts)]  # fmt: skip
            commands = [[str(binary / "mpiexec"), *placement, *recipe.options, *count, *rank]]
        elif recipe.library == "openmpi":
            placement = ["--host", f"localhost:{self.size}"] if network is None else [
                "--host", ",".join(hosts), "--prtemca", "plm_ssh_agent", str(write_agent(network, directory)),
                "--prtemca", "plm_ssh_no_tree_spawn", "1", "--mca", "btl_tcp_if_include", "eth0"]  # fmt: skip
            commands = [[str(binary / "mpirun"), "--allow-run-as-root", *placement, *recipe.options, *count, *rank]]
        else:
            node_of_rank = [node for node, slots in enumerate(self.layout) for _ in range(slots)]
            environment["GLOO_SOCKET_IFNAME"] = "lo" if network is None else "eth0"
            environment["MASTER_ADDR"] = "127.0.0.1" if network is None else network.nodes[0].address
            environment["MASTER_PORT"] = str(_find_free_port() if network is None else next(_PORTS))
            commands = []
            for index, node in enumerate(node_of_rank):
                command = ["env", f"RANK={index}", f"WORLD_SIZE={self.size}", *rank]
                commands.append(command if network is None else network.nodes[node].wrap_command(command))
        if network is not None and recipe.library != "gloo":
            commands = [network.control.wrap_command(command, network_only=True) for command in commands]
        log = self._log.open("w")
        return [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
            for command in commands
        ]

    def _gather(self, listener: socket.socket) -> list[Any]:
        ranks: dict[int, Any] = {}
        deadline = time.monotonic() + START_SECONDS
        while len(ranks) < self.size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                    self.close()
                    raise WorldFailed(
                        f"{self.recipe.name}: {len(ranks)} of {self.size} ranks started\n{self._read_log_tail()}"
                    ) from None
                continue
            connection.settimeout(ANSWER_SECONDS)
            stream = connection.makefile("rw")
            connection.close()
            hello = json.loads(stream.readline())
            ranks[hello["rank"]] = stream
        return [ranks[index] for index in range(self.size)]

    def _read_log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Send an order to every rank; return the answers in rank order. Raises WorldFailed with a traceback."""
        for stream in self._ranks:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        answers = []
        for index, stream in enumerate(self._ranks):
            try:
                line = stream.readline()
            except TimeoutError:
                raise WorldFailed(
                    f"{self.recipe.name} rank {index} did not answer {order}\n{self._read_log_tail()}"
                ) from None
            if not line:
                raise WorldFailed(f"{self.recipe.name} rank {index} ended during {order}\n{self._read_log_tail()}")
            answers.append(json.loads(line))
            if "error" in answers[-1]:
                raise WorldFailed(f"{self.recipe.name} rank {index}: {answers[-1]['error']}")
        return answers

    def close(self) -> None:
        for stream in getattr(self, "_ranks", []):
            stream.close()  # a rank ends when its orders do
        deadline = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> RankWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
