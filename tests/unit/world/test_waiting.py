"""Waits for messages: how far messages advance in a wait, and the size of their segments."""

from __future__ import annotations

import os

import pytest

from topkube import waiting
from topkube.environment import tune_messages


def test_messages_advance_until_a_call_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that sleeps after each call of MPI would move 64 KiB per sleep."""
    now, calls = 0.0, 0
    monkeypatch.setattr(waiting.time, "thread_time", lambda: now)

    def advance(moving_calls: int, last_call: int) -> bool:
        nonlocal now, calls
        calls += 1
        now += 50e-6 if calls <= moving_calls else 1e-6
        return calls == last_call

    assert not waiting.advance_messages(lambda: advance(moving_calls=5, last_call=100))
    assert calls == 6
    calls = 0
    assert waiting.advance_messages(lambda: advance(moving_calls=5, last_call=3))
    assert calls == 3
    calls = 0
    assert not waiting.advance_messages(lambda: advance(moving_calls=10**6, last_call=10**6))
    assert calls < 1000  # other work of the thread waits meanwhile


def test_a_size_of_segments_that_a_person_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "16k")
    tune_messages()
    assert os.environ["UCX_TCP_TX_SEG_SIZE"] == "16k"
    monkeypatch.delenv("UCX_TCP_TX_SEG_SIZE")
    tune_messages()
    assert os.environ["UCX_TCP_TX_SEG_SIZE"] == "64k"
