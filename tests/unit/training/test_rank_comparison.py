"""The comparison of ranks before their first exchange, if a rank is in another place of its step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.rank_comparison import RankComparison


def test_ranks_that_differ_in_no_value_are_said_to_be_in_different_places() -> None:
    """Another rank's numbers were those of its announcement of a batch: it has left out a backward."""
    agreement: Any = SimpleNamespace(
        maximum=lambda values: np.maximum(values, 5.0), gather=lambda values: np.array([values, values])
    )
    world: Any = SimpleNamespace(size=2)
    comparison = RankComparison(world, [], AggregationSettings.from_settings(Settings()), agreement, "auto")
    with pytest.raises(TrainingError, match=r"different places of a step.*a rank left out a batch"):
        comparison.compare()
