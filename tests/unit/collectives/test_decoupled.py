"""All-reduces in two halves: the limit on pieces with different tags. Real ranks are in tests/mpi."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from topkube.collectives import decoupled
from topkube.errors import ArgumentError


def test_pieces_whose_tags_would_be_equal_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoupled, "TAGS", 10)
    pieces: Any = object.__new__(decoupled.DecoupledAllReduce)
    pieces.world, pieces._halved_pieces = SimpleNamespace(cache={}), {}
    assert [pieces._take_numbers(count) for count in (4, 6)] == [0, 4]
    pieces._halved_pieces = dict.fromkeys(range(10))
    with pytest.raises(ArgumentError, match="too many for two halves"):
        pieces._take_numbers(1)
