"""Signs and integers on CUDA, bit for bit as on the CPU: emulated, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import Device, have_same_bits
from emulation import count_launches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_definition import (
    BLOCK,
    build_ties,
    draw_any_bits,
    draw_floats,
    pack_integers_by_definition,
    pack_signs_by_definition,
    unpack_signs_by_definition,
)
from thorough import choose

from topkube import kernels
from topkube.errors import ArgumentError
from topkube.kernels.parts import PartLayout

SHORT_LENGTHS = [1, 3, 4, 15, 16, 17, 31, 32, 33, 63, 255, 256, 257, 260, 511, 512, 513, 769]
LENGTHS = [*SHORT_LENGTHS, 8191, 8193, choose(30_011, 300_007)]
EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=choose(60, 1000)
)
GUARD = 0xA5


def place(device: Device, x: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of `x` on the device that begins `offset` elements into an array, and the bytes of this array,
    which surround the copy with guards."""
    size = x.element_size()
    around = device.put(torch.full(((len(x) + offset + 3) * size,), GUARD, dtype=torch.uint8))
    copy = around.view(x.dtype)[offset : offset + len(x)]
    copy.copy_(x)
    return copy, around


def has_guards(around: torch.Tensor, x: torch.Tensor, offset: int) -> bool:
    """Return True if nothing beside the copy of `x` was written."""
    start, stop = offset * x.element_size(), (offset + len(x)) * x.element_size()
    return bool((around[:start] == GUARD).all()) and bool((around[stop:] == GUARD).all())


def draw_normal(length: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((length, seed)).standard_normal(length, dtype=np.float32))


def pack_signs(device: Device, x: torch.Tensor, offset: int, bit_offset: int) -> None:
    """Pack on the device and on the CPU, and compare the results."""
    left = x.clone()
    scales, bits, is_finite = kernels.sign_pack_(left)
    on_device, around = place(device, x, offset)
    own_bits, around_bits = place(device, torch.full((-(-len(x) // 8),), 7, dtype=torch.uint8), bit_offset)
    own_scales, same_bits, flag = device.kernels.sign_pack_(on_device, None, own_bits, -(-len(x) // BLOCK))
    assert same_bits is own_bits
    assert own_scales.cpu().numpy().tobytes() == scales.tobytes()
    assert own_bits.cpu().numpy().tobytes() == bits.tobytes()
    assert have_same_bits(on_device, left)
    assert device.kernels.read_flag(flag, True) == is_finite
    assert bool(device.kernels.read_flag(flag, False)) == is_finite
    assert has_guards(around, on_device, offset)
    assert has_guards(around_bits, own_bits, bit_offset)


def pack_integers(device: Device, x: torch.Tensor, bits: int, offset: int, byte_offset: int) -> None:
    """Pack on the device and on the CPU, and compare the results."""
    left, message = x.clone(), torch.full((kernels.quantised_bytes(len(x), bits),), 7, dtype=torch.uint8)
    on_device, around = place(device, x, offset)
    own, around_own = place(device, message, byte_offset)
    is_finite = kernels.quantised_pack_(left, bits, message)
    flag = device.kernels.quantised_pack_(on_device, bits, own, len(own))
    assert have_same_bits(own, message)
    assert have_same_bits(on_device, left)
    assert device.kernels.read_flag(flag, True) == is_finite
    assert has_guards(around, on_device, offset)
    assert has_guards(around_own, own, byte_offset)


@EXAMPLES
@given(draw_any_bits(), st.integers(0, 3), st.integers(0, 3))
def test_packed_signs_are_those_of_the_cpu(device: Device, x: Any, offset: int, bit_offset: int) -> None:
    pack_signs(device, torch.from_numpy(x), offset, bit_offset)


LAYOUTS: dict[str, Callable[[list[slice]], PartLayout]] = {
    "signs": kernels.SignLayout,
    "3 bits": lambda places: kernels.IntegerLayout(places, 3),
    "4 bits": lambda places: kernels.IntegerLayout(places, 4),
    "8 bits": lambda places: kernels.IntegerLayout(places, 8),
}


@pytest.mark.parametrize("replaces", [False, True], ids=["added", "replaced"])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    "places",
    [[], [slice(0, 700)], [slice(0, 256), slice(256, 300), slice(512, 513), slice(513, 513), slice(768, 1800)]],
    ids=["no part", "one part", "several parts with gaps"],
)
@pytest.mark.parametrize("build_layout", LAYOUTS.values(), ids=LAYOUTS)
def test_parts_are_packed_and_added_as_one_after_another(
    device: Device, build_layout: Any, places: list[slice], nodes: int, replaces: bool
) -> None:
    layout, x, weights = build_layout(places), draw_normal(2000), [0.5, -1.0, 0.25][:nodes]
    expected, left = torch.zeros(layout.message_bytes + 8, dtype=torch.uint8), x.clone()
    for part, message in layout.cut(left, expected):
        assert layout.pack_part(part, message)
    on_device, row = device.put(x), device.put(torch.zeros_like(expected))
    on_cpu, cpu_row = x.clone(), torch.zeros_like(expected)
    assert device.kernels.read_flag(device.kernels.pack_parts_(on_device, row, layout), True)
    assert kernels.pack_parts_(on_cpu, cpu_row, layout)
    for values, own in ((on_device, row), (on_cpu, cpu_row)):
        assert have_same_bits(values, left)
        assert have_same_bits(own, expected)
    for part, message in layout.cut(left, expected):
        layout.unpack_add_part(part, [message] * nodes, weights, replaces)
    device.kernels.unpack_add_parts_(on_device, [row] * nodes, weights, layout, replaces)
    kernels.unpack_add_parts_(on_cpu, [cpu_row] * nodes, weights, layout, replaces=replaces)
    assert have_same_bits(on_device, left)
    assert have_same_bits(on_cpu, left)


@pytest.mark.parametrize("build_layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_part_that_is_not_finite_is_reported(device: Device, build_layout: Any) -> None:
    layout, x = build_layout([slice(0, 300), slice(512, 900)]), draw_normal(1000)
    for bad, is_finite in ((400, True), (600, False)):  # element 400 is in no part
        poisoned = x.clone()
        poisoned[bad] = torch.nan
        row = torch.zeros(layout.message_bytes, dtype=torch.uint8)
        assert kernels.pack_parts_(poisoned.clone(), row, layout) == is_finite
        flag = device.kernels.pack_parts_(device.put(poisoned), device.put(row), layout)
        assert device.kernels.read_flag(flag, True) == is_finite


@pytest.mark.parametrize("build_layout", LAYOUTS.values(), ids=LAYOUTS)
def test_parts_that_do_not_fit_are_refused(device: Device, build_layout: Any) -> None:
    layout = build_layout([slice(0, 300)])
    good, row = torch.ones(300), torch.zeros(layout.message_bytes + 8, dtype=torch.uint8)
    for x, message in ((torch.ones(299), row), (good, row[: layout.message_bytes - 1])):
        out, own = device.put(x), device.put(message)
        with pytest.raises(ArgumentError, match="the layout needs 300"):
            kernels.pack_parts_(x, message, layout)
        with pytest.raises(ArgumentError, match="the layout needs 300"):
            device.kernels.pack_parts_(out, own, layout)
        with pytest.raises(ArgumentError, match="the layout needs 300"):
            device.kernels.unpack_add_parts_(out, [own], [1.0], layout, replaces=True)
        assert have_same_bits(out, x), "nothing was written"
    out, own = device.put(good), device.put(row)
    for unpack, x, message in ((kernels.unpack_add_parts_, good, row), (device.kernels.unpack_add_parts_, out, own)):
        with pytest.raises(ArgumentError, match="weights"):
            unpack(x, [message], [], layout, replaces=True)
        assert have_same_bits(x, torch.ones(300)), "nothing was written"
    with pytest.raises(ArgumentError, match="odd address"):
        device.kernels.pack_parts_(device.put(good), device.put(row)[1:], layout)


@EXAMPLES
@given(draw_any_bits(), st.sampled_from(kernels.QUANTISED_BITS), st.integers(0, 3), st.integers(0, 3))
def test_packed_integers_are_those_of_the_cpu(device: Device, x: Any, bits: int, offset: int, byte_offset: int) -> None:
    pack_integers(device, torch.from_numpy(x), bits, offset, byte_offset)


@EXAMPLES
@given(draw_floats())
def test_packing_equals_numpy_bit_for_bit(device: Device, x: Any) -> None:
    scales, bits, left = pack_signs_by_definition(x)
    on_device = device.put(torch.from_numpy(x))
    own_scales, own_bits, _ = device.kernels.sign_pack_(on_device, None, None, len(scales))
    assert own_scales.cpu().numpy().tobytes() == scales.tobytes()
    assert own_bits.cpu().numpy().tobytes() == bits.tobytes()
    assert have_same_bits(on_device, torch.from_numpy(left))
    for width in kernels.QUANTISED_BITS if len(x) else ():
        expected, sent = pack_integers_by_definition(x, width)
        on_device, message = device.put(torch.from_numpy(x)), device.put(torch.zeros(len(expected), dtype=torch.uint8))
        device.kernels.quantised_pack_(on_device, width, message, len(expected))
        assert message.cpu().numpy().tobytes() == expected.tobytes()
        np.testing.assert_array_equal(on_device.cpu().numpy(), x - sent)


def test_the_elements_of_a_block_are_summed_in_the_order_of_the_definition(device: Device) -> None:
    pack_signs(device, torch.from_numpy(build_ties(600)), 0, 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_packing_at_the_borders_of_blocks(device: Device, length: int) -> None:
    x = draw_normal(length)
    pack_signs(device, x, length % 4, length % 3)
    for bits in kernels.QUANTISED_BITS:
        pack_integers(device, x, bits, length % 4, length % 3)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("nodes", [0, 1, 2, 5])
def test_unpacking_adds_all_nodes_in_their_order(device: Device, length: int, nodes: int) -> None:
    rng = np.random.default_rng(length + nodes)
    weights, offset = rng.random(nodes).astype(np.float32).tolist(), (length + nodes) % 4
    out = draw_normal(length, 99)
    out[::7] = -0.0
    parts, total = [], np.zeros(length, np.float32)
    for node, weight in enumerate(weights):
        scales, bits, _ = pack_signs_by_definition(draw_normal(length, node).numpy())
        parts.append((torch.from_numpy(scales), torch.from_numpy(bits)))
        total += unpack_signs_by_definition(scales, bits, length, weight)
    on_device, around = place(device, out, offset)
    own = [tuple(place(device, x, node % 3)[0] for x in part) for node, part in enumerate(parts)]
    device.kernels.sign_unpack_add_(on_device, own, weights)
    assert have_same_bits(on_device, torch.from_numpy(out.numpy() + total))
    assert has_guards(around, on_device, offset)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("nodes", [0, 1, 2, 5])
@pytest.mark.parametrize("bits", kernels.QUANTISED_BITS)
def test_unpacking_adds_the_integers_of_all_nodes(device: Device, length: int, nodes: int, bits: int) -> None:
    messages, weights = draw_messages(length, nodes, bits)
    out, offset = draw_normal(length, 99), (length + nodes) % 4
    out[::7] = -0.0
    on_device, around = place(device, out, offset)
    own = [place(device, message, node % 4)[0] for node, message in enumerate(messages)]
    device.kernels.quantised_unpack_add_(on_device, bits, own, weights, kernels.quantised_bytes(length, bits))
    assert have_same_bits(on_device, kernels.quantised_unpack_add_(out, bits, messages, weights))
    assert has_guards(around, on_device, offset)


@EXAMPLES
@given(draw_any_bits(), draw_any_bits(), st.sampled_from([0.5, -1.0, 3e38, float("inf"), float("nan"), 1e-44]))
def test_unpacking_any_scales_is_that_of_the_cpu(device: Device, x: Any, y: Any, weight: float) -> None:
    length = min(len(x), len(y))
    out, source = torch.from_numpy(y[:length].copy()), torch.from_numpy(x[:length].copy())
    scales, bits, _ = kernels.sign_pack_(source.clone())
    part = torch.from_numpy(scales), torch.from_numpy(bits)
    on_device = device.put(out)
    own = device.put(part[0]), device.put(part[1])
    device.kernels.sign_unpack_add_(on_device, [own, own], [weight, 0.25])
    assert have_same_bits(on_device, kernels.sign_unpack_add_(out.clone(), [part, part], [weight, 0.25]))
    for width in kernels.QUANTISED_BITS:
        message = torch.zeros(kernels.quantised_bytes(length, width), dtype=torch.uint8)
        kernels.quantised_pack_(source.clone(), width, message)
        on_device, own_message = device.put(out), device.put(message)
        device.kernels.quantised_unpack_add_(on_device, width, [own_message] * 2, [weight, 0.25], len(message))
        expected = kernels.quantised_unpack_add_(out.clone(), width, [message] * 2, [weight, 0.25])
        assert have_same_bits(on_device, expected)


def draw_messages(length: int, nodes: int, bits: int) -> tuple[list[torch.Tensor], list[float]]:
    messages = [torch.zeros(kernels.quantised_bytes(length, bits), dtype=torch.uint8) for _ in range(nodes)]
    for node, message in enumerate(messages):
        kernels.quantised_pack_(draw_normal(length, node), bits, message)
    weights: list[float] = np.random.default_rng(nodes).random(nodes).astype(np.float32).tolist()
    return messages, weights


@pytest.mark.parametrize("nodes", [128, 129, 257])
def test_more_nodes_than_one_launch_adds_have_the_same_sum(device: Device, nodes: int) -> None:
    length = 515
    out = draw_normal(length, 99)
    for bits in kernels.QUANTISED_BITS:
        messages, weights = draw_messages(length, nodes, bits)
        on_device, own = device.put(out), [device.put(message) for message in messages]
        device.kernels.quantised_unpack_add_(on_device, bits, own, weights, kernels.quantised_bytes(length, bits))
        assert have_same_bits(on_device, kernels.quantised_unpack_add_(out.clone(), bits, messages, weights))
    parts = [kernels.sign_pack_(draw_normal(length, node))[:2] for node in range(nodes)]
    parts = [(torch.from_numpy(scales), torch.from_numpy(bits)) for scales, bits in parts]
    on_device = device.put(out)
    device.kernels.sign_unpack_add_(on_device, [tuple(map(device.put, part)) for part in parts], weights)
    assert have_same_bits(on_device, kernels.sign_unpack_add_(out.clone(), parts, weights))


def test_the_launches_of_a_sum_do_not_grow_with_the_nodes() -> None:
    device, launches = Device("emulated"), []
    for nodes in (1, 8, 128):
        messages, weights = draw_messages(1000, nodes, 8)
        before = count_launches()
        device.kernels.quantised_unpack_add_(torch.zeros(1000), 8, messages, weights, len(messages[0]))
        launches.append(count_launches() - before)
    assert launches == [1, 1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 300, 699])
def test_a_block_that_is_not_finite_lowers_the_flag(device: Device, bad: float, at: int) -> None:
    x = torch.ones(700)
    x[at] = bad
    *_, flag = device.kernels.sign_pack_(device.put(x), None, None, 3)
    assert not device.kernels.read_flag(flag, True)
    for bits in kernels.QUANTISED_BITS:
        message = device.put(torch.zeros(kernels.quantised_bytes(700, bits), dtype=torch.uint8))
        assert not device.kernels.read_flag(
            device.kernels.quantised_pack_(device.put(x), bits, message, len(message)), True
        )
        arrived = device.put(torch.zeros(700))
        device.kernels.quantised_unpack_add_(arrived, bits, [message], [1.0], len(message))
        not_finite = [bool(arrived[start : start + BLOCK].isnan().all()) for start in (0, 256, 512)]
        assert not_finite == [block == at // BLOCK for block in range(3)]


# ---- the public functions


@pytest.fixture
def public(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device, whose kernels the public functions of this process find for all arrays."""
    for module in ("sign", "quantised"):
        monkeypatch.setattr(f"topkube.kernels.{module}.find_device_kernels", lambda **_: device.kernels)
    return device


def test_the_public_functions_use_the_kernels_of_the_device(public: Device) -> None:
    x = draw_normal(1000)
    scales, bits, left = pack_signs_by_definition(x.numpy().copy())
    own = public.put(x)
    own_scales, own_bits, is_finite = kernels.sign_pack_(own)
    assert is_finite is True
    assert own_scales.cpu().numpy().tobytes() == scales.tobytes()
    assert own_bits.cpu().numpy().tobytes() == bits.tobytes()
    assert have_same_bits(own, torch.from_numpy(left))
    out = public.put(torch.zeros(1000))
    assert kernels.sign_unpack_add_(out, [(own_scales, own_bits)], [0.5]) is out
    assert have_same_bits(out, torch.from_numpy(unpack_signs_by_definition(scales, bits, 1000, 0.5)))
    waiting = kernels.sign_pack_(public.put(x), wait=False)[2]
    assert waiting.dtype == torch.bool
    assert waiting.shape == ()
    assert waiting
    for width in kernels.QUANTISED_BITS:
        expected, sent = pack_integers_by_definition(x.numpy(), width)
        own, message = public.put(x), public.put(torch.zeros(len(expected), dtype=torch.uint8))
        assert kernels.quantised_pack_(own, width, message) is True
        assert message.cpu().numpy().tobytes() == expected.tobytes()
        assert kernels.quantised_pack_(public.put(x), width, message, wait=False).dtype == torch.bool
        out = public.put(torch.zeros(1000))
        assert kernels.quantised_unpack_add_(out, width, [message], [1.0]) is out
        assert have_same_bits(out, torch.from_numpy(np.zeros(1000, np.float32) + sent))


def test_wrong_arguments_are_refused_before_anything_is_written(public: Device) -> None:
    x = public.put(torch.ones(512))
    scales, bits = public.put(torch.zeros(2, dtype=torch.uint16)), public.put(torch.zeros(64, dtype=torch.uint8))
    message = public.put(torch.zeros(kernels.quantised_bytes(512, 8), dtype=torch.uint8))

    def add(parts: Sequence[Any], weights: Sequence[float]) -> None:
        kernels.sign_unpack_add_(x, parts, weights)

    for call in (
        lambda: kernels.sign_pack_(x, scales[:1], bits),
        lambda: kernels.sign_pack_(x, scales, bits[:-1]),
        lambda: kernels.sign_pack_(x, scales.view(torch.int16), bits),
        lambda: kernels.sign_pack_(x, scales, x.view(torch.uint8)[:64]),
        lambda: kernels.sign_pack_(x.double(), scales, bits),
        lambda: kernels.sign_pack_(x.view(2, 256).t(), scales, bits),
        lambda: add([(scales, bits)], []),
        lambda: add([(scales, bits[:-1])], [1.0]),
        lambda: add([(scales, x.view(torch.uint8)[:64])], [1.0]),
        lambda: kernels.quantised_pack_(x, 6, message),
        lambda: kernels.quantised_pack_(x, 8, message[:-1]),
        lambda: kernels.quantised_pack_(x, 4, message),
        lambda: kernels.quantised_pack_(x, 8, x.view(torch.uint8)[: len(message)]),
        lambda: kernels.quantised_unpack_add_(x, 8, [message], []),
        lambda: kernels.quantised_unpack_add_(x, 8, [message[:-8]], [1.0]),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert bool((x == 1).all())
    assert not bool(message.any())
