"""The image for GPU nodes: its build fails if a wheel lacks the kernels of a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from topkube.job import TrainingJob
from topkube.kernels import cuda_library

ROOT = Path(__file__).parents[3]
CUOBJDUMP = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")


def _run_check(folder: Path, devices: str, library: Path | None) -> subprocess.CompletedProcess[str]:
    with zipfile.ZipFile(folder / "topkube-0.1.0-cp312-cp312-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("topkube/__init__.py", "")
        if library is not None:
            wheel.write(library, "topkube/libtopkube_cuda.so")
    command = [sys.executable, str(ROOT / "images/gpu/check_kernels.py"), str(folder), devices]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    ended = _run_check(tmp_path, "80;90", None)
    assert ended.returncode == 1
    assert "has no topkube/libtopkube_cuda.so: nvcc was not found" in ended.stderr


@pytest.mark.skipif(
    CUOBJDUMP is None or cuda_library.find_library_path() is None, reason="no CUDA toolkit, or a build without kernels"
)
def test_a_wheel_that_lacks_a_device_is_refused(tmp_path: Path) -> None:
    assert _run_check(tmp_path, "80;90", cuda_library.find_library_path()).stdout.endswith(
        "machine code for sm_80, sm_90\n"
    )
    ended = _run_check(tmp_path, "80;121", cuda_library.find_library_path())
    assert ended.returncode == 1
    assert "no machine code for sm_121" in ended.stderr


def test_a_device_without_machine_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script takes the place of cuobjdump, for machines without the CUDA toolkit."""
    program, library = tmp_path / "cuobjdump", tmp_path / "library.so"
    program.write_text("#!/bin/sh\necho 'ELF file    1: libtopkube_cuda.1.sm_80.cubin'\n")
    program.chmod(0o755)
    library.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert _run_check(tmp_path, "80", library).returncode == 0
    ended = _run_check(tmp_path, "80;90;100", library)
    assert ended.returncode == 1
    assert "no machine code for sm_90, sm_100, only for sm_80" in ended.stderr
    program.write_text("#!/bin/sh\necho libtopkube_cuda.1.sm_100.cubin\necho libtopkube_cuda.2.sm_90a.cubin\n")
    assert _run_check(tmp_path, "90a", library).stdout.endswith("machine code for sm_90a, sm_100\n")


def test_the_build_of_the_image_fails_if_kernels_are_absent() -> None:
    lines = (ROOT / "images/gpu/Dockerfile").read_text().replace("\\\n", "").splitlines()
    stages = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    assert [line for line in lines if line.startswith("ARG CUDA_ARCHITECTURES")] == [
        "ARG CUDA_ARCHITECTURES=80;86;89;90;100;120"
    ]
    builder, final = (
        [line for line in lines[start:end] if line.startswith("RUN ")]
        for start, end in zip(stages, [stages[1], None], strict=True)
    )
    (compile_wheel,) = (line for line in builder if " pip " in line.replace("/pip ", " pip ") and "wheel" in line)
    assert "cmake.define.TOPKUBE_CUDA=on" in compile_wheel
    assert "cmake.define.TOPKUBE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" in compile_wheel
    assert builder[-1].endswith('check_kernels.py /dist "${CUDA_ARCHITECTURES}"')
    assert "cuda_library.load()" in final[-1]
    assert not any("NVIDIA_VISIBLE_DEVICES" in line for line in lines if not line.startswith("#"))
    assert any(line.startswith("COPY --from=builder /dist ") for line in lines)


def test_the_sample_requests_a_gpu_for_each_rank() -> None:
    import yaml

    job = TrainingJob.model_validate(yaml.safe_load((ROOT / "manifests/samples/char-gpt-gpu.yaml").read_text()))
    limits = job.spec.template["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == job.spec.slots_per_worker


def test_the_samples_arguments_are_those_of_its_script() -> None:
    import yaml

    from topkube.examples import char_gpt

    template = yaml.safe_load((ROOT / "manifests/samples/char-gpt-gpu.yaml").read_text())["spec"]["template"]
    (worker,) = template["spec"]["containers"]
    assert worker["command"] == ["python", "-m", "topkube.examples.char_gpt"]
    assert char_gpt.build_parser().parse_args(worker["args"]).width == 768
