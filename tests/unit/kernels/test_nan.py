"""A NaN that a kernel computes has the bits 0x7fc00000, on every path and device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_device import DTYPES, NAMES, Device, have_same_bits

from topkube import kernels
from topkube.errors import SettingsError

HERE = Path(__file__).parent
CANONICAL = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
LENGTH = 20_011


@pytest.fixture(params=["portable", "avx2", "avx512"])
def simd_path(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        before = kernels.use_simd(request.param)
    except SettingsError:
        pytest.skip("this processor does not have the path")
    yield request.param
    kernels.use_simd(before)


def read_words(x: torch.Tensor) -> torch.Tensor:
    size = x.element_size() * 8
    return x.detach().cpu().view({16: torch.int16, 32: torch.int32}[size]).to(torch.int64) & ((1 << size) - 1)


def draw_with_nans(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random numbers. Every third number is a NaN with a random sign and payload; some are infinite."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(LENGTH, generator=random).to(dtype)
    integer = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    low, high = {torch.float32: (1, 2**23), torch.bfloat16: (1, 2**7), torch.float16: (1, 2**10)}[dtype]
    exponent = read_words(torch.tensor([torch.inf], dtype=dtype))
    payload = torch.randint(low, high, (LENGTH,), generator=random)
    sign = torch.randint(0, 2, (LENGTH,), generator=random) << (dtype.itemsize * 8 - 1)
    nan = (exponent | payload | sign).to(integer).view(dtype)
    place = torch.arange(LENGTH) % 3 == 0
    x[place] = nan[place]
    x[5::7] = torch.inf if seed % 2 else -torch.inf
    return x


def has_only_canonical_nans(x: torch.Tensor) -> bool:
    nan_words = read_words(x)[torch.isnan(x.detach().cpu())]
    return len(nan_words) > 0 and bool((nan_words == CANONICAL[x.dtype]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_a_computed_nan_is_canonical_on_every_path(simd_path: str, dtype: torch.dtype) -> None:
    a, b = draw_with_nans(dtype, 1), draw_with_nans(dtype, 2)
    for out_dtype in DTYPES:
        for inputs in ([a], [a, b], [a, b, a]):
            out = torch.empty(LENGTH, dtype=out_dtype)
            if len(inputs) == 1 and dtype == out_dtype:
                continue
            kernels.sum_(out, inputs, 0.5)
            assert has_only_canonical_nans(out)
    residual = draw_with_nans(torch.float32, 2)
    left = torch.empty(LENGTH)
    _, values = kernels.compress_(a, residual, LENGTH // 2, out=left)
    assert has_only_canonical_nans(values)
    _, values = kernels.compress_(a, residual, 100, out=left)
    assert has_only_canonical_nans(values)
    assert has_only_canonical_nans(left)


def test_signs_of_the_largest_elements_leave_canonical_nans(simd_path: str) -> None:
    source, sums = draw_with_nans(torch.float32, 1), draw_with_nans(torch.float32, 2)
    indices, _ = kernels.topk(source, 300)
    message = torch.zeros(kernels.top_sign_bytes(LENGTH, 300), dtype=torch.uint8)
    assert not kernels.top_sign_pack_(source, 300, message)
    kernels.top_sign_unpack_add_(sums, 300, message, 0.5)
    assert has_only_canonical_nans(sums[indices.to(torch.int64)])


def test_signs_and_integers_leave_canonical_nans(simd_path: str) -> None:
    for source in (draw_with_nans(torch.float32, 1), draw_with_nans(torch.float32, 2)):
        left, sums = source.clone(), draw_with_nans(torch.float32, 4)
        scales, signs, is_finite = kernels.sign_pack_(left)
        assert not is_finite
        assert has_only_canonical_nans(left)
        kernels.sign_unpack_add_(sums, [(scales, signs)] * 2, [0.5, torch.inf])
        assert has_only_canonical_nans(sums)
        for bits in kernels.QUANTISED_BITS:
            left, sums = source.clone(), draw_with_nans(torch.float32, 4)
            message = torch.zeros(kernels.quantised_bytes(LENGTH, bits), dtype=torch.uint8)
            assert not kernels.quantised_pack_(left, bits, message)
            assert has_only_canonical_nans(left)
            kernels.quantised_unpack_add_(sums, bits, [message] * 2, [0.5, torch.inf])
            assert has_only_canonical_nans(sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_cuda_kernels_compute_the_same_nans(device: Device, dtype: torch.dtype) -> None:
    a, b, residual = draw_with_nans(dtype, 1), draw_with_nans(dtype, 2), draw_with_nans(torch.float32, 4)
    for out_dtype in DTYPES:
        expected, out = torch.empty(LENGTH, dtype=out_dtype), device.put(torch.empty(LENGTH, dtype=out_dtype))
        kernels.sum_(expected, [a, b], 0.5)
        device.kernels.sum_(out, [device.put(a), device.put(b)], 0.5)
        assert have_same_bits(out, expected)
    left, expected_left = device.put(torch.empty(LENGTH)), torch.empty(LENGTH)
    for k in (7, 200, LENGTH // 2):
        entries = device.kernels.compress_(device.put(a), device.put(residual), k, left)
        expected_entries = kernels.compress_(a, residual, k, out=expected_left)
        assert all(have_same_bits(a, b) for a, b in zip(entries, expected_entries, strict=True))
        assert have_same_bits(left, expected_left)


def test_the_emulated_gpu_has_one_nan_as_the_result_of_arithmetic(tmp_path: Path) -> None:
    """Without this rule, the emulation would return the NaNs of this processor, and kernels that forget `canonical`
    would look right."""
    if not shutil.which("g++"):
        pytest.skip("no g++ here to compile the emulation")
    source, library = tmp_path / "nan.cpp", tmp_path / "nan.so"
    source.write_text("""
#define TOPKUBE_EMULATE_CUDA
#include "cuda/device.hpp"
extern "C" void compute(const float* a, const float* b, float* out) {
  out[0] = topkube::gpu::plus(*a, *b), out[1] = topkube::gpu::minus(*a, *b), out[2] = topkube::gpu::times(*a, *b);
  out[3] = topkube::gpu::divide(*a, *b);
}
""")
    folders = [f"-I{HERE}", f"-I{HERE.parents[2] / 'csrc'}"]
    subprocess.run(["g++", "-std=c++20", "-fPIC", "-shared", *folders, str(source), "-o", str(library)], check=True)
    compute = ctypes.CDLL(str(library)).compute
    for a, b in (
        (0x7FC00001, 0x3F800000),
        (0xFFC01234, 0x3F800000),
        (0x3F800000, 0x7F800001),
        (0x7FC00001, 0xFFC00002),
    ):
        words = (ctypes.c_uint32 * 1)(a), (ctypes.c_uint32 * 1)(b), (ctypes.c_uint32 * 4)()
        compute(*words)
        assert list(words[2]) == [0x7FFFFFFF] * 4


@pytest.mark.parametrize("wire", NAMES.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_the_codec_computes_the_same_nans(device: Device, dtype: torch.dtype, wire: str) -> None:
    values = draw_with_nans(dtype, 1)[:500]
    indices = torch.arange(0, 1500, 3, dtype=torch.int32).view(torch.uint32)
    residual = draw_with_nans(torch.float32, 2)[:1500].clone()
    device_residual = device.put(residual)
    encoded = device.kernels.encode(device.put(indices), device.put(values), 1500, wire, device_residual)[0]
    expected: Any = kernels.encode(indices, values, 1500, wire=wire, residual=residual)
    assert encoded.cpu().numpy().tobytes() == expected.tobytes()
    assert have_same_bits(device_residual, residual)
    for out_dtype in DTYPES:
        dense = draw_with_nans(out_dtype, 3)[:1500].clone()
        on_device = device.put(dense)
        kernels.decode_add_(dense, expected, 0.5)
        device.kernels.decode_add_(on_device, encoded, 0.5)
        assert have_same_bits(on_device, dense)
        kernels.scatter_add_(dense, indices, values)
        device.kernels.scatter_add_(on_device, device.put(indices), device.put(values))
        assert have_same_bits(on_device, dense)
        assert has_only_canonical_nans(dense[::3])


@pytest.mark.parametrize("wire", NAMES.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_sums_of_rows_compute_the_same_nans(device: Device, dtype: torch.dtype, wire: str) -> None:
    indices = torch.arange(0, 1500, 3, dtype=torch.int32).view(torch.uint32)
    size = kernels.encoded_size(1500, 500, wire)
    rows = torch.zeros(3, -(-size // 8) * 8, dtype=torch.uint8)
    for seed, row in enumerate(rows):
        kernels.encode(indices, draw_with_nans(torch.float32, seed)[:500], 1500, wire=wire, out=row[:size])
    expected, out = torch.ones(1500, dtype=dtype), device.put(torch.ones(1500, dtype=dtype))
    assert not kernels.sum_rows_(expected, rows, size)
    device.kernels.sum_rows_(out, device.put(rows), size)
    assert have_same_bits(out, expected)
    assert has_only_canonical_nans(out)
