"""How long a job of many workers takes from its last worker's call until every rank knows all others.

Real: the launcher (`topkube launch`, its TLS, its sessions), mpiexec, and one proxy per worker (hydra_pmi_proxy or
prted) that reaches mpiexec through its worker's tunnel.
Simulated, as 256 workers share this machine: all workers are coroutines of this one process, each with an address,
a token, a TLS session and a tunnel of its own; there are no pods. One rank per worker, a C program without the shim.
Under MPICH it says to its proxy what MPI_Init says (join, publish an address, wait for all, read all addresses) without
MPI's own devices: 256 of MPICH's ranks spin on a few processors while they wait, and would measure that. Under Open MPI
it is MPI_Init itself, told to give the processor away while it waits, and with its TCP device alone.

    .venv/bin/python benchmarks/launch_scale.py            # both MPIs, 2 to 256 workers; needs root for Open MPI
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/mpi"))

from pods import KEY, PYTHONS, UID, PlayedJob  # noqa: E402  the tests' stand-in for the operator

from topkube.launch.contract import JOIN_PATH, worker_token  # noqa: E402
from topkube.launch.link import FRAME_BYTES, Link  # noqa: E402
from topkube.launch.messages import (  # noqa: E402
    Close,
    End,
    Ended,
    Hello,
    ProxyEnded,
    Report,
    Running,
    Said,
    Start,
    Welcome,
    read,
)
from topkube.launch.mpi import Mpi, find  # noqa: E402
from topkube.launch.proxies import proxy_command  # noqa: E402
from topkube.launch.tunnel import Tunnel  # noqa: E402

SIZES = (2, 16, 64, 65, 128, 129, 256)
GOAL_SECONDS = 10.0


@dataclass
class SimulatedWorker:
    """One worker in little."""

    index: int
    ip: str
    port: int
    mpi: Mpi
    program: Path
    directory: Path
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    proxy: subprocess.Popen[bytes] | None = None
    refused: str = ""

    async def call(self, client: aiohttp.ClientSession) -> None:
        headers = {"Authorization": f"Bearer {worker_token(KEY, UID, self.index, 1)}"}
        url = f"https://127.0.0.1:{self.port}{JOIN_PATH}?index={self.index}&attempt=1"
        socket = await client.ws_connect(url, headers=headers, max_msg_size=FRAME_BYTES)
        hello = Hello(
            session=str(self.index), ip=self.ip, slots=1, python=str(self.program), mpi=str(self.mpi), time=time.time()
        )
        await socket.send_str(hello.text())
        answer = read(await socket.receive_str())
        assert isinstance(answer, Welcome)
        self.link = Link(self.take, lambda stream, data: self.tunnel.take(stream, data))
        self.tunnel = Tunnel(self.link)
        await self.link.run(socket, answer.received)

    def take(self, said: Said) -> None:
        if isinstance(said, Start):
            self.starting = asyncio.create_task(self.start(said))
        elif isinstance(said, Close):
            self.tunnel.closed(said.stream)
        elif isinstance(said, End):
            self.refused = "" if said.over else "the launcher ended the attempt"
            if self.proxy is not None and self.proxy.poll() is None:
                self.proxy.kill()
            self.link.send(Ended())
            self.ended.set()

    async def start(self, start: Start) -> None:
        command = proxy_command(start.proxy, self.mpi, await self.tunnel.listen())
        if self.mpi.implementation == "OpenMPI":  # nodes are told apart by their host names, as pods have
            command = ["unshare", "--uts", "sh", "-c", f'hostname w{self.index}; exec "$@"', "sh", *command]
        temporary = self.directory / f"t{self.index}"
        temporary.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(temporary), "TMPDIR": str(temporary)}
        environment |= {**start.environment, **self.mpi.environment(), "TOPKUBE_RUN_DIRECTORY": str(self.directory)}
        if self.mpi.implementation == "OpenMPI":
            environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
        with (self.directory / f"proxy-{self.index}.log").open("wb") as log:
            self.proxy = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        left = self.directory / f"rank-{self.index}.left"
        while not left.exists() and self.proxy.poll() is None:
            await asyncio.sleep(0.2)
        self.link.send(Running())
        while self.proxy.poll() is None:
            await asyncio.sleep(0.2)
        code = self.proxy.returncode
        now = time.time()
        report = {"rank": self.index, "host": "", "command": [], "started": now, "ended": now, "exit_code": code}
        self.link.send(Report(report=report))
        self.link.send(ProxyEnded(exit_code=code))


async def measure(mpi: Mpi, workers: int, program: Path) -> dict[str, object]:
    """One launch of `workers` workers with one rank each."""
    directory = Path(tempfile.mkdtemp(prefix="ts-"))
    with PlayedJob(directory, [], workers, 1, mpi.implementation) as job:
        began = time.time()
        launcher = job.start_launcher(rendezvous_seconds=120.0)
        while "waiting for" not in launcher.output:
            await asyncio.sleep(0.02)
        tasks, all_workers, sessions = [], [], []
        for index in range(workers):
            ip = f"127.60.{index // 250}.{index % 250 + 2}"
            worker = SimulatedWorker(index, ip, job.port, mpi, program, directory)
            connector = aiohttp.TCPConnector(ssl=job.tls, local_addr=(ip, 0), limit=0)
            client = aiohttp.ClientSession(connector=connector)
            all_workers.append(worker)
            sessions.append(client)
            tasks.append(asyncio.create_task(worker.call(client)))
        while launcher.output.count("has joined") < workers and launcher.process.poll() is None:
            await asyncio.sleep(0.02)
        joined = time.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(150):
                await asyncio.gather(*(worker.ended.wait() for worker in all_workers))
        for worker in all_workers:
            if worker.proxy is not None and worker.proxy.poll() is None:
                worker.proxy.send_signal(signal.SIGKILL)
        code = await asyncio.to_thread(launcher.wait, 30)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in sessions:
            await client.close()
        left = [path.read_text().split() for path in directory.glob("rank-*.left")]
        everyone = code == 0 and len(left) == workers and all(int(size) == workers for size, _ in left)
        result: dict[str, object] = {
            "mpi": str(mpi),
            "workers": workers,
            "ok": everyone,
            "rendezvous_seconds": round(joined - began, 2),
            "start_seconds": round(max(float(at) for _, at in left) - joined, 2) if left else None,
        }
        if not everyone:
            result["said"] = launcher.output[-2000:]
    shutil.rmtree(directory, ignore_errors=True)
    return result


def compiled(mpi: Mpi, directory: Path) -> Path:
    """The rank for this MPI."""
    prefix = mpi.mpiexec.parent.parent
    program = directory / f"rank-{mpi.implementation}"
    source, more = "launch_rank_pmi.c", list[str]()
    if mpi.implementation == "OpenMPI":
        source, library = "launch_rank_mpi.c", prefix / "lib"
        more = [f"-I{prefix / 'include'}", f"-L{library}", f"-Wl,-rpath,{library}", "-lmpi"]
    subprocess.run(["gcc", "-O1", "-o", str(program), str(ROOT / "benchmarks" / source), *more], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--mpi", nargs="+", choices=("MPICH", "OpenMPI"), default=("MPICH", "OpenMPI"))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/launch-scale.json")
    options = parser.parse_args()
    results = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    for name in options.mpi:
        mpi = find(PYTHONS[name].parent)
        with tempfile.TemporaryDirectory() as directory:
            program = compiled(mpi, Path(directory))
            for workers in options.sizes:
                result = asyncio.run(measure(mpi, workers, program))
                print(json.dumps(result), flush=True)
                results = [one for one in results if (one["mpi"], one["workers"]) != (str(mpi), workers)] + [result]
                machine = {"processors": os.cpu_count(), "system": platform.platform()}
                text = {"machine": machine, "goal_seconds": GOAL_SECONDS, "runs": results}
                options.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
