"""A launcher and its workers as processes of this machine, each worker on a loopback address of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launcher_certificate import write_certificate

from topkube.launch.connection.credentials import build_pinned_context
from topkube.launch.contract import (
    STATUS_PATH,
    Ending,
    ExpectedWorker,
    LauncherStatus,
    LaunchPlan,
    WorkerPlan,
    compute_worker_token,
)

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"MPICH": ROOT / ".venv/bin/python", "OpenMPI": ROOT / ".venv-openmpi/bin/python"}
MARCHING = str(Path(__file__).with_name("marching.py"))
KEY = "the launcher's key"
UID = "0c6d7c6e-0000-4000-8000-000000000000"
_DROPPED_PREFIXES = ("TOPKUBE_", "PMI_", "PMIX_", "OMPI_", "HYDRA", "MPI_LOCAL", "PRTE")
"""Prefixes of variables that a pod does not inherit: those of TopKube, and those that MPI sets in a rank."""
_networks = itertools.count(1)


def wait_until(condition: Callable[[], Any], seconds: float = 200.0, what: str = "") -> Any:
    """Return the first true value of `condition`. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what or condition}")


def choose_port() -> int:
    """Return a free port below the range from which the kernel chooses ports for programs that ask for any port. A port
    of that range may be taken by a rank of another test before the launcher listens."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, min(lowest, 29_000))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


class PodProcess:
    """A process in place of a pod's container, with its output and its termination message."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        directory: Path,
        mpi: str,
        descriptor: int | None = None,
    ) -> None:
        """`descriptor` is an open file to which the process prints; None: a file in `directory`."""
        self.name = name
        self.output_file, self.termination_file = directory / f"{name}.log", directory / f"{name}.termination"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
        binary = PYTHONS[mpi].parent
        inherited |= {"PATH": f"{binary}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        inherited |= {"TOPKUBE_TERMINATION_LOG": str(self.termination_file), **environment}
        command = [str(PYTHONS[mpi]), "-m", "topkube.cli", *arguments]
        if mpi == "OpenMPI" and arguments[0] == "worker":
            # Open MPI distinguishes nodes by their host names, as pods have them.
            unshare = ["unshare", "--uts"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--uts"]
            command = [*unshare, "sh", "-c", f'hostname {name}; exec "$@"', "sh", *command]
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=inherited,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output if descriptor is None else descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait(self, seconds: float = 200.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds} s:\n{self.output}") from None

    @property
    def ending(self) -> Ending:
        return Ending.read(self.termination_file.read_text())

    def list_processes(self) -> list[int]:
        """Return the ids of the pod's processes: its first process, and all processes below it."""
        processes = [self.process.pid]
        for pid in processes:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    processes += [int(child) for child in (task / "children").read_text().split()]
        return processes

    def kill(self) -> None:
        """Kill everything in the pod at once, as if the pod vanished."""
        for pid in self.list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that no process reacts to the end of another
        for pid in reversed(self.list_processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class SimulatedJob:
    """A job that this class runs in place of the operator: it makes credentials, plans, and the pods of each attempt.
    At the end of its `with` block, no process is left."""

    def __init__(
        self, directory: Path, command: list[str], workers: int = 2, slots: int = 2, mpi: str = "MPICH", **plan: Any
    ) -> None:
        self.directory, self.command, self.slots, self.mpi, self.plan_options = directory, command, slots, mpi, plan
        self.environment: dict[str, str] = {}
        self.attempts_made = [1] * workers
        self.attempt = 0
        self.launcher: PodProcess | None = None
        self.workers: dict[int, PodProcess] = {}
        self._pods: list[PodProcess] = []
        self._network = next(_networks)
        self.port = choose_port()
        self.secret = directory / "launcher"
        write_certificate(self.secret)
        (self.secret / "launcher.key").write_text(KEY + "\n")
        (self.secret / "operator.token").write_text("the operator's token\n")

    def __enter__(self) -> SimulatedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            if pod.process.poll() is None:
                pod.kill()
        # A pod ends as a whole. Here ranks outlive a worker that was killed; their environment names the directory.
        own_prefix = f"{self.directory}/".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and own_prefix in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    def choose_address(self, index: int) -> str:
        """Return the loopback address of worker `index`. Each job has a network of its own."""
        return f"127.{os.getpid() % 200 + 1}.{self._network % 250}.{index + 2}"

    def build_plan(self, **options: Any) -> LaunchPlan:
        """Return the plan of the present attempt. `options` replace fields of the plan."""
        workers = tuple(
            ExpectedWorker(index=index, attempt=made_attempt, pod=f"j-worker-{index}-{made_attempt}")
            for index, made_attempt in enumerate(self.attempts_made)
        )
        return LaunchPlan(
            name="j", namespace="n", uid=UID, attempt=self.attempt, workers=workers, slots=self.slots,
            address="127.0.0.1", port=self.port,
            **{"mpi": self.mpi, "rendezvous_seconds": 60.0, **self.plan_options, **options},
        )  # fmt: skip

    def start_launcher(self, replaced: tuple[int, ...] = (), **options: Any) -> PodProcess:
        """Start the launcher of the next attempt. The workers in `replaced` get new pods when they are started.
        `options` replace fields of the plan."""
        self.attempt += 1
        for index in replaced:
            self.attempts_made[index] = self.attempt
        environment = {"TOPKUBE_LAUNCH": self.build_plan(**options).to_json(), "TOPKUBE_CREDENTIALS": str(self.secret)}
        self.launcher = PodProcess(f"launcher-{self.attempt}", ["launch"], environment, self.directory, self.mpi)
        self._pods.append(self.launcher)
        return self.launcher

    def start_worker(
        self, index: int, command: list[str] | None = None, descriptor: int | None = None, **changes: str
    ) -> PodProcess:
        """Start the pod of worker `index`. `changes` are environment variables."""
        name = f"worker-{index}-{self.attempts_made[index]}"
        secret = self.directory / f"{name}-secret"
        secret.mkdir(exist_ok=True)
        (secret / "tls.crt").write_bytes((self.secret / "tls.crt").read_bytes())
        (secret / "token").write_text(compute_worker_token(KEY, UID, index, self.attempts_made[index]))
        temporary = self.directory / f"{name}-tmp"
        temporary.mkdir(exist_ok=True)
        plan = WorkerPlan(
            name="j", namespace="n", uid=UID, index=index, attempt=self.attempts_made[index], pod=f"j-{name}",
            slots=self.slots, workers=len(self.attempts_made), launcher=f"127.0.0.1:{self.port}", grace_seconds=60.0,
        )  # fmt: skip
        environment = {
            **self.environment,
            "TOPKUBE_WORKER": plan.to_json(),
            "TOPKUBE_CREDENTIALS": str(secret),
            "TOPKUBE_POD_IP": self.choose_address(index),
            "TMPDIR": str(temporary),
            **changes,
        }
        pod = PodProcess(
            name, ["worker", "--", *(command or self.command)], environment, self.directory, self.mpi, descriptor
        )
        self.workers[index] = pod
        self._pods.append(pod)
        return pod

    def start(self, **options: Any) -> PodProcess:
        """Start the launcher and all workers. Return the launcher. `options` replace fields of the plan."""
        launcher = self.start_launcher(**options)
        for index in range(len(self.attempts_made)):
            self.start_worker(index)
        return launcher

    def ask_status(self, token: str = "the operator's token", **headers: str) -> LauncherStatus | None:
        """Return the launcher's answer to the operator; None while it does not answer."""
        headers = {"Authorization": f"Bearer {token}", **headers}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{STATUS_PATH}", headers=headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, context=self.tls, timeout=30) as answer:
            return LauncherStatus.read(answer.read())
        return None

    def read_step(self, least: int = 0) -> int:
        """Return the step that the launcher reports to the operator, if it is `least` or later; otherwise 0."""
        status = self.ask_status()
        step = status.progress.step if status and status.progress and status.progress.step else 0
        return step if step >= least else 0

    @property
    def tls(self) -> ssl.SSLContext:
        return build_pinned_context(self.secret / "tls.crt")

    def list_ranks(self, index: int) -> list[int]:
        """Return the pids of the ranks of worker `index`: the processes below the shims."""
        ranks = []
        for pid in self.workers[index].list_processes():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes()
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                above = Path(f"/proc/{parent}/cmdline").read_bytes()
                if b"topkube.launch.rank" in above and b"topkube.launch.rank" not in text:
                    ranks.append(pid)
        return ranks

    def read_all_output(self) -> str:
        """Return the end of the output of each pod, for messages of failed tests."""
        return "\n".join(f"---- {pod.name}\n{pod.output[-3000:]}" for pod in self._pods)


def read_records(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines with a rank's prefix."""
    for line in text.splitlines():
        _, separator, rest = line.partition("] {")
        if separator:
            yield json.loads("{" + rest)
