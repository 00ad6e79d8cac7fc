"""Prepare a machine for the plan: download wheels on a machine with a network, install them on a machine without a
network, and build the extension."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "benchmarks" / "wheels"
PACKAGES = {
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "xxhash": "xxhash",
    "nanobind": "nanobind",
    "mpi4py": "mpi4py",
    "mpich": "mpich",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "typing_extensions": "typing_extensions",
}
"""The modules that the stages import besides torch, and the distribution of each."""
NEEDED = {
    "build": ["nanobind"],
    "kernels": ["numpy", "ml_dtypes", "xxhash"],
    "training": ["mpi4py", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"],
}
"""The modules that each kind of stage needs."""
_CARRIED = [name for name in PACKAGES if name != "numpy"]
_GLIBC = (17, 24, 27, 28, 31, 34)


def prepare(python: str, folder: Path, constraints: Path = ROOT / "constraints.txt") -> list[str]:
    """Download the wheels that a machine without network needs, for Python `python` ("3.12") on Linux x86-64. Return
    the names of the packages that have no wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for minor in _GLIBC for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    pinned = pinned_versions(constraints)
    failed = []
    for module in _CARRIED:
        name = PACKAGES[module]
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python-version", python, "--implementation", "cp", *platforms, "--platform", "manylinux2014_x86_64"),
            *("--dest", str(folder), name + (f"=={pinned[canonical(name)]}" if canonical(name) in pinned else "")),
        ]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    return failed


def pinned_versions(constraints: Path) -> dict[str, str]:
    """Return the version of each package that the constraints file fixes."""
    lines = constraints.read_text().splitlines() if constraints.exists() else []
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {canonical(name): version.strip() for name, separator, version in pairs if separator}


def canonical(name: str) -> str:
    """Return a package's name in the form in which package indexes compare names: "Foo_Bar" becomes "foo-bar"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def absent(kind: str) -> list[str]:
    """Return the modules that this kind of stage needs and that cannot be imported here."""
    return [module for module in NEEDED[kind] if importlib.util.find_spec(module) is None]


def unpack_wheels(folder: Path, site: Path) -> list[str]:
    """Install carried wheels of modules that are absent into `site`, without a network. Return the names of the wheels.
    A module that the machine has keeps its version."""
    wanted = {canonical(PACKAGES[module]) for module in PACKAGES if importlib.util.find_spec(module) is None}
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if canonical(wheel.name.split("-")[0]) in wanted]
    if wheels:
        site.mkdir(parents=True, exist_ok=True)
        install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", *install, *map(str, wheels)], check=True)
    return [wheel.name for wheel in wheels]


def find_nvcc() -> str | None:
    """Return the path of nvcc: on PATH, in CUDA_HOME, or in /usr/local/cuda."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return shutil.which("nvcc") or (str(toolkit) if toolkit.exists() else None)


def build(work: Path, environment: dict[str, str], cuda: bool) -> Path:
    """Compile the extension for this Python with CMake, and return a folder with the package, to import it from. This
    needs no scikit-build-core and changes no environment. Raises subprocess.CalledProcessError."""
    compiled, site = work / "build", work / "package"
    command = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    nanobind = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    configure = [
        *("cmake", "-S", str(ROOT / "csrc"), "-B", str(compiled), "-DCMAKE_BUILD_TYPE=Release"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"),
        f"-DTOPKUBE_CUDA={'on' if cuda else 'off'}",
    ]
    subprocess.run(configure, env=environment, check=True, stdout=subprocess.DEVNULL)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(
        ["cmake", "--build", str(compiled), "-j", jobs], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(
        ROOT / "runtime" / "topkube", site / "topkube", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for library in compiled.glob("*.so"):
        shutil.copy2(library, site / "topkube")
    return site
