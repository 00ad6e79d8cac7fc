"""Selection on CUDA, bit for bit as on the CPU: emulated, and on a GPU if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_device import DTYPES, NAMES, Device, build_adversarial_inputs, have_same_bits, read_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels


def list_counts(d: int) -> list[int]:
    return sorted({1, max(1, d // 1000), max(1, d // 100), max(1, d // 3), d})


def check_topk(device: Device, x: torch.Tensor, k: int) -> None:
    indices, values = device.kernels.topk(device.put(x), k)
    expected_indices, expected_values = kernels.topk(x, k)
    assert have_same_bits(indices, expected_indices)
    assert have_same_bits(values, expected_values)


def check_compress(device: Device, gradient: torch.Tensor, residual: torch.Tensor, k: int) -> None:
    left, expected_left = torch.full_like(residual, 7), torch.full_like(residual, 7)
    on_device, old = device.put(left), device.put(residual)
    indices, values = device.kernels.compress_(device.put(gradient), old, k, on_device)
    expected_indices, expected_values = kernels.compress_(gradient, residual, k, out=expected_left)
    assert have_same_bits(indices, expected_indices)
    assert have_same_bits(values, expected_values)
    assert have_same_bits(on_device, expected_left)
    assert have_same_bits(old, residual)
    if gradient.dtype == torch.float32:
        in_place = device.put(gradient)
        device.kernels.compress_(in_place, old, k, None)
        assert have_same_bits(in_place, expected_left)


def check_mstopk(device: Device, x: torch.Tensor, k: int, iterations: int, seed: int) -> None:
    indices, values = device.kernels.mstopk(device.put(x), k, iterations, seed)
    expected_indices, expected_values = kernels.mstopk(x, k, iterations, seed)
    assert have_same_bits(indices, expected_indices)
    assert have_same_bits(values, expected_values)
    read, thresholds = device.kernels.read_effort()[1], kernels.last_thresholds()
    assert (*read.thresholds, *read.above) == (
        thresholds.upper, thresholds.lower, thresholds.above_upper, thresholds.above_lower,
    )  # fmt: skip


# Lengths around the borders of the algorithm: a warp, a tile, the sample, several tiles.
@pytest.mark.parametrize("d", [1, 31, 33, 4097, 16_385, 40_003])
def test_selection_equals_that_of_the_cpu(device: Device, d: int) -> None:
    rng = np.random.default_rng(0)
    for number, (name, x32) in enumerate(build_adversarial_inputs(d).items()):
        dtype = DTYPES[(number + d) % 3]
        for k in (int(rng.choice(list_counts(d))), max(1, d // 100)):
            try:
                check_topk(device, x32.to(dtype), k)
                check_compress(device, torch.randn(d).to(DTYPES[(number + d + 1) % 3]), x32, k)
                check_mstopk(device, x32.to(dtype), k, 30, number)
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}, k = {k}") from error


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("k", [1, 37, 400, 15_000, 40_003])
def test_every_dtype_and_density_agrees_with_the_cpu(device: Device, dtype: torch.dtype, k: int) -> None:
    x = build_adversarial_inputs(40_003)["heavy tails" if k < 100 else "normal"]
    check_topk(device, x.to(dtype), k)
    check_compress(device, x.to(dtype), torch.flip(x, (0,)).contiguous(), k)
    check_mstopk(device, x.to(dtype), k, 30, 3)


@settings(
    max_examples=25,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(
    length=st.integers(1, 6000),
    share=st.floats(0, 1),
    levels=st.integers(1, 2**31),
    seed=st.integers(0, 2**31),
    iterations=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_any_bits_agree_with_the_cpu(
    device: Device, length: int, share: float, levels: int, seed: int, iterations: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    words = (rng.integers(0, levels, length) * (2**32 // levels)).astype(np.uint32)
    x = torch.from_numpy(words.view(np.float32))
    if dtype != torch.float32:
        x = torch.from_numpy((words >> 16).astype(np.uint16).view(np.int16)).view(dtype)
    k = max(1, round(share * length))
    check_topk(device, x, k)
    check_mstopk(device, x, k, iterations, seed)
    check_compress(device, torch.flip(x, (0,)).contiguous(), x.float(), k)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_a_part_of_an_array_may_begin_anywhere(device: Device, dtype: torch.dtype) -> None:
    """Loads of 16 bytes need aligned arrays; at other offsets a load is one element. The emulation stops at a
    misaligned load."""
    whole = build_adversarial_inputs(20_011)["heavy tails"].to(dtype)
    for start in (1, 3):
        part, there = whole[start:], device.put(whole)[start:]
        indices, values = device.kernels.topk(there, 150)
        expected_indices, expected_values = kernels.topk(part, 150)
        assert have_same_bits(indices, expected_indices)
        assert have_same_bits(values, expected_values)
        encoded, _, _ = device.kernels.encode(indices, values, len(part), "bf16", None)
        assert read_bits(encoded) == kernels.encode(expected_indices, expected_values, len(part), wire="bf16").tobytes()
        halved = torch.empty_like(part)
        kernels.sum_(halved, [part], 0.5)
        device.kernels.sum_(there, [there], 0.5)
        assert have_same_bits(there, halved)


def test_a_selection_that_cannot_use_its_candidates_takes_at_most_four_passes(device: Device) -> None:
    ways = set()
    for x in build_adversarial_inputs(40_003).values():
        check_topk(device, x, 400)
        passes, read = device.kernels.read_effort()
        ways.add((passes, read.from_the_data))
    assert ways == {(1, False), (4, True)}


def test_the_order_of_blocks_does_not_matter(device: Device) -> None:
    if device.name != "emulated":
        pytest.skip("a GPU draws its own order")
    x = build_adversarial_inputs(40_003)["few values"]
    for _ in range(6):  # each run draws another order of blocks
        check_topk(device, x, 4000)


VARIANTS = {
    "scalar loads": ("-DTOPKUBE_CUDA_VECTOR=0", "-DTOPKUBE_CUDA_AHEAD=3"),
    "segments": ("-DTOPKUBE_CUDA_SEGMENTS=1",),
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_of_a_build_selects_the_same_entries(options: tuple[str, ...]) -> None:
    """A run on a device compares variants by their times, so their results must be equal. The last length has several
    groups of segments."""
    device = Device("emulated", *options)
    for length, names in ((1, ["normal"]), (4_097, ["few values"]), (20_011, ["constant", "mostly zero", "nan"])):
        for name in names:
            x = build_adversarial_inputs(length)[name]
            for dtype, k in ((torch.float32, max(1, length // 100)), (torch.bfloat16, max(1, length // 2))):
                check_topk(device, x.to(dtype), k)
                check_mstopk(device, x.to(dtype), k, 30, 5)
            check_compress(device, torch.flip(x, (0,)).contiguous(), x, max(1, length // 100))
    many = build_adversarial_inputs(70_003)["heavy tails"]
    check_topk(device, many, 14_000)
    check_compress(device, many.half(), many, 400)
