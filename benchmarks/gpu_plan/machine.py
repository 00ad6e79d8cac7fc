"""Prepare a machine for the plan: download wheels on a machine with a network, install them on a machine without a
network, and build the extension."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu_plan.programs import run_group

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
    "rich": "rich",
    "markdown_it": "markdown-it-py",
    "mdurl": "mdurl",
    "pygments": "Pygments",
}
"""The modules that the stages import besides torch, and the distribution of each. torch does not require NumPy."""
NEEDED = {
    "build": ["nanobind"],
    "kernels": ["numpy", "ml_dtypes", "xxhash"],
    "training": [
        "mpi4py",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "typing_extensions",
        "rich",
        "markdown_it",
        "mdurl",
        "pygments",
    ],
}
"""The modules that each kind of stage needs."""
_GLIBC = (17, 24, 27, 28, 31, 34)
"""The minor versions of glibc 2 for which a wheel may be built, as in the tag "manylinux_2_28_x86_64"."""


class BuildError(Exception):
    """A stage of the build failed, or its time is over. What was compiled stays, and the next build continues there."""


def prepare(python: str, processor: str, folder: Path, constraints: Path = ROOT / "constraints.txt") -> list[str]:
    """Download the wheels that a machine without network needs, for Python `python` ("3.12") on Linux with this
    processor ("x86_64" or "aarch64"). Return the names of the packages that have no wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = [f"manylinux_2_{minor}_{processor}" for minor in _GLIBC] + [f"manylinux2014_{processor}"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    pinned = read_pinned_versions(constraints)
    failed = []
    for name in PACKAGES.values():
        version = pinned.get(normalize_name(name))
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python-version", python, "--implementation", "cp", *platforms),
            *("--dest", str(folder), f"{name}=={version}" if version is not None else name),
        ]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    return failed


def read_pinned_versions(constraints: Path) -> dict[str, str]:
    """Return the version of each package that the constraints file fixes."""
    lines = constraints.read_text().splitlines() if constraints.exists() else []
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {normalize_name(name): version.strip() for name, separator, version in pairs if separator}


def normalize_name(name: str) -> str:
    """Return a package's name in the form in which package indexes compare names: "Foo_Bar" becomes "foo-bar"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_absent_modules(kind: str) -> list[str]:
    """Return the modules that this kind of stage needs and that cannot be imported here."""
    return [module for module in NEEDED[kind] if importlib.util.find_spec(module) is None]


def unpack_wheels(folder: Path, site: Path) -> list[str]:
    """Install carried wheels of modules that are absent into `site`, without a network. Return the names of the
    packages. A module that the machine has keeps its version. What an earlier call has installed stays untouched:
    newer headers of nanobind would compile the extension again."""
    absent = {normalize_name(PACKAGES[module]) for module in PACKAGES if importlib.util.find_spec(module) is None}
    carried = {normalize_name(wheel.name.split("-")[0]) for wheel in folder.glob("*.whl")}
    installed = []
    for name in sorted(absent & carried):  # pip chooses the wheel of this Python: the folder may hold those of several
        mark = site / f".installed-{name}"
        versions = " ".join(sorted(wheel.name for wheel in folder.glob("*.whl") if _has_package(wheel, name)))
        if mark.exists() and mark.read_text() == versions:
            installed.append(name)
            continue
        options = ["--quiet", "--no-index", "--find-links", str(folder), "--no-deps", "--no-compile", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), name]
        site.mkdir(parents=True, exist_ok=True)
        if subprocess.run(command, check=False).returncode == 0:
            installed.append(name)
            _unpack_libraries(name, folder, site)
            mark.write_text(versions)
    return installed


def _has_package(wheel: Path, name: str) -> bool:
    return normalize_name(wheel.name.split("-")[0]) == name


def _unpack_libraries(name: str, folder: Path, site: Path) -> None:
    """Unpack the shared libraries of a wheel into site/lib, and its programs into site/bin: `pip install --target`
    leaves those of MPICH out."""
    for wheel in folder.glob("*.whl"):
        if not _has_package(wheel, name):
            continue
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                root, _, path = member.filename.partition(".data/data/")
                is_wanted = (path.startswith("lib/") and ".so" in path) or path.startswith("bin/")
                if not is_wanted or "/" in root or member.is_dir():
                    continue
                target = site / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
                if path.startswith("bin/"):
                    target.chmod(0o755)


def find_nvcc() -> str | None:
    """Return the path of nvcc: on PATH, in CUDA_HOME, or in /usr/local/cuda."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return shutil.which("nvcc") or (str(toolkit) if toolkit.exists() else None)


def find_architecture() -> str | None:
    """Return the compute capability of the first GPU without its dot, such as "90". None without a driver."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.strip().replace(".", "") for line in answer.splitlines() if line.strip()), None)


def digest_sources() -> str:
    """Return a digest of what the figures depend on: the kernels, the runtime and the plan."""
    digest = hashlib.sha256()
    for folder in ("csrc", "runtime/topkube", "benchmarks/gpu_plan"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".txt"):
                digest.update(str(path.relative_to(ROOT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(work: Path, environment: dict[str, str], architecture: str | None, end: float) -> Path:
    """Compile the extension for this Python with CMake, and the CUDA kernels for one `architecture` ("90"; None leaves
    them out). Return a folder with the package, to import it from. This needs no scikit-build-core and changes no
    environment. Prints the time of each stage, and continues after what an earlier call compiled. Raises BuildError if
    a stage fails or is not over at `end` (monotonic seconds)."""
    compiled, site = work / "build", work / "package"
    cuda = (
        ["-DTOPKUBE_CUDA=on", f"-DTOPKUBE_CUDA_ARCHITECTURES={architecture}"]
        if architecture
        else ["-DTOPKUBE_CUDA=off"]
    )
    _configure(compiled, environment, cuda, end)
    _compile("the extension", compiled, environment, end, "_kernels", "_loopback")
    if architecture:
        _compile(f"the CUDA kernels for sm_{architecture}", compiled, environment, end, "topkube_cuda")
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(
        ROOT / "runtime" / "topkube", site / "topkube", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for library in compiled.glob("*.so"):
        shutil.copy2(library, site / "topkube")
    return site


def build_variant(
    work: Path, environment: dict[str, str], defines: Sequence[str], architecture: str, end: float = float("inf")
) -> Path:
    """Compile only the CUDA kernels, with these options, for the device `architecture` ("90"). Return the library.
    Raises BuildError."""
    options = ["-DTOPKUBE_CUDA=on", f"-DTOPKUBE_CUDA_ARCHITECTURES={architecture}"]
    _configure(work, environment, [*options, f"-DTOPKUBE_CUDA_DEFINES={';'.join(defines)}"], end)
    _compile(f"the variant {' '.join(defines) or 'default'}", work, environment, end, "topkube_cuda")
    return work / "libtopkube_cuda.so"


def find_nanobind(environment: dict[str, str]) -> str:
    """Return the folder of nanobind's CMake files. Raises BuildError."""
    command = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    answer = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if answer.returncode:
        raise BuildError("nanobind is not installed. Next: run gpu.py --prepare on a machine on which pip works")
    return answer.stdout.strip()


def _configure(compiled: Path, environment: dict[str, str], options: Sequence[str], end: float) -> None:
    python = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={find_nanobind(environment)}"]
    command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(compiled), "-DCMAKE_BUILD_TYPE=Release", *python, *options]
    _run_stage("configure", command, environment, end)


def _compile(name: str, compiled: Path, environment: dict[str, str], end: float, *targets: str) -> None:
    """Compile `targets` on all cores."""
    jobs = str(len(os.sched_getaffinity(0)))
    _run_stage(name, ["cmake", "--build", str(compiled), "-j", jobs, "--target", *targets], environment, end)


def _run_stage(name: str, command: list[str], environment: dict[str, str], end: float) -> None:
    start = time.monotonic()
    status, output = run_group(command, min(end - start, 24 * 3600), environment, capture=True)
    if status is None:
        raise BuildError(
            f"the time is over while compiling ({name}, {time.monotonic() - start:.0f} s)."
            " Next: run the same command again; it continues with the files that are missing"
        )
    if status != 0:
        raise BuildError(f"{name} failed:\n{output[-4000:]}")
    print(f"build: {name}, {time.monotonic() - start:.0f} s", flush=True)
