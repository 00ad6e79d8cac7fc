"""Kernels for many torch tensors at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_are_finite_reads_every_tensor(dtype: torch.dtype) -> None:
    lengths = (0, 1, 7, 4096, 5001)
    assert kernels.are_finite([])
    assert kernels.are_finite([torch.full((length,), 3.0, dtype=dtype) for length in lengths])
    for number, length in enumerate(lengths):
        for place in {0, length // 2, length - 1} if length else ():
            for bad in (math.nan, math.inf, -math.inf):
                tensors = [torch.full((length,), 3.0, dtype=dtype) for length in lengths]
                tensors[number][place] = bad
                assert not kernels.are_finite(tensors), (length, place, bad)


def test_are_finite_refuses_other_tensors() -> None:
    x = torch.zeros(4, 4)
    for tensors, problem in (
        ([x, x.T[:2]], "not contiguous"),
        ([x, x.bfloat16()], r"tensors\[1\] has dtype torch.bfloat16"),
        ([x.double()], "dtype float64"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            kernels.are_finite(tensors)


@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    gaps=st.lists(st.integers(0, 5), min_size=9, max_size=9),
    dtype=st.sampled_from(DTYPES),
)
def test_gather_and_scatter_copy_every_tensor_to_its_place(
    lengths: list[int], gaps: list[int], dtype: torch.dtype
) -> None:
    tensors = [torch.randn(length).to(dtype) for length in lengths]
    starts, expected = list[int](), [torch.full((gaps[0],), 7.0, dtype=dtype)]
    for tensor, gap in zip(tensors, gaps[1:], strict=False):
        starts.append(sum(map(len, expected)))
        expected += [tensor, torch.full((gap,), 7.0, dtype=dtype)]
    whole = torch.cat(expected)
    out = torch.full_like(whole, 7.0)
    assert kernels.gather_(out, tensors, starts) is out
    assert torch.equal(out, whole)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    kernels.scatter_(copies, whole, starts)
    assert all(map(torch.equal, copies, tensors))


def test_gather_and_scatter_refuse_what_does_not_fit() -> None:
    out, x = torch.zeros(10), torch.ones(2, 3)
    for tensors, starts, problem in (
        ([x], [5], "out has 10 elements, too few"),
        ([x], [-1], "out has 10 elements, too few"),
        ([x.T], [0], "not contiguous"),
        ([x.bfloat16()], [0], "has dtype torch.bfloat16, and not torch.float32"),
        ([torch._neg_view(x)], [0], "negative bit"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            kernels.gather_(out, tensors, starts)
        with pytest.raises(ArgumentError, match=problem.replace("out", "values")):
            kernels.scatter_(tensors, out, starts)
    assert not out.any()
