"""The communication thread at the end of a program."""

from __future__ import annotations

import pytest

from topkube.training.ranks.communication_thread import CommunicationThread


@pytest.mark.parametrize(("is_awaited", "calls_at_the_end"), [(True, 3), (False, 1)])
def test_the_end_waits_for_messages_that_other_ranks_wait_for(is_awaited: bool, calls_at_the_end: int) -> None:
    thread, pauses = CommunicationThread(), [60.0, 0.0, None]
    calls = 0

    def advance() -> float | None:
        nonlocal calls
        calls += 1
        return pauses[calls - 1]

    thread.submit(lambda: thread.advance_meanwhile(advance, is_awaited)).result()
    thread.close(60)
    assert calls == calls_at_the_end
