"""The CUDA kernels, compiled for this host once for each state of their sources. emulated_cuda.hpp simulates
the GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock

from topkube.kernels.cuda_library import CudaLibrary
from topkube.kernels.device import DeviceKernels

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
_BUILDS = ROOT / "build" / "emulation"
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
# A misaligned access fails on a GPU, and a shift by 32 has another result than on a CPU: here both end the process.
TRAPS = ["-fsanitize=alignment,shift,bounds", "-fsanitize-undefined-trap-on-error"]


@functools.cache
def compile_emulation(*options: str) -> DeviceKernels:
    """Return the kernels for CPU tensors, with the same launches, compiled with `options` too. Skip the test if
    there is no g++."""
    if not shutil.which("g++") or not sysconfig.get_platform().startswith("linux"):
        pytest.skip("no g++ here to compile the emulation")
    defines = ["-DTOPKUBE_EMULATE_CUDA", '-DTOPKUBE_CUDA_BUILD="an emulation"', "-I", str(HERE)]
    command = ["g++", *FLAGS, *TRAPS, *defines, *options, "-shared", "-x", "c++", *map(str, SOURCES)]
    library = _BUILDS / f"{_compute_digest(command)}.so"
    _BUILDS.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):  # other processes of this run need it too
        if not library.exists():
            made = library.with_suffix(".made")
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(library)
    return DeviceKernels(CudaLibrary(library))


def _compute_digest(command: list[str]) -> str:
    """Return a digest of the command and of all that it can compile."""
    digest = hashlib.sha256(repr(command).encode())
    for source in sorted([*(ROOT / "csrc").rglob("*.*"), *HERE.glob("*.hpp")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def count_launches(*options: str) -> int:
    """Return how many kernels the emulation that was compiled with `options` has launched in this process."""
    count = ctypes.CDLL(str(compile_emulation(*options).library.path)).topkube_emulated_launches
    count.argtypes, count.restype = [], ctypes.c_uint64
    return int(count())
