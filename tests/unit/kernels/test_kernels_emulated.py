"""The AVX-512 path on processors without AVX-512: its source file is compiled against SIMDe. Its results are
compared with those of the portable path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc"
SIMDE = Path("/usr/include/simde/x86/avx512.h")
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wno-psabi", "-I", str(SOURCES)]
AVX2 = ["-mavx2", "-mf16c", "-mbmi2", "-mpopcnt"]


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.skipif(not SIMDE.exists(), reason="no SIMDe headers (Debian: libsimde-dev)")
@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="the emulation needs AVX2 itself")
def test_the_emulated_avx512_path_has_the_same_bits(tmp_path: Path) -> None:
    def compile_(source: Path, name: str, *flags: str) -> Path:
        target = tmp_path / name
        subprocess.run(["g++", *FLAGS, *flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    emulated = compile_(
        SOURCES / "cpu/paths/path_kernels.cpp", "avx512.o", *AVX2, "-DTOPKUBE_PATH=avx512", "-DTOPKUBE_EMULATE_AVX512"
    )
    portable = compile_(SOURCES / "cpu/paths/path_kernels.cpp", "portable.o", "-DTOPKUBE_PATH=portable")
    driver = compile_(HERE / "emulated_avx512.cpp", "driver.o")
    program = tmp_path / "compare"
    subprocess.run(["g++", str(emulated), str(portable), str(driver), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "same")
