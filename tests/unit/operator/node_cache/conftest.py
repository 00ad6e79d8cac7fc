"""The disk of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from topkube_operator.node_cache.volume import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path / "node")
