"""The comparison of the weights of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.step import weights_check
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


@pytest.mark.parametrize("length", [3, 4096, 5000])
def test_a_difference_in_the_last_bit_of_the_last_value_names_the_parameter(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, checksums are sums: they may differ in their lowest bits only."""
    monkeypatch.setattr(
        weights_check, "_compute_checksums", lambda tensors: [int(weights_check._sum_bits(t)) % 2**64 for t in tensors]
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
