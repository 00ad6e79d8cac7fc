"""The CUDA kernels compiled for this host, once per session. The GPU is played by emulated_cuda.hpp."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from topkube.kernels.cuda_library import CudaLibrary
from topkube.kernels.device import DeviceKernels

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "csrc" / "cuda" / "api.cu"
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
# A misaligned access fails on a GPU, and a shift by 32 has another result than on a CPU: here both end the process.
TRAPS = ["-fsanitize=alignment,shift,bounds", "-fsanitize-undefined-trap-on-error"]


@functools.cache
def emulated() -> DeviceKernels:
    """Return the kernels for CPU tensors, with the same launches. Skips if there is no g++."""
    if not shutil.which("g++") or not sysconfig.get_platform().startswith("linux"):
        pytest.skip("no g++ here to compile the emulation")
    library = Path(tempfile.mkdtemp(prefix="topkube-emulation-")) / "libemulated.so"
    defines = ["-DTOPKUBE_EMULATE_CUDA", '-DTOPKUBE_CUDA_BUILD="an emulation"', "-I", str(HERE)]
    command = ["g++", *FLAGS, *TRAPS, *defines, "-shared", "-x", "c++", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return DeviceKernels(CudaLibrary(library))


def launches() -> int:
    """Return how many kernels the emulation has launched in this process."""
    count = ctypes.CDLL(str(emulated().library.path)).topkube_emulated_launches
    count.argtypes, count.restype = [], ctypes.c_uint64
    return int(count())
