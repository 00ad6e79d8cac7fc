"""The comparison of the weights of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.step import checksums, weights_check
from topkube.training.exchange.step.weights_check import WeightsCheck


class SimulatedAgreement:
    """The agreement of a rank with another rank, whose digest and numbers are given."""

    def __init__(self, digests: list[float], other_numbers: list[list[float]]) -> None:
        self._digests, self._other_numbers = digests, other_numbers
        self.sent: list[list[float]] = []

    def gather(self, values: list[float]) -> Any:
        return np.array(self._digests).reshape(2, 1)

    def maximum(self, values: list[float]) -> Any:
        self.sent.append(values)
        return np.maximum(values, self._other_numbers[len(self.sent) - 1])


@pytest.mark.parametrize("length", [3, 4093, 5000])
def test_a_difference_in_the_last_bit_of_the_last_value_names_the_parameter(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, checksums are sums: they may differ in their lowest bits only."""
    monkeypatch.setattr(
        weights_check, "_compute_checksums", lambda tensors: [int(s) % 2**64 for s in checksums.sum_bits(tensors)]
    )
    checks = []
    for last in (1.0, float(np.nextafter(np.float32(1), np.float32(2)))):
        values = torch.nn.Parameter(torch.tensor([1.0] * (length - 1) + [last]))
        checks.append(WeightsCheck([Parameter(0, "layer.weight", values)], "error", 1))
    digests = [check.compute_digest() for check in checks]
    assert digests[0] != digests[1]
    other: Any = SimulatedAgreement(digests, [[np.inf], [np.inf]])
    checks[1].describe_difference(other, digests[1], False)
    own: Any = SimulatedAgreement(digests, other.sent)
    difference = checks[0].describe_difference(own, digests[0], False)
    assert "rank 1" in difference
    assert "layer.weight differs" in difference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8], ids=str)
def test_sums_of_bits_change_if_values_change_places(dtype: torch.dtype) -> None:
    values = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    swapped, small = values.clone(), values[0, :7]
    swapped[[3, 60]] = swapped[[60, 3]]
    changed = [values.flip(0), values.flip(1), values.t(), values[torch.arange(64).roll(1)], swapped, values.roll(1, 1)]
    sums = checksums.sum_bits([values, *changed, small, small.flip(0), values[:0]]).tolist()
    assert len(set(sums)) == len(sums)
    assert sums[0] == checksums.sum_bits([values.clone()]).tolist()[0]
    assert sums[-1] == 0


def test_sums_of_bits_of_many_tensors_are_those_of_each() -> None:
    tensors = [torch.full((number % 5 + 1,), float(number)) for number in range(150)]
    assert checksums.sum_bits(tensors).tolist() == [int(checksums.sum_bits([tensor])) for tensor in tensors]


def test_sums_of_bits_of_a_large_tensor_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch converts what it adds up to int64: that of a whole embedding would not fit on its GPU."""

    class LargestSum(TorchDispatchMode):
        length = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name().startswith("aten::sum"):
                self.length = max(self.length, args[0].numel())
            return func(*args, **(kwargs or {}))

    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    expected = checksums.sum_bits([values])
    monkeypatch.setattr(checksums, "_PIECE", 5 * checksums._COLUMNS)
    with LargestSum() as largest:
        assert torch.equal(checksums.sum_bits([values]), expected)
    assert 0 < largest.length <= 5 * checksums._COLUMNS
