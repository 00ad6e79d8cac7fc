"""Rounded values between nodes: what is sent and what remains are the values, also beyond the range of float16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.collectives.codecs import Rounded
from topkube.kernels.parts import align

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def send(codec: Rounded, values: np.ndarray) -> tuple[np.ndarray, bool]:
    row, received = np.zeros(codec.row_bytes, np.uint8), np.zeros_like(values)
    is_finite = codec.pack(values, row)
    codec.unpack_add(received, [row], [1.0])
    return received, is_finite


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=40), st.sampled_from(list(WIDTHS)))
def test_what_is_sent_and_what_remains_are_the_values(numbers: list[float], wire: str) -> None:
    values = np.array(numbers, np.float32)
    rest, codec = values.copy(), Rounded(len(values), wire)
    received, is_finite = send(codec, rest)
    assert is_finite
    assert codec.row_bytes == align(WIDTHS[wire] * len(values))
    np.testing.assert_allclose(received.astype(np.float64) + rest, values, rtol=1e-6, atol=1e-38)


def test_a_value_beyond_float16_arrives_over_several_sends() -> None:
    rest, total, codec = np.array([1e6, -3e5, 2.0], np.float32), np.zeros(3, np.float32), Rounded(3, "fp16")
    for _ in range(16):
        received, is_finite = send(codec, rest)
        assert is_finite
        assert (np.abs(received) <= 65504).all()
        total += received
    assert total.tolist() == [1e6, -3e5, 2.0]
    assert not rest.any()


@pytest.mark.parametrize("wire", WIDTHS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_reported(wire: str, value: float) -> None:
    values = np.array([1.0, value, 2.0], np.float32)
    assert not Rounded(3, wire).pack(values, np.zeros(align(3 * WIDTHS[wire]), np.uint8))
