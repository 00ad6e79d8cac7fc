"""Sparse gradients with so many rows that ranks reduce the whole tensor. tests/mpi has several ranks."""

from __future__ import annotations

import pytest
import torch

import topkube
from topkube.training.exchange.reduction.sparse_gradients import _average_whole

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3), (5,)])
def test_the_whole_tensor_has_the_same_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    topkube.init()
    torch.manual_seed(0)
    outer = shape if len(shape) == 1 else shape[:-1]
    indices = torch.rand(outer).gt(0.4).nonzero().t()
    values = torch.randn(indices.shape[1], *shape[len(outer) :]).to(dtype)
    values[0] = 0  # a row of zeros is a row
    gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    mean = _average_whole(topkube.world.current(), gradient)
    assert (mean.dtype, mean.shape, mean.is_coalesced()) == (dtype, shape, True)
    assert torch.equal(mean.indices(), gradient.indices())
    assert torch.equal(mean.values(), gradient.values())
