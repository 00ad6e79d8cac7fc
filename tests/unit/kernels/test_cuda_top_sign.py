"""Signs of the largest elements on CUDA, bit for bit as on the CPU: emulated, and on a GPU if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_device import Device, have_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kernels_top_sign import encode_indices
from thorough import choose

from topkube import kernels
from topkube.errors import ArgumentError, WireError

EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=choose(40, 500)
)
GUARD = 0xA5


@pytest.fixture(autouse=True)
def use_device_kernels(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions of this process find the kernels of the device for the arrays on it."""
    if device.name == "emulated":
        finder = "topkube.kernels.sign.find_device_kernels"
        monkeypatch.setattr(finder, lambda **arrays: device.kernels if are_on_device(arrays) else None)


def are_on_device(arrays: dict[str, object]) -> bool:
    """Return True if an array is a tensor: here, NumPy arrays are on the CPU, and tensors on the emulated device."""
    return any(isinstance(x, torch.Tensor) for x in arrays.values())


def compare(device: Device, x: torch.Tensor, out: torch.Tensor, count: int, offset: int, weight: float) -> None:
    """Pack and unpack on the device and on the CPU, and compare the results."""
    size = kernels.top_sign_bytes(len(x), count)
    remainder, message, total = x.numpy().copy(), np.full(size, 255, np.uint8), out.numpy().copy()
    around = device.put(torch.full((size + offset + 3,), GUARD, dtype=torch.uint8))
    device_x, device_message, device_total = device.put(x), around[offset : offset + size], device.put(out)
    assert kernels.top_sign_pack_(device_x, count, device_message) == kernels.top_sign_pack_(remainder, count, message)
    assert have_same_bits(device_message, torch.from_numpy(message))
    assert have_same_bits(device_x, torch.from_numpy(remainder))
    assert bool((around[:offset] == GUARD).all())
    assert bool((around[offset + size :] == GUARD).all())
    assert kernels.top_sign_unpack_add_(device_total, count, device_message, weight) is device_total
    kernels.top_sign_unpack_add_(total, count, message, weight)
    assert have_same_bits(device_total, torch.from_numpy(total))


@EXAMPLES
@given(st.integers(1, 4000), st.floats(0, 1), st.integers(0, 2**32), st.integers(0, 3), st.booleans())
def test_messages_and_sums_are_those_of_the_cpu(
    device: Device, length: int, share: float, seed: int, offset: int, has_arbitrary_bits: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, out = rng.standard_t(2, length).astype(np.float32), rng.standard_normal(length, dtype=np.float32)
    if has_arbitrary_bits:
        x, out = (rng.integers(0, 2**32, length, dtype=np.uint32).view(np.float32) for _ in range(2))
    out[::5] = -0.0
    compare(device, torch.from_numpy(x), torch.from_numpy(out), max(1, round(share * length)), offset, 0.3)


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (256, 256), (70_001, 7000), (200_003, 200_003), (300_007, 3), (90_000, 65_536)]
)
def test_indices_of_several_tiles_arrive(device: Device, length: int, count: int) -> None:
    rng = np.random.default_rng(count)
    for indices in (np.sort(rng.choice(length, count, replace=False)), np.arange(length - count, length)):
        x = np.zeros(length, np.float32)
        x[indices] = rng.choice([-1.0, 2.0], count)
        compare(device, torch.from_numpy(x), torch.zeros(length), count, count % 4, -1.0)


def test_a_sum_of_zeros_has_the_sign_of_the_cpu(device: Device) -> None:
    for x in (torch.zeros(300), -torch.zeros(300)):
        for out in (torch.zeros(300), -torch.zeros(300)):
            compare(device, x, out, 270, 0, 1.0)


@EXAMPLES
@given(st.binary(min_size=1), st.integers(0, 2**32))
def test_a_damaged_message_is_refused_as_on_the_cpu(device: Device, noise: bytes, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(1000, dtype=np.float32)
    message = np.zeros(kernels.top_sign_bytes(1000, 100), np.uint8)
    kernels.top_sign_pack_(x, 100, message)
    first = seed % message.size
    part = message[first : first + len(noise)]
    part ^= np.frombuffer(noise, np.uint8)[: part.size]
    expected, out = np.ones(1000, np.float32), device.put(torch.ones(1000))
    device_message = device.put(torch.from_numpy(message))
    try:
        kernels.top_sign_unpack_add_(expected, 100, message, 1.0)
    except WireError as error:
        with pytest.raises(WireError, match=str(error)[:40]):
            kernels.top_sign_unpack_add_(out, 100, device_message, 1.0)
        kernels.top_sign_unpack_add_(out, 100, device_message, 1.0, wait=False)
        assert bool((out == 1).all())
        return
    kernels.top_sign_unpack_add_(out, 100, device_message, 1.0)
    assert have_same_bits(out, torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([3, 3], "twice the same index"),
        ([3, 2], "indices that descend"),
        ([1, 9], "an index beyond the end"),
    ],
)
def test_wrong_indices_are_refused_before_anything_is_written(device: Device, indices: list[int], problem: str) -> None:
    out = device.put(torch.zeros(8))
    message = np.zeros(kernels.top_sign_bytes(8, 2), np.uint8)
    code = encode_indices(indices, 10)
    message[8 : 8 + code.size] = code
    message[:2] = 255
    with pytest.raises(WireError, match="2 indices below 8"):
        kernels.top_sign_unpack_add_(out, 2, device.put(torch.from_numpy(message)), 1.0)
    assert not bool(out.any()), problem


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_reported(device: Device, value: float) -> None:
    x, message = torch.ones(1000), device.put(torch.zeros(kernels.top_sign_bytes(1000, 10), dtype=torch.uint8))
    assert kernels.top_sign_pack_(device.put(x), 10, message)
    x[777] = value
    assert not kernels.top_sign_pack_(device.put(x), 10, message)
    assert not kernels.top_sign_pack_(device.put(x), 10, message, wait=False)


def test_wrong_lengths_and_overlap_are_refused_before_anything_is_written(device: Device) -> None:
    x = device.put(torch.ones(512))
    message = device.put(torch.zeros(kernels.top_sign_bytes(512, 10), dtype=torch.uint8))
    for call in (
        lambda: kernels.top_sign_pack_(x, 0, message),
        lambda: kernels.top_sign_pack_(x, 513, message),
        lambda: kernels.top_sign_pack_(x, 300, message),
        lambda: kernels.top_sign_pack_(x.double(), 10, message),
        lambda: kernels.top_sign_pack_(x, 10, x.view(torch.uint8)[: len(message)]),
        lambda: kernels.top_sign_unpack_add_(x, 10, message[:-8], 1.0),
        lambda: kernels.top_sign_unpack_add_(x, 10, x.view(torch.uint8)[: len(message)], 1.0),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert bool((x == 1).all())
