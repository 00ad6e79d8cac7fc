"""The communication thread at the end of a program."""

from __future__ import annotations

import pytest

from topkube.training.ranks.communication_thread import CommunicationThread


@pytest.mark.parametrize(("is_awaited", "left"), [(True, 0), (False, 2)])
def test_the_end_waits_for_messages_that_other_ranks_wait_for(is_awaited: bool, left: int) -> None:
    thread, calls = CommunicationThread(), [3]

    def advance() -> float | None:
        calls[0] -= 1
        return None if calls[0] == 0 else 60.0 if calls[0] == 2 else 0.0

    thread.submit(lambda: thread.advance_meanwhile(advance, is_awaited)).result()
    thread.close(60)
    assert calls == [left]
