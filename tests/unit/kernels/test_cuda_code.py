"""The code that nvcc makes of the kernels. It needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "csrc"
OPTIONS = ("-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-arch=compute_90", "-DTOPKUBE_CUDA_BUILD=")


@pytest.mark.parametrize("source", sorted((SOURCES / "cuda").glob("*.cu")), ids=lambda path: path.stem)
def test_nvcc_replaces_no_code_by_a_trap(source: Path, tmp_path: Path) -> None:
    """nvcc compiles a kernel that reads a constexpr array of the host, without a warning. The kernel then ends with
    "unspecified launch failure" on a GPU, and works in the emulation."""
    nvcc = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    output = tmp_path / "kernels.ptx"
    subprocess.run([nvcc, *OPTIONS, "-ptx", str(source), "-o", str(output)], check=True, capture_output=True, text=True)
    entries = re.split(r"^\.(?:visible )?entry ", output.read_text(), flags=re.MULTILINE)
    assert len(entries) > 1
    assert [entry.split("(")[0] for entry in entries[1:] if re.search(r"\btrap;", entry)] == []
