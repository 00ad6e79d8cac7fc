"""mpiexec inside the launcher: bound to loopback, starting nothing itself, watched until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from topkube.errors import LaunchError
from topkube.launch.messages import ProxyParameters
from topkube.launch.mpi import Mpi
from topkube.launch.processes import descendants, dies_with_parent, signal_all
from topkube.launch.proxies import AGENT, HYDRA_END, HYDRA_LINE, agent_parameters, hydra_parameters, mpiexec_command

_START_SECONDS = 60.0
"""For mpiexec to say how it wants its proxies started."""
_TAIL_LINES = 20
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
"""Of the launcher's environment, what mpiexec gets; the ranks' is their workers'."""


class Mpiexec:
    """Starts at the first step of `proxies`."""

    def __init__(self, mpi: Mpi, hosts: list[str], slots: int, program: list[str], directory: Path) -> None:
        self._mpi, self._count, self._directory = mpi, len(hosts), directory
        self._agent = directory / "agent"
        self._command = mpiexec_command(mpi, hosts, slots, self._agent, program)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that mpiexec printed."""

    @property
    def code(self) -> int | None:
        """Its exit code, 128 and the number where a signal ended it; None while it runs."""
        if self._process is None or self._process.returncode is None:
            return None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    async def proxies(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        """Starts mpiexec, and gives for each worker in any order: its number, the control port, the proxy's
        parameters. Raises LaunchError where mpiexec does not come so far."""
        self._agent.write_text(AGENT, encoding="ascii")
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(),
            cwd="/",
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        calls = self._hydra_calls() if self._mpi.implementation == "MPICH" else self._agent_calls()
        seen = set[int]()
        try:
            async with asyncio.timeout(_START_SECONDS):
                async for number, port, parameters in calls:
                    if number in seen or number >= self._count:
                        raise self._failed(f"named proxy {number} of {self._count} twice or too many")
                    seen.add(number)
                    yield number, port, parameters
                    if len(seen) == self._count:
                        break
        except TimeoutError:
            raise self._failed(f"asked for {len(seen)} of {self._count} proxies within {_START_SECONDS:g} s") from None
        if len(seen) < self._count:
            raise self._failed(f"asked for {len(seen)} proxies, not {self._count}")

    async def _hydra_calls(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        while (line := await self._lines.get()) != HYDRA_END:
            yield hydra_parameters(line)

    async def _agent_calls(self) -> AsyncIterator[tuple[int, int, ProxyParameters]]:
        taken = set[str]()
        end = b"\0%s.end\0" % os.fsencode(self._agent)
        while self.code is None:
            for name in os.listdir(self._directory):
                if name.endswith(".call") and name not in taken:
                    call = (self._directory / name).read_bytes()
                    if call.endswith(end):  # else it is still being written
                        taken.add(name)
                        yield agent_parameters(call[: 1 - len(end)])
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
                    print(line, flush=True)
        await process.wait()
        self._lines.put_nowait(HYDRA_END)

    def _environment(self) -> dict[str, str]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment.update(self._mpi.environment())
        environment.update({"HOME": str(self._directory), "TMPDIR": str(self._directory)})
        library = loopback_library()
        if library is not None:
            environment["LD_PRELOAD"] = str(library)
        return environment

    def exposed(self) -> list[str]:
        """A warning for each port of mpiexec that hosts beyond this pod can reach."""
        if self._process is None:
            return []
        pids = [self._process.pid, *descendants(self._process.pid)]
        return [
            f"warning: mpiexec listens on {address}, which has no authentication; the job's NetworkPolicy must close it"
            for address in listening(pids)
            if not address.startswith(("127.", "[::1]"))
        ]

    async def end(self) -> None:
        """Kills what is left of it."""
        if self._process is not None:
            pids = [self._process.pid, *descendants(self._process.pid)] if self._process.returncode is None else []
            signal_all(pids, signal.SIGKILL)
            if self._reader is not None:
                await self._reader

    def _failed(self, what: str) -> LaunchError:
        said = "\n".join(self.tail)
        return LaunchError(
            f"mpiexec {what}" + (f"; it printed:\n{said}" if said else ""),
            exit_code=self.code or 1,
            cause="an MPI of an unknown version, or one that is broken in the launcher's image",
            next_step="run `topkube doctor` in the image",
        )


def loopback_library() -> Path | None:
    """The library that binds mpiexec to loopback; None where this installation was built without it."""
    kernels = importlib.util.find_spec("topkube._kernels")
    if kernels is None or kernels.origin is None:
        return None
    library = Path(kernels.origin).parent / "_loopback.so"
    return library if library.exists() else None


def listening(pids: list[int]) -> list[str]:
    """Addresses (HOST:PORT, [HOST]:PORT) on which these processes listen for TCP."""
    sockets = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(descriptor))
    found: list[str] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.append(_address(fields[1]))
    return found


def _address(text: str) -> str:
    import ipaddress

    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"
