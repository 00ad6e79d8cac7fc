"""Sums, scatter and the wire format on CUDA, bit for bit as on the CPU: emulated, and on a GPU if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_device import DTYPES, NAMES, Device, build_adversarial_inputs, have_same_bits, read_bits
from emulation import count_launches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import choose

from topkube import kernels
from topkube.errors import ArgumentError, WireError
from topkube.kernels.device import NO_FAULT


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("d", [1, 255, 30_011])
def test_sums_casts_and_finiteness_checks_agree_with_the_cpu(device: Device, dtype: torch.dtype, d: int) -> None:
    inputs = [build_adversarial_inputs(d)[name].to(dtype) for name in ("normal", "heavy tails", "denormals")]
    for out_dtype in DTYPES:
        expected, out = torch.empty(d, dtype=out_dtype), device.put(torch.empty(d, dtype=out_dtype))
        kernels.sum_(expected, inputs, 0.37)
        device.kernels.sum_(out, [device.put(x) for x in inputs], 0.37)
        assert have_same_bits(out, expected)
    for x in (
        torch.randn(d).to(dtype),
        inputs[0].clone().fill_(torch.inf),
        build_adversarial_inputs(d)["nan"].to(dtype),
    ):
        flag = device.kernels.flag_finite(device.put(x))
        assert device.kernels.read_flag(flag, True) == kernels.is_finite(x)


# ---- scatter and wire


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("value_dtype", DTYPES, ids=NAMES.values())
def test_scatter_add_keeps_the_order(device: Device, dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for indices in (np.arange(0, 900, 3), rng.integers(0, 1000, 700), rng.integers(0, 5, 300), np.zeros(40, np.int64)):
        dense, values = torch.randn(1000).to(dtype), torch.randn(len(indices)).to(value_dtype)
        for kind in (np.uint32, np.int64):
            positions = torch.from_numpy(indices.astype(kind))
            expected, out = dense.clone(), device.put(dense)
            kernels.scatter_add_(expected, positions, values)
            verdict, _ = device.kernels.scatter_add_(out, device.put(positions), device.put(values))
            assert device.kernels.read_verdict(verdict).fault == NO_FAULT
            assert have_same_bits(out, expected)


@pytest.mark.parametrize("index", [-1, 1000, 2**32 - 1, 2**32, 2**40])
def test_scatter_add_beyond_the_array_writes_nothing(device: Device, index: int) -> None:
    out = device.put(torch.ones(1000))
    positions = torch.tensor([3, 5, index, 1, index])
    verdict, _ = device.kernels.scatter_add_(out, device.put(positions), device.put(torch.ones(5)))
    assert device.kernels.read_verdict(verdict).fault == 2
    assert bool((out == 1).all())


# k around the hash's own borders: 16, 128, 240 and 1,024 bytes, and whole blocks of them.
SHARDS = [(0, 0), (1, 1), (40, 3), (70_000, 0), (70_000, 17), (70_000, 30), (70_000, 57), (70_000, 58), (200_000, 5001)]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("length", "k"), [*SHARDS, (70_000, 253), (70_000, 254), (300_000, 20_000)])
def test_encoded_bytes_equal_those_of_the_cpu(device: Device, wire: str, length: int, k: int) -> None:
    rng = np.random.default_rng(k)
    indices = torch.from_numpy(np.sort(rng.choice(length, k, replace=False)).astype(np.uint32))
    for dtype in DTYPES:
        values = (torch.randn(k) * 1e4).to(dtype)
        residual = torch.randn(length)
        left = device.put(residual)
        encoded, verdict, _ = device.kernels.encode(device.put(indices), device.put(values), length, wire, left)
        expected = kernels.encode(indices, values, length, wire=wire, residual=residual)
        assert device.kernels.read_verdict(verdict).fault == NO_FAULT
        assert read_bits(encoded) == expected.tobytes()
        assert have_same_bits(left, residual)
        got_indices, got_values, verdict = device.kernels.decode(encoded, length, k)
        assert device.kernels.read_words(verdict) == [NO_FAULT, NO_FAULT, k, length]
        expected_indices, expected_values = kernels.decode(expected)
        assert read_bits(got_indices) == expected_indices.tobytes()
        assert read_bits(got_values) == expected_values.tobytes()
        dense = torch.randn(length).to(dtype)
        out = device.put(dense)
        finite = kernels.decode_add_(dense, expected, 0.3)
        verdict = device.kernels.decode_add_(out, encoded, 0.3)
        assert device.kernels.read_words(verdict)[:2] == [NO_FAULT, NO_FAULT if finite else 0]
        assert have_same_bits(out, dense)


def test_indices_out_of_order_are_not_encoded(device: Device) -> None:
    for indices, fault_position in (([1, 5, 5], 2), ([5, 1, 9], 1), ([1, 2, 100], 2), ([100, 2, 3], 0)):
        positions, residual = torch.tensor(indices, dtype=torch.uint32), torch.zeros(100)
        left = device.put(residual)
        _, verdict, _ = device.kernels.encode(
            device.put(positions), device.put(torch.full((3,), 0.1)), 100, "bf16", left
        )
        assert device.kernels.read_verdict(verdict).fault == fault_position
        assert have_same_bits(left, residual)


def test_a_buffer_whose_encoding_failed_is_refused_even_if_it_held_a_valid_shard(device: Device) -> None:
    ordered, values = torch.tensor([1, 5, 9], dtype=torch.uint32), torch.ones(3)
    buffer, _, _ = device.kernels.encode(device.put(ordered), device.put(values), 100, "fp32", None)
    disordered = torch.tensor([5, 1, 9], dtype=torch.uint32)
    device.kernels.encode(device.put(disordered), device.put(values), 100, "fp32", None, out=buffer)
    out = device.put(torch.zeros(100))
    verdict = device.kernels.read_verdict(device.kernels.decode_add_(out, buffer, 1.0))
    assert verdict.fault == 2  # not a TopKube buffer
    assert not bool(out.any())


@settings(
    max_examples=choose(50, thorough=150),
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_buffer_is_refused_as_the_cpu_refuses_it(device: Device, data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([50, 66_000, 140_000]))
    k = data.draw(st.integers(0, 40))
    indices = np.sort(np.random.default_rng(k).choice(length, k, replace=False)).astype(np.uint32)
    buffer = kernels.encode(indices, np.ones(k, np.float32), length, wire=data.draw(st.sampled_from(["fp32", "bf16"])))
    damaged = buffer.copy()
    position = data.draw(st.integers(0, buffer.size - 1))
    damaged[position] ^= data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([buffer.size, buffer.size, 8, max(0, position)]))]
    if data.draw(st.booleans()) and damaged.size >= 24:
        damaged[16:24] = kernels.wire._compute_checksum(damaged)  # then only the other fields are wrong
    dense = torch.ones(length)
    try:
        kernels.decode_add_(dense, damaged)
        refused = ""
    except WireError as error:
        refused = str(error)
    out = device.put(torch.ones(length))
    raw = device.put(torch.from_numpy(damaged.copy()))
    verdict = device.kernels.read_verdict(device.kernels.decode_add_(out, raw, 1.0))
    message = ""
    try:
        kernels.wire._raise_fault(damaged.size, verdict.fault, verdict.length, length)
    except WireError as error:
        message = str(error)
    assert message == refused
    assert have_same_bits(out, dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize(("length", "k"), [(1, 1), (40, 3), (8_192, 400), (70_000, 58), (200_000, 5_001)])
def test_rows_are_summed_in_order_and_rounded_once(device: Device, dtype: torch.dtype, length: int, k: int) -> None:
    for wire, count in (("bf16", 5), ("fp32", 1), ("fp16", 3)):
        size = kernels.encoded_size(length, k, wire)
        rows = torch.zeros(count, -(-size // 8) * 8 + 16, dtype=torch.uint8)
        total = torch.zeros(length)
        for row in rows:
            indices, values = kernels.topk(torch.randn(length) * torch.rand(length).round(), k)
            kernels.encode(indices, values, length, wire=wire, out=row[:size])
            assert kernels.decode_add_(total, row[:size])
        expected, on_cpu, out = (
            total.to(dtype),
            torch.ones(length, dtype=dtype),
            device.put(torch.ones(length).to(dtype)),
        )
        assert kernels.sum_rows_(on_cpu, rows, size)
        assert have_same_bits(on_cpu, expected)
        verdicts = device.kernels.sum_rows_(out, device.put(rows), size)
        assert bool(device.kernels.flag_valid_and_finite(verdicts))
        assert have_same_bits(out, expected)


def test_a_row_that_is_damaged_or_not_finite_is_reported(device: Device) -> None:
    length, k = 70_000, 300
    values = torch.randn(k)
    indices = torch.arange(0, length, length // k)[:k].to(torch.uint32)
    size = kernels.encoded_size(length, k, "fp32")
    rows = torch.zeros(4, -(-size // 8) * 8, dtype=torch.uint8)
    for row in rows:
        kernels.encode(indices, values, length, out=row[:size])
    values[7] = torch.inf
    kernels.encode(indices, values, length, out=rows[2, :size])
    out = device.put(torch.ones(length))
    verdicts = device.kernels.sum_rows_(out, device.put(rows), size).cpu()
    is_valid_and_finite = [bool(device.kernels.flag_valid_and_finite(verdict)) for verdict in verdicts]
    assert is_valid_and_finite == [True, True, False, True]
    assert not kernels.sum_rows_(torch.ones(length), rows, size)
    assert bool(out.isinf().any())
    rows[3, size - 5] ^= 1
    out = device.put(torch.ones(length))
    verdicts = device.kernels.sum_rows_(out, device.put(rows), size).cpu()
    assert device.kernels.read_verdict(verdicts[3]).fault != NO_FAULT
    assert bool((out == 1).all())
    untouched = torch.ones(length)
    with pytest.raises(WireError):
        kernels.sum_rows_(untouched, rows, size)
    assert bool((untouched == 1).all())
    for wrong in (rows[:, :-4].contiguous(), rows[:0], rows[0]):
        with pytest.raises(ArgumentError, match="multiple of 8"):
            kernels.sum_rows_(untouched, wrong, size)


def test_the_launches_of_a_sum_of_rows_do_not_grow_with_the_rows() -> None:
    device, length, k = Device("emulated"), 70_000, 700
    size = kernels.encoded_size(length, k, "bf16")
    row = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8)
    kernels.encode(*kernels.topk(torch.randn(length), k), length, wire="bf16", out=row[:size])
    counts = []
    for nodes in (1, 2, 40):
        before = count_launches()
        device.kernels.sum_rows_(torch.empty(length), row.repeat(nodes, 1), size)
        counts.append(count_launches() - before)
    assert counts == [5, 5, 5]
