"""Selection on CUDA, bit for bit as on the CPU: emulated, and on a GPU if there is one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from cuda_device import DTYPES, NAMES, Device, build_adversarial_inputs, have_same_bits, read_bits
from emulation import count_launches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError
from topkube.kernels import PreviousThreshold


def list_counts(d: int) -> list[int]:
    return sorted({1, max(1, d // 1000), max(1, d // 100), max(1, d // 3), d})


def check_topk(device: Device, x: torch.Tensor, k: int, previous: PreviousThreshold | None = None) -> None:
    indices, values = device.kernels.topk(device.put(x), k, previous)
    expected_indices, expected_values = kernels.topk(x, k)
    assert have_same_bits(indices, expected_indices)
    assert have_same_bits(values, expected_values)


def check_compress(
    device: Device,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    k: int,
    previous: PreviousThreshold | None = None,
) -> None:
    left, expected_left = torch.full_like(residual, 7), torch.full_like(residual, 7)
    on_device, old = device.put(left), device.put(residual)
    indices, values = device.kernels.compress_(device.put(gradient), old, k, on_device, previous)
    expected_indices, expected_values = kernels.compress_(gradient, residual, k, out=expected_left)
    assert have_same_bits(indices, expected_indices)
    assert have_same_bits(values, expected_values)
    assert have_same_bits(on_device, expected_left)
    assert have_same_bits(old, residual)
    if gradient.dtype == torch.float32:
        in_place = device.put(gradient)
        device.kernels.compress_(in_place, old, k, None, previous)
        assert have_same_bits(in_place, expected_left)


def check_mstopk(
    device: Device,
    x: torch.Tensor,
    k: int,
    iterations: int,
    seed: int,
    previous: PreviousThreshold | None = None,
) -> None:
    indices, values = device.kernels.mstopk(device.put(x), k, iterations, seed, previous)
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
        part, device_part = whole[start:], device.put(whole)[start:]
        indices, values = device.kernels.topk(device_part, 150)
        expected_indices, expected_values = kernels.topk(part, 150)
        assert have_same_bits(indices, expected_indices)
        assert have_same_bits(values, expected_values)
        encoded, _, _ = device.kernels.encode(indices, values, len(part), "bf16", None)
        assert read_bits(encoded) == kernels.encode(expected_indices, expected_values, len(part), wire="bf16").tobytes()
        halved = torch.empty_like(part)
        kernels.sum_(halved, [part], 0.5)
        device.kernels.sum_(device_part, [device_part], 0.5)
        assert have_same_bits(device_part, halved)


def test_a_selection_that_cannot_use_its_candidates_takes_at_most_four_passes(device: Device) -> None:
    efforts = set()
    for x in build_adversarial_inputs(40_003).values():
        check_topk(device, x, 400)
        passes, read = device.kernels.read_effort()
        efforts.add((passes, read.is_from_data))
    assert efforts == {(1, False), (4, True)}


def test_the_order_of_blocks_does_not_matter(device: Device) -> None:
    if device.name != "emulated":
        pytest.skip("a GPU draws its own order")
    x = build_adversarial_inputs(40_003)["few values"]
    for _ in range(6):  # each run draws another order of blocks
        check_topk(device, x, 4000)


DRIFTING = 20_011
"""The number of elements of the tests below: enough for a sample."""


def read_start_and_fallback(device: Device) -> tuple[bool, bool]:
    """Return two facts about the last selection: True if it began at the previous threshold, True if it had to read the
    data again."""
    read = device.kernels.read_effort()[1]
    return read.is_reused, read.is_from_data


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_a_selection_after_that_of_any_other_data_selects_the_same_entries(device: Device, dtype: torch.dtype) -> None:
    """The previous threshold is near, or far too low or too high. A wrong threshold costs only time."""
    previous, starts_and_fallbacks = PreviousThreshold(device.place), set()
    inputs = {name: x.to(dtype) for name, x in build_adversarial_inputs(DRIFTING).items()}
    for name, x in inputs.items():
        try:
            for selected in (x, x, inputs["heavy tails"], inputs["normal"]):
                check_topk(device, selected, 200, previous)
                starts_and_fallbacks.add(read_start_and_fallback(device))
            check_topk(device, x, DRIFTING // 2, previous)
            check_mstopk(device, inputs["normal"], 200, 30, 1, previous)
            check_mstopk(device, x, 200, 30, 1, previous)
            check_compress(device, x, inputs["normal"].float().flip(0), 200, previous)
        except AssertionError as error:
            raise AssertionError(f"{name} in sequence") from error
    assert starts_and_fallbacks == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("margin", [0, 1, 1 << 22, 0xFFFFFFFF])
def test_any_contents_of_a_previous_threshold_are_safe(device: Device, margin: int) -> None:
    x, part = build_adversarial_inputs(DRIFTING)["normal"], build_adversarial_inputs(DRIFTING + 3)["denormals"][3:]
    for magnitude in (0, 1, 0x3F800000, 0x7F800000, 0xFFFFFFFF):
        for data in (x, part):
            previous = PreviousThreshold(device.place)
            contents = struct.pack("<QQIIQ", DRIFTING, 200, magnitude, margin, 0)
            assert previous._memory is not None
            previous._memory.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
            check_topk(device, data, 200, previous)
            assert read_start_and_fallback(device)[0]


def test_a_few_candidates_too_many_cause_the_fallback(device: Device) -> None:
    """There is room for 800 candidates here; 900 entries reach the margin."""
    x, previous = build_adversarial_inputs(DRIFTING)["normal"], PreviousThreshold(device.place)
    magnitudes = x.abs().view(torch.int32).sort().values
    least, margin = int(magnitudes[-900]), int(magnitudes[-1] - magnitudes[-900])
    assert previous._memory is not None
    contents = struct.pack("<QQIIQ", DRIFTING, 200, least + margin, margin, 0)
    previous._memory.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    check_topk(device, x, 200, previous)
    assert read_start_and_fallback(device) == (True, True)
    assert device.kernels.read_effort()[1].candidates == 900


def test_steps_of_training_sample_only_at_first_and_after_a_jump(device: Device) -> None:
    """Error feedback: what is not sent is added to the next gradient, whose size changes by some percent per step."""
    random, previous = torch.Generator().manual_seed(3), PreviousThreshold(device.place)
    typical = torch.randn(DRIFTING, generator=random).exp()
    residual, starts_and_fallbacks, candidates = torch.zeros(DRIFTING), [], []
    for step in range(16):
        size = (1 + 0.03 * (-1) ** step) * (1000 if step >= 12 else 1)
        gradient = torch.randn(DRIFTING, generator=random) * typical * size
        check_compress(device, gradient.bfloat16(), residual, 200, previous)
        starts_and_fallbacks.append(read_start_and_fallback(device))
        candidates.append(device.kernels.read_effort()[1].candidates)
        left = torch.empty(DRIFTING)
        kernels.compress_(gradient.bfloat16(), residual, 200, out=left)
        residual = left
    sampled, reused, missed = (False, False), (True, False), (True, True)
    assert starts_and_fallbacks == [sampled, *[reused] * 11, missed, sampled, reused, reused]
    assert all(200 <= count < 1200 for count in candidates[1:12])


def test_another_number_of_elements_or_entries_begins_with_a_sample(device: Device) -> None:
    previous, x = PreviousThreshold(device.place), build_adversarial_inputs(DRIFTING)["normal"]
    for length, k, is_reused in (
        (DRIFTING, 200, False),
        (DRIFTING, 200, True),
        (DRIFTING, 201, False),
        (DRIFTING - 1, 201, False),
        (DRIFTING - 1, 201, True),
    ):
        check_topk(device, x[:length], k, previous)
        assert read_start_and_fallback(device) == (is_reused, False)


def test_a_previous_threshold_of_another_device_is_refused(device: Device) -> None:
    x = device.put(torch.ones(100))
    with pytest.raises(ArgumentError, match="previous on meta"):
        device.kernels.topk(x, 1, PreviousThreshold("meta"))


VARIANTS = {
    "scalar loads, no reuse": ("-DTOPKUBE_CUDA_VECTOR=0", "-DTOPKUBE_CUDA_AHEAD=3", "-DTOPKUBE_CUDA_REUSE=0"),
    "cluster": ("-DTOPKUBE_CUDA_CLUSTER=1",),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_a_build_selects_the_same_entries(name: str) -> None:
    """A run on a device compares variants by their times, so their results must be equal. The last length has several
    groups of segments."""
    device = Device("emulated", *VARIANTS[name])
    previous, starts_and_fallbacks = PreviousThreshold(device.place), set()
    for length, names in ((1, ["normal"]), (4_097, ["few values"]), (DRIFTING, None)):
        for case, x in build_adversarial_inputs(length).items():
            if names is not None and case not in names:
                continue
            few, half = max(1, length // 100), max(1, length // 2)
            try:
                check_topk(device, x.bfloat16(), half)
                check_mstopk(device, x.half(), few, 30, 5)
                check_compress(device, torch.flip(x, (0,)).contiguous(), x, few, previous)
                check_topk(device, x, few, previous)
            except AssertionError as error:
                raise AssertionError(f"{case}, {length}") from error
            starts_and_fallbacks.add(read_start_and_fallback(device)[0])
    assert True in starts_and_fallbacks if "no reuse" not in name else True not in starts_and_fallbacks
    unaligned = build_adversarial_inputs(DRIFTING)["few values"][1:]
    check_topk(device, unaligned, 200)
    check_compress(device, unaligned, torch.flip(unaligned, (0,)).contiguous(), 200)
    many = build_adversarial_inputs(70_003)["heavy tails"]
    check_topk(device, many, 14_000)
    check_compress(device, many.half(), many, 400)


@pytest.mark.parametrize(("name", "few", "half"), [("", 5, 4), ("cluster", 3, 4)])
def test_a_cluster_takes_the_place_of_three_launches_if_candidates_are_few(name: str, few: int, half: int) -> None:
    options = VARIANTS.get(name, ())
    device, x = Device("emulated", *options), build_adversarial_inputs(DRIFTING)["normal"]
    for k, launches in ((200, few), (DRIFTING // 2, half)):
        before = count_launches(*options)
        check_topk(device, x, k)
        assert count_launches(*options) - before == launches
