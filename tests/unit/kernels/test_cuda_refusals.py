"""Arguments that the CUDA kernels cannot use raise a typed error, and nothing is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import Device, have_same_bits

from topkube import kernels
from topkube.errors import ArgumentError, DeviceError
from topkube.kernels import cuda_library
from topkube.kernels.device import find_device_kernels


def test_without_the_cuda_build_a_cuda_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "find_library_path", lambda: None)
    cuda_library.load.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"no CUDA kernels.*nvcc.*TOPKUBE_CUDA=on"):
            cuda_library.load()
    finally:
        cuda_library.load.cache_clear()


def test_a_library_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    broken = tmp_path / cuda_library.NAME
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cuda_library, "find_library_path", lambda: broken)
    cuda_library.load.cache_clear()
    try:
        with pytest.raises(DeviceError, match="do not load"):
            cuda_library.load()
    finally:
        cuda_library.load.cache_clear()


def test_tensors_of_two_devices_are_refused() -> None:
    here, elsewhere = torch.zeros(3), torch.zeros(3, device="meta")
    with pytest.raises(ArgumentError, match=r"dense lies on meta, values on cpu.*values.to\(dense.device\)"):
        find_device_kernels(dense=elsewhere, values=here)
    with pytest.raises(ArgumentError, match=r"values on the CPU \(it is a ndarray\)"):
        find_device_kernels(dense=elsewhere, values=np.zeros(3))
    with pytest.raises(ArgumentError, match="kernels run on CPU and CUDA"):
        kernels.topk(elsewhere, 1)
    assert find_device_kernels(dense=here, values=np.zeros(3)) is None


def test_arguments_are_refused_as_on_the_cpu(device: Device) -> None:
    x, half = device.put(torch.randn(100)), device.put(torch.randn(100).half())
    device_kernels = device.kernels
    for call, words in (
        (lambda: device_kernels.topk(x, 0), "k = 0 is outside"),
        (lambda: device_kernels.topk(x, 101), "k = 101 is outside"),
        (lambda: device_kernels.topk(x.view(10, 10).t(), 3), "not contiguous"),
        (lambda: device_kernels.topk(x.double(), 3), "dtype"),
        (lambda: device_kernels.topk(torch._neg_view(x), 3), "memory holds other values"),
        (lambda: device_kernels.mstopk(x, 3, 0, 0), "iterations"),
        (lambda: device_kernels.compress_(half, x, 3, None), "out=torch.empty"),
        (lambda: device_kernels.compress_(x, x, 3, None), "overlap"),
        (lambda: device_kernels.compress_(x, x.clone()[:50], 3, None), "has 50 elements"),
        (lambda: device_kernels.sum_(x, [x] * 17), "17 inputs"),
        (lambda: device_kernels.sum_(x[:99], [x[1:]]), "overlap"),
        (lambda: device_kernels.scatter_add_(x, x, x), "indices has dtype"),
        (
            lambda: device_kernels.decode_add_(x, device.put(torch.zeros(64, dtype=torch.uint8))[1:], 1.0),
            "aligned to 8",
        ),
    ):
        before = x.clone()
        with pytest.raises(ArgumentError, match=words):
            call()
        assert have_same_bits(x, before)


class FullTorch:
    """torch with an allocator that has no memory left."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    class cuda:
        OutOfMemoryError = torch.cuda.OutOfMemoryError
        mem_get_info = staticmethod(lambda device: (5, 10))


def test_a_workspace_that_does_not_fit_is_an_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = device.put(torch.randn(100))
    before = x.clone()
    monkeypatch.setattr(device.kernels, "torch", FullTorch())
    with pytest.raises(DeviceError, match=r"no room for \d+ bytes \(5 of 10 are free\); nothing was written"):
        device.kernels.compress_(x, torch.zeros_like(x), 3, None)
    assert have_same_bits(x, before)


def test_a_build_on_a_machine_with_nvcc_has_cuda_kernels() -> None:
    """The package was installed on this machine, so the installation compiled the kernels. CI depends on this."""
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("no nvcc here")
    if os.environ.get("TOPKUBE_CUDA") == "off":
        pytest.skip("CUDA was left out on purpose")
    library = cuda_library.load()  # needs no driver
    assert {"sm_80", "sm_90", "compute_90"} <= set(library.build.split())


def test_a_call_without_a_driver_is_a_typed_error() -> None:
    if cuda_library.find_library_path() is None or torch.cuda.is_available():
        pytest.skip("needs the library and no GPU")
    with pytest.raises(DeviceError, match=r"CUDA refused is_finite: .*\(error \d+\).*topkube doctor"):
        cuda_library.load().call("is_finite", 0, 0, 0, 0, 0, 0)
