"""Exchanges that are under way at the same time: an error of one of them is never taken for its end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from topkube.collectives.exchange import Exchanges

WORLD: Any = SimpleNamespace(links=None)


def run_without_messages(rounds: int) -> Iterator[list[Any]]:
    for _ in range(rounds):
        yield []


def fail_after(rounds: int) -> Iterator[list[Any]]:
    yield from run_without_messages(rounds)
    raise ValueError("the hashes differ")


def test_an_exchange_ends_when_its_last_messages_have_arrived() -> None:
    exchanges = Exchanges(WORLD)
    exchanges.start(7, run_without_messages(3))
    assert (exchanges.is_running(7), exchanges.are_running) == (False, False)


def test_an_exchange_that_fails_stays_failed() -> None:
    exchanges = Exchanges(WORLD)
    with pytest.raises(ValueError, match="hashes differ"):
        exchanges.start(0, fail_after(2))
    for _ in range(2):  # the exhausted generator looks like one that has ended
        with pytest.raises(ValueError, match="hashes differ"):
            exchanges.advance()
