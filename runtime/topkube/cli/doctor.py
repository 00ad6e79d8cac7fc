"""`topkube doctor`: what training needs, checked one by one; a line that is not ok has a next step."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topkube.errors import TopKubeError
from topkube.launch import mpi
from topkube.telemetry.bar import size

HELLO_SECONDS = 60
_HELLO = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(f'hello {c.allreduce(1)} {c.size}')"
_LEAST_MEMORY, _LEAST_DISK = 2 << 30, 1 << 30
_LEAST_SHARED = 64 << 20


@dataclass(frozen=True)
class Check:
    """One line of the report. Only a `fail` keeps training from working here."""

    name: str
    state: Literal["ok", "warn", "fail"]
    message: str
    next_step: str = ""


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def run_doctor(json_output: bool) -> int:
    """Prints the report; returns 1 if something essential fails."""
    from rich.console import Console

    checks: list[Check] = []
    console = Console(highlight=False)
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in all_checks():
        checks.append(check)
        if not json_output:
            console.print(
                f"[{colours[check.state]}]{check.state:>4}[/]  [bold]{check.name:<14}[/] ", end="", soft_wrap=True
            )
            console.print(check.message, markup=False, soft_wrap=True)
            if check.next_step:
                console.print(f"{'':22}next: {check.next_step}", markup=False, soft_wrap=True)
    failed = any(check.state == "fail" for check in checks)
    if json_output:
        print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    return 1 if failed else 0


def all_checks() -> Iterator[Check]:
    """Every check, in the order of what depends on what. A check that breaks is itself a failure, never a traceback."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # whatever is broken here is what the report is for
            name = check.__name__.removeprefix("_")
            yield Check(name, "fail", f"could not be checked: {type(error).__name__}: {error}", "report this as a bug")


def _python() -> Iterator[Check]:
    version, own = platform.python_version(), importlib.metadata.version("topkube")
    yield ok("python", f"{version} ({sys.executable})")
    yield ok("topkube", own)


def _kernels() -> Iterator[Check]:
    try:
        kernels = importlib.import_module("topkube.kernels")
    except ImportError as error:
        yield Check(
            "kernels",
            "fail",
            f"the extension does not load: {error}",
            "reinstall: pip install --force-reinstall topkube",
        )
        return
    paths = tuple(kernels.simd_paths())
    in_use = kernels.simd()
    slow = in_use == "portable"
    yield Check(
        "kernels",
        "warn" if slow else "ok",
        f"{in_use} in use; available: {', '.join(paths)}",
        "unset TOPKUBE_SIMD, or use a processor with AVX2: the portable path is several times slower" if slow else "",
    )


def _cuda_kernels() -> Iterator[Check]:
    """Whether this build has CUDA kernels, by which compiler, and whether they load."""
    library = importlib.import_module("topkube.kernels.cuda_library")
    if library.path() is None:
        yield ok("cuda kernels", "not in this build: there was no nvcc when it was made; CPU tensors need none")
        return
    try:
        yield ok("cuda kernels", f"{library.load().build} (or newer, compiled by the driver)")
    except TopKubeError as error:
        yield Check("cuda kernels", "fail", error.what, error.next_step)


def _processor() -> Iterator[Check]:
    info = Path("/proc/cpuinfo").read_text()
    flags = next((line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    wanted = [
        flag for flag in ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16") if flag in flags
    ]
    yield ok("processor", f"{model}, {mpi.cores()} cores; {' '.join(wanted) or 'no vector extensions known'}")


def _mpi() -> Iterator[Check]:
    try:
        found = mpi.find()
        yield ok("mpiexec", f"{found} ({found.mpiexec})")
    except TopKubeError as error:
        yield Check("mpiexec", "fail", error.what, error.next_step)
        return
    try:
        loaded = mpi.library()
        mpi.check_match(found, loaded)
        yield ok("mpi library", f"{loaded}, the same as mpiexec's")
    except TopKubeError as error:
        yield Check("mpi library", "fail", error.what, error.next_step)
        return
    yield _hello(found)


def _hello(found: mpi.Mpi) -> Check:
    """Two ranks that add 1 + 1."""
    command = found.command(2, [sys.executable, "-c", _HELLO])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **found.environment()},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=HELLO_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec ends its ranks on it
        process.communicate()
        next_step = f"run it by hand: {' '.join(command[:-1])} '{_HELLO}'; is a firewall or VPN in the way of loopback?"
        return Check("two ranks", "fail", f"no answer within {HELLO_SECONDS} s", next_step)
    if text.count("hello 2 2") == 2:
        return ok("two ranks", "started, and added 1 + 1")
    said = " ".join(text.split())[-300:]
    return Check(
        "two ranks", "fail", f"they did not meet: {said}", "keep one MPI in this environment, and reinstall mpi4py"
    )


def _torch() -> Iterator[Check]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "torch",
            "warn",
            "not installed; kernels and collectives work on NumPy arrays",
            "pip install 'topkube[train]'",
        )
        return
    answer = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = next(iter(reversed(answer.stderr.strip().splitlines())), f"exit code {answer.returncode}")
        yield Check(
            "torch", "fail", f"{version} does not load: {reason}", "reinstall: pip install --force-reinstall torch"
        )
        return
    yield ok("torch", version)


def _memory() -> Iterator[Check]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, total = 1024 * kilobytes["MemAvailable"], 1024 * kilobytes["MemTotal"]
    state: Literal["ok", "warn"] = "ok" if free > _LEAST_MEMORY else "warn"
    step = "" if state == "ok" else "close other programs, or train with fewer ranks"
    yield Check("memory", state, f"{size(free)} of {size(total)} available", step)


def _shared_memory() -> Iterator[Check]:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield Check("/dev/shm", "fail", "not writable: ranks of one node cannot share memory", "mount a tmpfs there")
        return
    usage = shutil.disk_usage(shared)
    if usage.free <= _LEAST_SHARED:
        text = f"{size(usage.free)} of {size(usage.total)} free: large shared windows end in SIGBUS"
        yield Check("/dev/shm", "warn", text, "docker run --shm-size=1g, or a memory-backed emptyDir at /dev/shm")
        return
    yield ok("/dev/shm", f"{size(usage.free)} of {size(usage.total)} free, writable")


def _disk() -> Iterator[Check]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        yield Check(
            "disk", "warn", f"{here} is not writable: runs/ cannot be made", "use --run-directory, or another directory"
        )
    elif free < _LEAST_DISK:
        yield Check("disk", "warn", f"{size(free)} free at {here}", "make room for logs and checkpoints")
    else:
        yield ok("disk", f"{size(free)} free at {here}")


def _cuda() -> Iterator[Check]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield ok("cuda", "no NVIDIA driver here; training runs on the processor")
        return
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode:
        yield Check("cuda", "warn", f"nvidia-smi fails: {(answer.stdout + answer.stderr).strip()}", "check the driver")
        return
    gpus = "; ".join(answer.stdout.strip().splitlines())
    code = "import torch; print(torch.cuda.is_available())"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    if seen != "True":
        yield Check("cuda", "warn", f"{gpus}; but torch does not see it", "install a build of torch for CUDA")
        return
    yield ok("cuda", gpus)
    aware = importlib.import_module("topkube.collectives.cuda_aware").mpi_takes_device_pointers()
    how = (
        "directly: MPI says it takes device pointers"
        if aware
        else "through pinned host memory: MPI takes no device pointers"
    )
    yield ok("cuda to network", how)


def _cluster() -> Iterator[Check]:
    files = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    config = next((path for path in [*files, Path.home() / ".kube" / "config"] if path.is_file()), None)
    inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
    kubectl = shutil.which("kubectl")
    if config is None and not inside:
        yield ok("cluster", "no kubeconfig; `topkube run` needs none")
    elif kubectl is None:
        yield Check(
            "cluster",
            "warn",
            f"{config or 'a service account'}, but no kubectl on PATH",
            "install kubectl to submit jobs",
        )
    else:
        yield _server(kubectl)


def _server(kubectl: str) -> Check:
    try:
        command = [kubectl, "version", "-o", "json", "--request-timeout=5s"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        version = json.loads(answer.stdout or "{}").get("serverVersion", {}).get("gitVersion")
    except (subprocess.TimeoutExpired, ValueError):
        version = None
    if version is None:
        return Check(
            "cluster", "warn", "a kubeconfig is there, but the cluster does not answer", "kubectl cluster-info"
        )
    return ok("cluster", f"Kubernetes {version}")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _kernels,
    _cuda_kernels,
    _processor,
    _mpi,
    _torch,
    _memory,
    _shared_memory,
    _disk,
    _cuda,
    _cluster,
)
