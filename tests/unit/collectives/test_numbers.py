"""The numbers that `topkube.reduce` adds up, for more ranks than the tests can start."""

from __future__ import annotations

import numpy as np
import pytest

from topkube.collectives.coordination.numbers import Reducible


def reduce_mean(value: int, other: int, ranks: int) -> float:
    """Return the mean of `ranks` ranks, of which one passes `other`, and the rest `value`."""
    own, different = Reducible(value, "mean"), Reducible(other, "mean")
    mean: float = own.restore(own.sent * (ranks - 1) + different.sent, ranks)
    return mean


@pytest.mark.parametrize("ranks", [2, 7, 14, 1000, 4096])
@pytest.mark.parametrize("value", [0, 1, -1, 10**15 + 7, -(10**15) - 7, 2**53 - 1, 1 - 2**53, -(2**63), 2**62])
def test_the_mean_of_equal_integers_is_that_integer(value: int, ranks: int) -> None:
    assert reduce_mean(value, value, ranks) == value


@pytest.mark.parametrize("ranks", [2, 7, 14, 1000, 4096])
@pytest.mark.parametrize("value", [0, 5, -5, 10**6, 10**15, -(10**15)])
def test_means_of_integers_are_rounded_once(value: int, ranks: int) -> None:
    for other in (value - 1, value + 1):
        assert reduce_mean(value, other, ranks) == (value * (ranks - 1) + other) / ranks


def test_means_of_arrays_keep_their_shape() -> None:
    own = Reducible(np.array([[1, 2], [3, 2**60]]), "mean")
    assert own.restore(own.sent * 3, 3).tolist() == [[1.0, 2.0], [3.0, 2.0**60]]
