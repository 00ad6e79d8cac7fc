"""The device that CUDA kernels are tested on, emulated or real, and comparisons of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from emulation import compile_emulation

from topkube.kernels import cuda_library
from topkube.kernels.device import DeviceKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Device:
    """The device on which the tested kernels run."""

    def __init__(self, name: str, *options: str) -> None:
        """`options` choose a variant of the emulated kernels."""
        self.name, self.place = name, "cpu" if name == "emulated" else "cuda"
        self.kernels = compile_emulation(*options) if name == "emulated" else DeviceKernels(cuda_library.load())

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self.name == "emulated" else x.cuda()


def read_bits(x: torch.Tensor) -> Any:
    if not x.numel():
        return b""
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def have_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and read_bits(actual) == read_bits(expected)


def build_adversarial_inputs(d: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(d)
    normal = rng.standard_normal(d).astype(np.float32)
    spike = np.zeros(d, np.float32)
    spike[d // 2] = -1e30
    nan = normal.copy()
    nan[rng.integers(0, d, 1 + d // 50)] = np.nan
    nan[-1] = -np.inf
    mostly_zero = np.where(rng.random(d) < 0.3, normal, 0).astype(np.float32)
    cases = {
        "normal": normal,
        "reversed": np.arange(d, dtype=np.float32)[::-1].copy(),
        "constant": np.full(d, -1.5, np.float32),
        "zeros": np.zeros(d, np.float32),
        "few values": rng.integers(-2, 3, d).astype(np.float32),
        "spike": spike,
        "denormals": rng.integers(0, 4096, d, dtype=np.uint32).view(np.float32),
        "heavy tails": (rng.standard_cauchy(d) ** 3).astype(np.float32),
        "mostly zero": mostly_zero,
        "99.5% zeros": np.where(rng.random(d) < 0.005, normal, 0).astype(np.float32),
        "nan": nan,
        "any bits": rng.integers(0, 2**32, d, dtype=np.uint32).view(np.float32),
    }
    return {name: torch.from_numpy(x) for name, x in cases.items()}
