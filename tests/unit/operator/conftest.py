"""The operator's controller on an API server in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replica import Replica


@pytest.fixture
def replica() -> Iterator[Replica]:
    """A replica whose controller runs until the test ends."""
    replica = Replica()
    yield replica
    replica.controller.stop()
