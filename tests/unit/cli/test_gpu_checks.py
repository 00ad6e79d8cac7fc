"""The checks of `topkube doctor` that concern GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from topkube import kernels
from topkube.cli.doctor import gpu_checks, gpu_probe
from topkube.cli.doctor.gpu_probe import Gpu, GpuAnswer

torch = pytest.importorskip("torch")

H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", 80 << 30, "")
ANSWER = GpuAnswer("12.9", "575.57.08", "2.27.3", False, (H100,) * 2)


def _describe_states(answer: GpuAnswer) -> dict[str, tuple[str, str]]:
    return {check.name: (check.state, check.message) for check in gpu_checks.describe_gpus(answer)}


def test_a_working_node_shows_driver_capability_nccl_and_the_way_to_the_network() -> None:
    states = _describe_states(ANSWER)
    assert {state for state, _ in states.values()} == {"ok"}
    assert list(states) == ["cuda", "gpu 0", "gpu 1", "nccl", "cuda to network"]
    assert "2 GPU(s), driver 575.57.08, torch for CUDA 12.9" in states["cuda"][1]
    assert "compute capability 9.0" in states["gpu 1"][1]
    assert states["nccl"][1] == "2.27.3"
    assert states["cuda to network"][1].startswith("through pinned host memory")
    direct = dataclasses.replace(ANSWER, mpi_takes_device_pointers=True)
    assert _describe_states(direct)["cuda to network"][1].startswith("directly")


@pytest.mark.parametrize(
    ("changes", "line", "state", "words"),
    [
        ({"gpus": ()}, "cuda", "warn", "is built for CUDA 12.9, finds no GPU"),
        ({"gpus": (), "torch_cuda": ""}, "cuda", "warn", "is built for the CPU alone, finds no GPU"),
        ({"nccl": ""}, "nccl", "warn", "no NCCL"),
        ({"gpus": (Gpu("Tesla V100", "7.0", 1 << 34, ""),)}, "gpu 0", "fail", "the kernels need 8.0"),
        ({"gpus": (Gpu("NVIDIA A100 MIG 1g.5gb", "8.0", 1 << 32, ""),)}, "gpu 0", "fail", "part of a GPU"),
        (
            {"gpus": (H100, dataclasses.replace(H100, kernel="DeviceError: no kernel image"))},
            "gpu 1",
            "fail",
            "no kernel image",
        ),
        ({"gpus": (Gpu("NVIDIA B200", "10.0", 1 << 37, ""),)}, "gpu 0", "ok", "capability 10.0"),
    ],
)
def test_a_failed_check_has_a_next_step(changes: dict[str, Any], line: str, state: str, words: str) -> None:
    check = next(
        check for check in gpu_checks.describe_gpus(dataclasses.replace(ANSWER, **changes)) if check.name == line
    )
    assert check.state == state
    assert words in check.message
    assert bool(check.next_step) == (state != "ok")


def test_the_probe_compares_every_bit_with_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert gpu_probe.run_kernels(device) == ""
    select, calls = kernels.topk, []

    def select_wrongly_on_the_device(x: Any, k: int) -> Any:
        indices, values = select(x, k)
        calls.append(k)
        return (indices, -values) if len(calls) > 1 else (indices, values)

    monkeypatch.setattr(kernels, "topk", select_wrongly_on_the_device)
    assert gpu_probe.run_kernels(device) == "wrong results of topk on cpu: values, encoded bytes"


def test_a_driver_without_a_gpu_that_torch_can_use_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU of this machine")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = gpu_checks.check_gpus()
    assert (check.name, check.state) == ("cuda", "warn")
    assert "finds no GPU" in check.message
    monkeypatch.setattr(gpu_checks, "_PROBE_SECONDS", 0.001)
    (check,) = gpu_checks.check_gpus()
    assert (check.state, "hangs" in check.message) == ("fail", True)


def test_an_answer_can_be_sent_as_json() -> None:
    assert GpuAnswer.read(json.dumps(dataclasses.asdict(ANSWER))) == ANSWER
    for broken in ("", "5", "{}", '{"gpus": [{"no": 1}]}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            GpuAnswer.read(broken)
