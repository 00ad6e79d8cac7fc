"""The guard of error feedback in the weights: its measurements, its actions and its messages."""

from __future__ import annotations

import math

import pytest

from topkube.training.node_weights.guard import MEASURE_EVERY, MOST_SPREAD, MOST_UNSENT, DriftGuard


def test_the_guard_measures_unsent_changes_and_the_distance_of_nodes() -> None:
    guard = DriftGuard(4, "onebit")
    assert guard.unsent_ratio is guard.weight_spread is None
    assert guard.check_drift(change=25.0, unsent=16.0, agreed=2500.0) == ""
    assert guard.unsent_ratio == pytest.approx(4 / 3)
    assert guard.weight_spread == pytest.approx(0.08)
    assert guard.period == 4
    assert guard.check_drift(change=9.0, unsent=0.0, agreed=900.0) == ""
    assert guard.unsent_ratio == 0
    assert guard.check_drift(change=0.0, unsent=0.0, agreed=0.0) == ""


@pytest.mark.parametrize(
    ("change", "left", "agreed"),
    [
        (1.0, 1 - 0.5 / (1 + MOST_UNSENT**2), 1e6),
        (1.0, 0.4, 0.39 / MOST_SPREAD**2),
        (1.0, 1.0, 1e6),
        (math.inf, math.inf, 1e6),
        (math.nan, math.nan, math.nan),
    ],
)
def test_beyond_a_limit_the_guard_halves_the_period_and_warns_once_at_a_period_of_one(
    change: float, left: float, agreed: float
) -> None:
    guard = DriftGuard(6, "onebit")
    messages = [guard.check_drift(change, left, agreed) for _ in range(4)]
    assert guard.period == 1
    assert "onebit now exchanges every 3 steps" in messages[0]
    assert "onebit now exchanges in every step" in messages[1]
    assert "lower the learning rate" in messages[2]
    assert messages[3] == ""


def test_the_guard_measures_the_first_of_every_sixteen_exchanges() -> None:
    guard = DriftGuard(5, "onebit")
    due = [steps for steps in range(5, 1000, 5) if guard.is_due(steps)]
    assert due == [5 + 5 * MEASURE_EVERY * i for i in range(len(due))]
    assert len(due) == 13


def test_a_shortened_period_is_kept_unless_the_job_changes_its_own() -> None:
    guard = DriftGuard(8, "onebit")
    guard.check_drift(1.0, 1.0, 1.0)
    saved = guard.save()
    for period, expected in ((8, 4), (2, 2)):
        resumed = DriftGuard(period, "onebit")
        resumed.load(saved)
        assert resumed.period == expected
    resumed.load(None)
    assert resumed.period == 2
