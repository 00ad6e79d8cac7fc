"""`topkube doctor`: check what training needs. A line that is not ok has a next step."""

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
from pathlib import Path
from typing import Literal

from topkube.algorithms import load_all, package_of
from topkube.cli.gpu_checks import check_gpus
from topkube.cli.report import Check, ok
from topkube.errors import TopKubeError
from topkube.installation import install_command, reinstall_command
from topkube.launch.mpi import mpi_library
from topkube.processors import cores
from topkube.settings import kubeconfig_paths, process_environment
from topkube.telemetry.bar import size

HELLO_SECONDS = 60
_HELLO = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(f'hello {c.allreduce(1)} {c.size}')"
_LEAST_MEMORY, _LEAST_DISK = 2 << 30, 1 << 30
_LEAST_SHARED = 64 << 20


def run_doctor(json_output: bool) -> int:
    """Print the report. Return 1 if something essential fails."""
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
    """Yield all checks; a check comes after those that it depends on. An exception in a check becomes a failed
    check."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # the report is for machines on which anything may be broken
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
            f"reinstall: {reinstall_command()}",
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
    """Report whether this build has CUDA kernels, which compiler made them, and whether they load."""
    library = importlib.import_module("topkube.kernels.cuda_library")
    if library.path() is None:
        yield ok("cuda kernels", "not in this build, which was made without nvcc; CPU tensors do not need them")
        return
    try:
        yield ok("cuda kernels", f"{library.load().build} (or newer, compiled by the driver)")
    except TopKubeError as error:
        yield Check("cuda kernels", "fail", error.what, error.next_step)


def _algorithms() -> Iterator[Check]:
    """List TopKube's own algorithms, then those of each package, then the packages whose algorithms cannot be used."""
    algorithms, errors = load_all()
    own = [algorithm.name for algorithm in algorithms if package_of(algorithm.name) is None]
    by_package: dict[str, list[str]] = {}
    for algorithm in algorithms:
        if package := package_of(algorithm.name):
            by_package.setdefault(str(package), []).append(algorithm.name)
    yield ok(
        "algorithms",
        "; ".join([", ".join(own), *(f"{package}: {', '.join(names)}" for package, names in by_package.items())]),
    )
    for error in errors:
        yield Check("algorithms", "warn", error.what, error.next_step)


def _processor() -> Iterator[Check]:
    info = Path("/proc/cpuinfo").read_text()
    flags = next((line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    wanted = [
        flag for flag in ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16") if flag in flags
    ]
    yield ok("processor", f"{model}, {cores()} cores; {' '.join(wanted) or 'no vector extensions known'}")


def _mpi() -> Iterator[Check]:
    try:
        mpi = mpi_library.find()
        yield ok("mpiexec", f"{mpi} ({mpi.mpiexec})")
    except TopKubeError as error:
        yield Check("mpiexec", "fail", error.what, error.next_step)
        return
    try:
        loaded = mpi_library.library()
        mpi_library.check_match(mpi, loaded)
        yield ok("mpi library", f"{loaded}, the same as mpiexec's")
    except TopKubeError as error:
        yield Check("mpi library", "fail", error.what, error.next_step)
        return
    yield _hello(mpi)


def _hello(mpi: mpi_library.Mpi) -> Check:
    """Start two ranks that add 1 + 1."""
    command = mpi.command(2, [sys.executable, "-c", _HELLO])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**process_environment(), **mpi.environment()},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=HELLO_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec then ends its ranks
        process.communicate()
        next_step = f"run it by hand: {' '.join(command[:-1])} '{_HELLO}'; check if a firewall or VPN blocks loopback"
        return Check("two ranks", "fail", f"no answer within {HELLO_SECONDS} s", next_step)
    if text.count("hello 2 2") == 2:
        return ok("two ranks", "started, and added 1 + 1")
    output = " ".join(text.split())[-300:]
    return Check(
        "two ranks",
        "fail",
        f"they did not form one world: {output}",
        "keep one MPI in this environment, and reinstall mpi4py",
    )


def _torch() -> Iterator[Check]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "torch",
            "warn",
            "not installed; kernels and collectives work on NumPy arrays",
            install_command("train"),
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
    directory = Path.cwd()
    free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK):
        yield Check(
            "disk",
            "warn",
            f"{directory} is not writable: runs/ cannot be created",
            "use --run-directory, or another directory",
        )
    elif free < _LEAST_DISK:
        yield Check("disk", "warn", f"{size(free)} free at {directory}", "make room for logs and checkpoints")
    else:
        yield ok("disk", f"{size(free)} free at {directory}")


def _cluster() -> Iterator[Check]:
    config = next((path for path in [*kubeconfig_paths(), Path.home() / ".kube" / "config"] if path.is_file()), None)
    inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
    kubectl = shutil.which("kubectl")
    if config is None and not inside:
        yield ok("cluster", "no kubeconfig; `topkube run` works without a cluster")
    elif kubectl is None:
        yield Check(
            "cluster",
            "warn",
            f"found {config or 'a service account'}, but no kubectl on PATH",
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
        return Check("cluster", "warn", "found a kubeconfig, but the cluster does not answer", "kubectl cluster-info")
    return ok("cluster", f"Kubernetes {version}")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _kernels,
    _cuda_kernels,
    _algorithms,
    _processor,
    _mpi,
    _torch,
    _memory,
    _shared_memory,
    _disk,
    check_gpus,
    _cluster,
)
