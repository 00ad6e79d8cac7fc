"""Measure the start of jobs with many workers, from the call of the last worker until every rank has left MPI_Init.

Real parts: the launcher (`topkube launch`, its TLS, its sessions), mpiexec, one proxy per worker (hydra_pmi_proxy or
prted) that reaches mpiexec through its worker's tunnel, and one rank per worker, a C program that calls MPI_Init. The
workers are simulated, because they share this machine: each is a coroutine of this process with its own address, token,
TLS session and tunnel; there are no pods. Waiting ranks spin, so they run with the lowest priority here. With Open MPI
they use only its TCP device. MPICH is measured twice: with UCX, where MPI_Init of every rank connects to all other
ranks, and with OFI, where it does not.

Most of the time is spent on starting hundreds of processes that call MPI_Init on a few processors. So each size is also
measured without TopKube (the floor), in turn: mpiexec starts the same number of the same proxies itself, they connect
to it directly, and the same ranks run. The results are the ratio, and the processor time of the parts.

    .venv/bin/python benchmarks/launch_scale.py            # everything, 2 to 256 workers; needs root

It runs in its own PID namespace, so that no process is left behind. It also runs in its own cgroup. Without a cgroup,
Linux divides the processors among sessions (autogroup) before it applies priorities. Every rank is a session, so the
waiting ranks would take nearly all processor time from the proxies for which they wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/mpi"))
sys.path.insert(0, str(ROOT / "tests/cluster"))

from localkube.cgroups import Group, list_hierarchies  # noqa: E402
from pods import KEY, PYTHONS, UID, SimulatedJob  # noqa: E402  the tests' stand-in for the operator

from topkube.launch.connection.link import FRAME_BYTES, Link  # noqa: E402
from topkube.launch.connection.messages import (  # noqa: E402
    AnyMessage,
    Close,
    End,
    Ended,
    Hello,
    ProxyEnded,
    Report,
    Running,
    Start,
    Welcome,
    parse_message,
)
from topkube.launch.connection.tunnel import Tunnel  # noqa: E402
from topkube.launch.contract import JOIN_PATH, compute_worker_token  # noqa: E402
from topkube.launch.host.processes import prepare_to_die_with_parent  # noqa: E402
from topkube.launch.mpi.mpi_library import Mpi, find_mpi  # noqa: E402
from topkube.launch.mpi.proxies import build_proxy_command  # noqa: E402

SIZES = (2, 16, 64, 65, 128, 129, 256)
GOAL_SECONDS = 10.0
INSIDE = "TOPKUBE_BENCH_INSIDE"
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "MPICH-OFI": ("MPICH", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
    "MPICH-UCX": ("MPICH", {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
    "OpenMPI": (
        "OpenMPI",
        {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"},
    ),
}
"""The MPI libraries, with the environment variables of their ranks."""


def list_addresses(workers: int) -> list[str]:
    return [f"127.60.{index // 250}.{index % 250 + 2}" for index in range(workers)]


@dataclass
class Programs:
    """The programs that the proxies start, and their environment."""

    rank: Path
    host: Path
    settings: dict[str, str]

    def wrap_for_host(self, mpi: Mpi, index: int, command: list[str]) -> list[str]:
        return [str(self.host), f"w{index}", *command] if mpi.implementation == "OpenMPI" else command

    def build_environment(self, mpi: Mpi, directory: Path) -> dict[str, str]:
        return {**mpi.build_environment(), **self.settings, "TOPKUBE_RUN_DIRECTORY": str(directory)}


@dataclass
class SimulatedWorker:
    """A worker that is a coroutine of this process: it answers the launcher, and starts a real proxy."""

    index: int
    ip: str
    port: int
    mpi: Mpi
    programs: Programs
    directory: Path
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    proxy: subprocess.Popen[bytes] | None = None

    async def call(self, client: aiohttp.ClientSession) -> None:
        headers = {"Authorization": f"Bearer {compute_worker_token(KEY, UID, self.index, 1)}"}
        url = f"https://127.0.0.1:{self.port}{JOIN_PATH}?index={self.index}&attempt=1"
        socket = await client.ws_connect(url, headers=headers, max_msg_size=FRAME_BYTES)
        program = str(self.programs.rank)
        hello = Hello(session=str(self.index), ip=self.ip, slots=1, python=program, mpi=str(self.mpi), time=time.time())
        await socket.send_str(hello.to_json())
        answer = parse_message(await socket.receive_str())
        assert isinstance(answer, Welcome)
        self.link = Link(self.handle_message, lambda stream, data: self.tunnel.write_to_stream(stream, data))
        self.tunnel = Tunnel(self.link)
        await self.link.run(socket, answer.received)

    def handle_message(self, message: AnyMessage) -> None:
        if isinstance(message, Start):
            self.starting = asyncio.create_task(self.start(message))
        elif isinstance(message, Close):
            self.tunnel.close_stream(message.stream)
        elif isinstance(message, End):
            if self.proxy is not None and self.proxy.poll() is None:
                self.proxy.kill()
            self.link.send(Ended())
            self.ended.set()

    async def start(self, start: Start) -> None:
        command = build_proxy_command(start.proxy, self.mpi, await self.tunnel.listen())
        temporary = self.directory / f"t{self.index}"
        temporary.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(temporary), "TMPDIR": str(temporary)}
        environment |= {**start.environment, **self.programs.build_environment(self.mpi, self.directory)}
        with (self.directory / f"proxy-{self.index}.log").open("wb") as log:
            self.proxy = subprocess.Popen(
                self.programs.wrap_for_host(self.mpi, self.index, command),
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            )  # fmt: skip
        self.link.send(Running())
        await wait_for_end(self.proxy)
        now = time.time()
        code = self.proxy.wait()
        report = {"rank": self.index, "host": "", "command": [], "started": now, "ended": now, "exit_code": code}
        self.link.send(Report(report=report))
        self.link.send(ProxyEnded(exit_code=code))


async def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process ends, without a thread and without polling."""
    descriptor, is_over = os.pidfd_open(process.pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, is_over.set)
    await is_over.wait()
    loop.remove_reader(descriptor)
    os.close(descriptor)


class ProcessorSeconds(NamedTuple):
    """The processor time of the launcher, and of this process, which simulates all workers, since a start."""

    launcher: float
    workers: float

    @classmethod
    def read(cls, launcher: int, own_before: float) -> ProcessorSeconds:
        """Return the present times. `launcher` is a process id, `own_before` the time of this process at the start."""
        return cls(read_processor_seconds(launcher), time.process_time() - own_before)


def read_processor_seconds(pid: int) -> float:
    """Return the processor time of a living process, without its children."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(fields[i]) for i in (11, 12)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def read_leave_time(directory: Path, workers: int) -> float | None:
    """Return when the last rank left MPI_Init; None if a rank did not, or saw another number of ranks."""
    records = [path.read_text().split() for path in directory.glob("rank-*.left")]
    is_complete = len(records) == workers and all(int(size) == workers for size, _ in records)
    return max(float(left_at) for _, left_at in records) if is_complete else None


async def measure_launch(
    mpi: Mpi, workers: int, programs: Programs, directory: Path, seconds: float
) -> dict[str, object]:
    """Measure a launch by TopKube."""
    with SimulatedJob(directory, [], workers, 1, mpi.implementation) as job:
        began, own_before = time.time(), time.process_time()
        launcher = job.start_launcher(rendezvous_seconds=120.0)
        while "waiting for" not in launcher.output:
            await asyncio.sleep(0.02)
        tasks, all_workers, sessions = [], [], []
        for index, ip in enumerate(list_addresses(workers)):
            worker = SimulatedWorker(index, ip, job.port, mpi, programs, directory)
            client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=job.tls, local_addr=(ip, 0), limit=0))
            all_workers.append(worker)
            sessions.append(client)
            tasks.append(asyncio.create_task(worker.call(client)))
        while launcher.output.count("has joined") < workers and launcher.process.poll() is None:
            await asyncio.sleep(0.02)
        joined = time.time()
        used_before_start = ProcessorSeconds.read(launcher.process.pid, own_before)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while read_leave_time(directory, workers) is None and launcher.process.poll() is None:
                    await asyncio.sleep(0.25)
        used = ProcessorSeconds.read(launcher.process.pid, own_before)
        try:
            async with asyncio.timeout(20):
                await asyncio.gather(*(worker.ended.wait() for worker in all_workers))
        except TimeoutError:
            for worker in all_workers:
                if worker.proxy is not None and worker.proxy.poll() is None:
                    worker.proxy.send_signal(signal.SIGKILL)
            launcher.process.terminate()
        code = await asyncio.to_thread(launcher.wait, 30)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in sessions:
            await client.close()
        last = read_leave_time(directory, workers)
        result: dict[str, object] = {
            "ok": code == 0 and last is not None,
            "rendezvous_seconds": round(joined - began, 2),
            # The output is read every 0.02 s, so the ranks of a small job may leave before `joined`.
            "start_seconds": round(max(last - joined, 0.0), 2) if last is not None else None,
            "launcher_processor_seconds": round(used.launcher - used_before_start.launcher, 2),
            "workers_processor_seconds": round(used.workers - used_before_start.workers, 2),
        }
        if not result["ok"]:
            result["said"] = launcher.output[-2000:]
    return result


def measure_floor(mpi: Mpi, workers: int, programs: Programs, directory: Path, seconds: float) -> dict[str, object]:
    """Measure the same proxies and ranks, started by mpiexec itself."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "TMPDIR": str(directory)}
    environment |= programs.build_environment(mpi, directory)
    command = [str(mpi.mpiexec)]
    if mpi.implementation == "MPICH":
        command += ["-launcher", "fork", "-hosts", ",".join(list_addresses(workers)), "-bind-to", "none"]
    else:
        agent = directory / "agent"
        agent.write_text(f'#!/bin/sh\nhost=$1; shift; exec {programs.host} "$host" /bin/sh -c "$*"\n')
        agent.chmod(0o755)
        command += ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        # By default, the proxy of the 129th worker waits until another proxy ends.
        command += ["--prtemca", "plm_ssh_num_concurrent", str(workers + 1)]
        command += ["--prtemca", "prte_if_do_not_resolve", "1", "--allow-run-as-root", "--bind-to", "none"]
        command += ["--leave-session-attached", "--map-by", ":OVERSUBSCRIBE"]
        command += ["--host", ",".join(f"w{index}:1" for index in range(workers))]
    with (directory / "mpiexec.log").open("wb") as log:
        began = time.time()
        process = subprocess.Popen(
            [*command, "-n", str(workers), str(programs.rank)],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = read_leave_time(directory, workers)
    result: dict[str, object] = {"floor_seconds": round(last - began, 2) if last is not None else None}
    if last is None:
        result["floor_said"] = (directory / "mpiexec.log").read_text(errors="replace")[-1000:]
    return result


def measure(way: str, mpi: Mpi, workers: int, programs: Programs, seconds: float) -> dict[str, object]:
    """Measure the floor, then the launch."""
    result: dict[str, object] = {"way": way, "mpi": str(mpi), "workers": workers}
    for run in (measure_floor, measure_launch):
        directory = Path(tempfile.mkdtemp(prefix="ts-"))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result_of_run = run(mpi, workers, programs, directory, seconds)
        result |= result_of_run if isinstance(result_of_run, dict) else asyncio.run(result_of_run)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        name = "floor" if run is measure_floor else "all"
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result[f"{name}_children_processor_seconds"] = round(used, 2)
        shutil.rmtree(directory, ignore_errors=True)
    own_seconds, floor_seconds = result["start_seconds"], result["floor_seconds"]
    if isinstance(own_seconds, float) and isinstance(floor_seconds, float):
        result["times_the_floor"] = round(own_seconds / floor_seconds, 2)
    return result


def compile_programs(mpi: Mpi, settings: dict[str, str], directory: Path) -> Programs:
    """Compile the rank for this MPI, and the program that gives a process a host name."""
    prefix = mpi.mpiexec.parent.parent
    programs = Programs(directory / f"rank-{mpi.implementation}", directory / "host", settings)
    library = prefix / "lib"
    flags = [f"-I{prefix / 'include'}", f"-L{library}", f"-Wl,-rpath,{library}", "-lmpi"]
    for program, source, options in ((programs.rank, "launch_rank.c", flags), (programs.host, "launch_host.c", [])):
        subprocess.run(["gcc", "-O1", "-o", str(program), str(ROOT / "benchmarks" / source), *options], check=True)
    return programs


def run_alone() -> int:
    """Run this script again in its own PID namespace and cgroup; return its exit code."""
    group = Group("topkube-launch-scale")
    group.remove()  # left by a killed run
    group.make()
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv]
    die_with_parent = prepare_to_die_with_parent(signal.SIGKILL)

    def enter() -> None:
        die_with_parent()
        for hierarchy in list_hierarchies():
            (hierarchy / group.path / "cgroup.procs").write_text("0")

    try:
        inside = subprocess.Popen(command, env={**os.environ, INSIDE: "1"}, preexec_fn=enter, start_new_session=True)
        for number in (signal.SIGTERM, signal.SIGINT):  # unshare does not forward them
            signal.signal(number, lambda *_: inside.kill())
        return inside.wait()
    finally:
        group.remove(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--mpi", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=120.0, help="the longest time of a start (%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/launch-scale.json")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        if os.geteuid() != 0:
            print("benchmarks/launch_scale.py needs root. Next: sudo .venv/bin/python benchmarks/launch_scale.py")
            return 2
        return run_alone()
    results = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    for way in options.mpi:
        implementation, settings = WAYS[way]
        mpi = find_mpi(PYTHONS[implementation].parent)
        with tempfile.TemporaryDirectory() as directory:
            programs = compile_programs(mpi, settings, Path(directory))
            for workers in options.sizes:
                result = measure(way, mpi, workers, programs, options.seconds)
                result["date"] = datetime.date.today().isoformat()
                print(json.dumps(result), flush=True)
                results = [row for row in results if (row["way"], row["workers"]) != (way, workers)] + [result]
                results.sort(key=lambda row: (row["way"], row["workers"]))
                machine = {"cores": os.cpu_count(), "python": platform.python_version()}
                document = {"machine": machine, "goal_seconds": GOAL_SECONDS, "runs": results}
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
