"""mpiexec inside the launcher. It is bound to loopback and starts no processes itself."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from topkube.environment import copy_environment
from topkube.errors import LaunchError
from topkube.launch.connection.messages import ProxyParameters
from topkube.launch.host.arguments import check_arguments
from topkube.launch.host.loopback import add_loopback_library
from topkube.launch.host.processes import list_descendants, prepare_to_die_with_parent, signal_all
from topkube.launch.mpi.mpi_library import Mpi
from topkube.launch.mpi.proxies import (
    AGENT,
    HYDRA_END,
    HYDRA_LINE,
    build_host_list,
    build_mpiexec_command,
    parse_agent_parameters,
    parse_hydra_parameters,
)

_START_SECONDS, _PROXY_SECONDS = 60.0, 0.05
"""The time in which mpiexec must print the parameters of its proxies: at least, and for each proxy."""
_TAIL_LINES = 20
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
"""The variables that mpiexec inherits from the launcher. The ranks inherit from their workers."""


class Mpiexec:
    """mpiexec of an attempt. `iterate_proxies` starts it; `say` prints its lines."""

    def __init__(
        self,
        mpi: Mpi,
        hosts: list[str],
        slots: int,
        program: list[str],
        directory: Path,
        say: Callable[[str], None] = print,
    ) -> None:
        self._say = say
        self._mpi, self._count, self._directory = mpi, len(hosts), directory
        self._agent = directory / "agent"
        self._host_list, self._hosts = directory / "hosts", build_host_list(mpi, hosts, slots)
        self._command = build_mpiexec_command(mpi, self._host_list, len(hosts), slots, self._agent, program)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that mpiexec printed."""

    @property
    def code(self) -> int | None:
        """The exit code; 128 plus the number of the signal if a signal ended it; None while it runs."""
        if self._process is None or self._process.returncode is None:
            return None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    async def iterate_proxies(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        """Start mpiexec, and yield for each worker, in any order: its number, the control port, and the parameters of
        its proxy. Raises LaunchError if mpiexec does not start all proxies."""
        self._agent.write_text(AGENT, encoding="ascii")
        self._host_list.write_text(self._hosts, encoding="ascii")
        check_arguments(self._command, self._build_environment())
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._build_environment(),
            cwd="/",
            start_new_session=True,
            preexec_fn=prepare_to_die_with_parent(signal.SIGKILL),
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        calls = self._read_hydra_calls() if self._mpi.implementation == "MPICH" else self._read_agent_calls()
        started_numbers = set[int]()
        most = max(_START_SECONDS, self._count * _PROXY_SECONDS)
        try:
            async with asyncio.timeout(most):
                async for number, port, parameters in calls:
                    if number in started_numbers or number >= self._count:
                        raise self._build_failure(
                            f"started proxy {number} of {self._count} twice, or there is no such proxy"
                        )
                    started_numbers.add(number)
                    yield number, port, parameters
                    if len(started_numbers) == self._count:
                        break
        except TimeoutError:
            raise self._build_failure(
                f"started {len(started_numbers)} of {self._count} proxies within {most:g} s"
            ) from None
        if len(started_numbers) < self._count:
            raise self._build_failure(f"started {len(started_numbers)} proxies instead of {self._count}")

    async def _read_hydra_calls(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        while (line := await self._lines.get()) != HYDRA_END:
            yield parse_hydra_parameters(line)

    async def _read_agent_calls(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        parsed_names = set[str]()
        end = b"\0%s.end\0" % os.fsencode(self._agent)
        while self.code is None:
            for name in os.listdir(self._directory):
                if name.endswith(".call") and name not in parsed_names:
                    call = (self._directory / name).read_bytes()
                    if call.endswith(end):  # else it is still being written
                        parsed_names.add(name)
                        yield parse_agent_parameters(call[: 1 - len(end)])  # with the NUL after the last word
            await asyncio.sleep(0.01)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            async for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip("\n")
                if line.startswith(HYDRA_LINE) or line == HYDRA_END:
                    self._lines.put_nowait(line)
                else:
                    self.tail.append(line)
                    self._say(f"mpiexec: {line}")
        await process.wait()
        self._lines.put_nowait(HYDRA_END)

    def _build_environment(self) -> dict[str, str]:
        environment = {name: value for name, value in copy_environment().items() if name in _INHERITED}
        environment.update(self._mpi.build_environment())
        environment.update({"HOME": str(self._directory), "TMPDIR": str(self._directory)})
        add_loopback_library(environment)
        return environment

    def find_exposed_ports(self) -> list[str]:
        """Return a warning for each port of mpiexec that other hosts can reach."""
        if self._process is None:
            return []
        pids = [self._process.pid, *list_descendants(self._process.pid)]
        return [
            f"warning: mpiexec listens on {address}, which has no authentication; the job's NetworkPolicy must block it"
            for address in find_listening_addresses(pids)
            if not address.startswith(("127.", "[::1]"))
        ]

    async def end(self) -> None:
        """Kill mpiexec and its children."""
        if self._process is not None:
            pids = [self._process.pid, *list_descendants(self._process.pid)] if self._process.returncode is None else []
            signal_all(pids, signal.SIGKILL)
            if self._reader is not None:
                await self._reader

    def _build_failure(self, what: str) -> LaunchError:
        lines = "\n".join(self.tail)
        return LaunchError(
            f"mpiexec {what}" + (f"; it printed:\n{lines}" if lines else ""),
            exit_code=self.code or 1,
            cause="the MPI in the launcher's image is broken, or its version is not supported",
            next_step="run `topkube doctor` in the image",
        )


def find_listening_addresses(pids: list[int]) -> list[str]:
    """Return the addresses (HOST:PORT, [HOST]:PORT) on which these processes listen for TCP."""
    sockets = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(descriptor))
    addresses: list[str] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    addresses.append(_parse_address(fields[1]))
    return addresses


def _parse_address(text: str) -> str:
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"
