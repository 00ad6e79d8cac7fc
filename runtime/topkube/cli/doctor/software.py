"""The lines of `topkube doctor` about installed software: Python, the kernels, the algorithms, torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator

from topkube.algorithms import find_package, load_all
from topkube.cli.doctor.check import Check, report_ok
from topkube.errors import TopKubeError
from topkube.installation import build_install_command, build_reinstall_command

_TORCH_SECONDS = 120
"""The most that a process may take to import torch."""


def check_python() -> Iterator[Check]:
    """Report the versions of Python and of TopKube."""
    python_version, topkube_version = platform.python_version(), importlib.metadata.version("topkube")
    yield report_ok("python", f"{python_version} ({sys.executable})")
    yield report_ok("topkube", topkube_version)


def check_kernels() -> Iterator[Check]:
    """Report which instruction set the kernels use, or why the extension does not load."""
    try:
        kernels = importlib.import_module("topkube.kernels")
    except ImportError as error:
        yield Check(
            "kernels",
            "fail",
            f"the extension does not load: {error}",
            f"reinstall: {build_reinstall_command()}",
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


def check_cuda_kernels() -> Iterator[Check]:
    """Report whether this build has CUDA kernels, which compiler made them, and whether they load."""
    library = importlib.import_module("topkube.kernels.cuda_library")
    if library.find_library_path() is None:
        yield report_ok("cuda kernels", "not in this build, which was made without nvcc; CPU tensors do not need them")
        return
    try:
        yield report_ok("cuda kernels", f"{library.load().build}; the driver compiles them for newer GPUs")
    except TopKubeError as error:
        yield Check("cuda kernels", "fail", error.what, error.next_step)


def check_algorithms() -> Iterator[Check]:
    """List TopKube's own algorithms, then those of each package, then the packages whose algorithms cannot be used."""
    algorithms, errors = load_all()
    own = [algorithm.name for algorithm in algorithms if find_package(algorithm.name) is None]
    by_package: dict[str, list[str]] = {}
    for algorithm in algorithms:
        if package := find_package(algorithm.name):
            by_package.setdefault(str(package), []).append(algorithm.name)
    yield report_ok(
        "algorithms",
        "; ".join([", ".join(own), *(f"{package}: {', '.join(names)}" for package, names in by_package.items())]),
    )
    for error in errors:
        yield Check("algorithms", "warn", error.what, error.next_step)


def check_torch() -> Iterator[Check]:
    """Report the version of torch, and if torch can be imported. A separate process imports torch, because a broken
    build can kill the process."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "torch",
            "warn",
            "not installed; kernels and collectives work on NumPy arrays",
            build_install_command("train"),
        )
        return
    command = [sys.executable, "-P", "-c", "import torch"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Check(
            "torch",
            "fail",
            f"{version} does not load within {_TORCH_SECONDS} s",
            "read the kernel log for errors of the GPU's driver or of the disk (dmesg)",
        )
        return
    if answer.returncode:
        reason = next(iter(reversed(answer.stderr.strip().splitlines())), f"exit code {answer.returncode}")
        yield Check(
            "torch", "fail", f"{version} does not load: {reason}", "reinstall: pip install --force-reinstall torch"
        )
        return
    yield report_ok("torch", version)
